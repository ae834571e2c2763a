"""The jobs of a cluster through the protocol that commands use, against a cluster that is kept in memory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any, cast

import pytest

from resile.api.kinds import registry
from resile.api.manifests.documents import load_documents
from resile.api.manifests.reader import load_manifests
from resile.chaos.faults import FreezeNode, KillNode
from resile.client.base import Document, EventView, Listable, NodeFailure, Query, SubmitOptions
from resile.client.cluster import backend
from resile.client.cluster.backend import ClusterJobs
from resile.client.cluster.connection import Cluster
from resile.client.errors import CommandError, NotUsableError
from resile.client.target import Target
from resile.kube.client import Client
from resile.kube.errors import KubeError
from tests.support.fake_kube import FakeKube
from tests.support.kinds import ELASTIC_JOBS
from tests.support.toy_kind import TOY, ToyKind, toys

__all__ = ["toys"]

kube: Any = backend.kube
MANIFEST = """
apiVersion: elastic.iml.github.io/v1alpha1
kind: ElasticJob
metadata: {name: demo}
spec: {replicaSpecs: {worker: {replicas: 1, template: {spec: {containers: [{name: main, image: i}]}}}}}
"""


KIND = {"apiVersion": ELASTIC_JOBS.api_version, "kind": ELASTIC_JOBS.name}


class FakeWatch:
    """What a watch of the cluster shows; its news are the cluster's steps."""

    def __init__(self, cluster: FakeCluster, kinds: list[Any]) -> None:
        self._cluster = cluster
        self._kinds = kinds

    async def __aenter__(self) -> FakeWatch:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._cluster.watches_closed += 1

    def all(self, kind: Any) -> list[dict[str, Any]]:
        return list(self._cluster.objects.get(kind, {}).values()) if kind in self._kinds else []

    async def change(self, seconds: float) -> bool:
        await asyncio.sleep(0)
        if not self._cluster.steps:
            await asyncio.sleep(0.01)
            return False
        self._cluster.steps.pop(0)()
        return True


class FakeCluster:
    """Objects by kind and name, and what happens to them while a command waits."""

    namespace, name, server = "lab", "lab", "https://nowhere"

    def __init__(self) -> None:
        self.objects: dict[Any, dict[str, dict[str, Any]]] = {}
        self.steps: list[Any] = []
        self.logs: dict[str, list[str]] = {}
        self.patches: list[dict[str, Any]] = []
        self.watches_closed = 0

    def put(self, kind: Any, name: str, /, **parts: Any) -> None:
        metadata = {"name": name, "namespace": "lab", "uid": f"uid-{name}", **parts.pop("metadata", {})}
        self.objects.setdefault(kind, {})[name] = {"metadata": metadata, **parts}

    def job(self, phase: str, **status: Any) -> None:
        spec = {"replicaSpecs": {"worker": {"replicas": 1}}}
        self.put(
            ELASTIC_JOBS,
            "demo",
            apiVersion=ELASTIC_JOBS.api_version,
            kind="ElasticJob",
            spec=spec,
            status={"phase": phase, **status},
        )

    def pod(self, number: int, state: str = "running", phase: str = "Running", uid: str = "") -> None:
        name = f"demo-edljob-worker-{number}"
        prefix = "elasticjob.dlrover"
        labels = {f"{prefix}/name": "demo", f"{prefix}/rank-index": "0", f"{prefix}/replica-type": "worker"}
        container = {"name": "main", "ready": state == "running", "state": {state: {}}}
        status = {"phase": phase, "containerStatuses": [container]}
        metadata = {"labels": labels, "uid": uid or f"uid-{name}"}
        self.put(kube.PODS, name, metadata=metadata, spec={"containers": [{"name": "main"}]}, status=status)

    def event(self, reason: str) -> None:
        involved = {"kind": "ElasticJob", "name": "demo", "uid": "uid-demo"}
        time = {"lastTimestamp": "2026-11-16T02:00:00Z", "message": reason}
        self.put(kube.EVENTS, f"demo.{reason}", involvedObject=involved, reason=reason, **time)

    def end(self, phase: str, **status: Any) -> None:
        self.job(phase, **status)
        self.pod(0, "terminated", "Succeeded" if phase == "Succeeded" else "Failed")
        self.event(f"Job{phase}")

    async def all(self, wanted: Any) -> list[dict[str, Any]]:
        return list(self.objects.get(wanted.kind, {}).values())

    async def get(self, kind: Any, name: str, namespace: str = "") -> dict[str, Any] | None:
        return self.objects.get(kind, {}).get(name)

    async def apply(self, kind: Any, item: dict[str, Any]) -> dict[str, Any]:
        self.put(
            kind, item["metadata"]["name"], apiVersion=ELASTIC_JOBS.api_version, kind="ElasticJob", spec=item["spec"]
        )
        return self.objects[kind][item["metadata"]["name"]]

    async def patch(self, kind: Any, name: str, patch: dict[str, Any], *_: Any, **__: Any) -> dict[str, Any]:
        self.patches.append(patch)
        return {}

    async def delete(self, kind: Any, name: str, grace: int | None = None) -> None:
        self.objects.get(kind, {}).pop(name, None)

    async def log(self, pod: str, **how: Any) -> AsyncIterator[str]:
        for number, line in enumerate(self.logs.get(pod, [])):
            yield f"2026-11-16T02:00:00.{number:09}Z {line}" if how.get("follow") else line

    def watch(self, *wanted: Any) -> FakeWatch:
        return FakeWatch(self, [one.kind for one in wanted])

    async def close(self) -> None:
        pass


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> FakeCluster:
    made = FakeCluster()
    monkeypatch.setattr(backend, "connect", lambda target: made)
    return made


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def jobs(cluster: FakeCluster, said: list[str]) -> Iterator[ClusterJobs]:
    with ClusterJobs(Target(cluster=True), said.append) as made:
        yield made


def test_a_watch_shows_what_there_is_and_every_change_until_the_job_is_over(
    cluster: FakeCluster, jobs: ClusterJobs
) -> None:
    cluster.job("Running")
    cluster.pod(0)
    cluster.steps = [lambda: cluster.job("Restarting"), lambda: cluster.end("Succeeded")]
    phases = [found.items[0].view.phase for found in jobs.watch(Query(what=Listable.JOBS))]  # type: ignore[union-attr]
    assert phases == ["Running", "Restarting", "Succeeded"]


def test_a_watch_that_is_left_early_is_closed_with_the_client(cluster: FakeCluster, said: list[str]) -> None:
    cluster.job("Running")
    with ClusterJobs(Target(cluster=True), said.append) as jobs:
        assert next(jobs.watch(Query(what=Listable.JOBS))).items[0].name == "demo"
        assert cluster.watches_closed == 0
    assert cluster.watches_closed == 1


def test_where_there_are_no_jobs_the_first_look_says_so_and_is_the_only_one(jobs: ClusterJobs) -> None:
    assert [found.nothing for found in jobs.watch(Query(what=Listable.NODES))] == [True]


def test_events_name_what_they_are_about(cluster: FakeCluster, jobs: ClusterJobs) -> None:
    cluster.job("Succeeded")
    cluster.event("JobSucceeded")
    [found] = jobs.watch(Query(what=Listable.EVENTS, job="demo"))
    view = found.items[0].view
    assert isinstance(view, EventView)
    assert (found.items[0].name, view.object, view.job) == ("demo.JobSucceeded", "elasticjob/demo", "demo")


def test_a_submitted_job_is_followed_to_its_end_and_its_failure_told(cluster: FakeCluster, jobs: ClusterJobs) -> None:
    documents = [Document(*pair) for pair in zip(load_documents(MANIFEST), load_manifests(MANIFEST), strict=True)]
    [submitted] = jobs.submit(documents, SubmitOptions())
    assert (submitted.name, submitted.namespace, submitted.how) == ("demo", "lab", "created")
    failure = {"node": "demo-edljob-worker-0", "message": "it broke", "time": "2026-11-16T02:00:00Z"}
    cluster.steps = [lambda: cluster.job("Running"), lambda: cluster.end("Failed", lastFailure=failure)]
    cluster.logs["demo-edljob-worker-0"] = ["no such file"]
    moments = []
    with jobs.follow(submitted) as following:
        while not moments or not moments[-1].last:
            moments.append(following.poll())
        sentence = "demo-edljob-worker-0: it broke, at 2026-11-16T02:00:00Z"
        assert following.failure() == NodeFailure(sentence, ["no such file"])
    assert [moment.job.phase for moment in moments] == ["Created", "Running", "Failed"]
    assert [event.reason for moment in moments for event in moment.news] == ["JobFailed"]


def test_a_followed_job_that_is_deleted_is_told_in_one_sentence(cluster: FakeCluster, jobs: ClusterJobs) -> None:
    documents = [Document(*pair) for pair in zip(load_documents(MANIFEST), load_manifests(MANIFEST), strict=True)]
    [submitted] = jobs.submit(documents, SubmitOptions())
    cluster.steps = [lambda: cluster.objects[ELASTIC_JOBS].clear()]
    with jobs.follow(submitted) as following:
        following.poll()
        with pytest.raises(CommandError, match="the job was deleted"):
            following.poll()


@pytest.mark.parametrize("follow", [False, True])
def test_the_logs_of_several_pods_come_line_by_line_with_their_names(
    cluster: FakeCluster, jobs: ClusterJobs, follow: bool
) -> None:
    cluster.job("Succeeded")
    for number in (0, 1):
        cluster.pod(number, "terminated", "Succeeded")
        cluster.logs[f"demo-edljob-worker-{number}"] = ["begin", "end"]
    lines = [line for batch in jobs.logs("demo", master=False, tail=None, follow=follow) for line in batch]
    assert sorted((line.pod[-1], line.text, line.alone) for line in lines) == [
        (number, text, False) for number in "01" for text in (b"begin", b"end")
    ]


def test_a_killed_pod_is_waited_for_until_its_replacement_runs(cluster: FakeCluster, jobs: ClusterJobs) -> None:
    cluster.job("Running")
    cluster.pod(0)
    cluster.steps = [lambda: cluster.pod(1, "waiting", "Pending"), lambda: cluster.pod(1)]
    injected, signs = jobs.inject("demo", KillNode("worker-0"))
    assert injected.what == "killed demo-edljob-worker-0"
    assert "demo-edljob-worker-0" not in cluster.objects[kube.PODS]
    told = [sign for together in signs for sign in together]
    assert [sign.what for sign in told] == ["demo-edljob-worker-1 was created", "demo-edljob-worker-1 ran"]
    with pytest.raises(NotUsableError, match="only a node or the master"):
        jobs.inject("demo", FreezeNode("worker-1"))


def test_no_job_is_deleted_if_one_name_is_unknown(cluster: FakeCluster, jobs: ClusterJobs) -> None:
    cluster.job("Running")
    with pytest.raises(CommandError, match="there is no job 'other'"):
        jobs.delete(["demo", "other"], now=False, wait=True, keep_logs=False)
    assert "demo" in cluster.objects[ELASTIC_JOBS]
    assert [deleted.name for deleted in jobs.delete(["demo"], now=False, wait=True, keep_logs=False)] == ["demo"]
    assert "demo" not in cluster.objects[ELASTIC_JOBS]


def test_a_job_is_scaled_and_suspended_by_what_is_written_to_it(cluster: FakeCluster, jobs: ClusterJobs) -> None:
    cluster.job("Running")
    jobs.scale("demo", {"worker": 3})
    assert (jobs.suspend("demo"), jobs.resume("demo")) == (True, False)
    assert cluster.patches == [{"spec": {"replicas": 3}}, {"spec": {"suspend": True}}]
    cluster.job("Succeeded")
    with pytest.raises(CommandError, match=r"is over \(Succeeded\); nothing was changed"):
        jobs.scale("demo", {"worker": 3})


class OneKind(FakeKube):
    """An API server that has the CustomResourceDefinitions of DLRover's kinds and no others."""

    context, server = "lab", "https://nowhere"
    without: tuple[Any, ...] = (TOY,)

    def _check(self, kind: Any) -> None:
        if kind in [kube.of(one) for one in self.without]:
            raise KubeError("the server could not find the requested resource", code=404)

    async def list(self, kind: Any, *args: Any, **more: Any) -> Any:
        self._check(kind)
        return await super().list(kind, *args, **more)

    async def get(self, kind: Any, *args: Any) -> Any:
        self._check(kind)
        return await super().get(kind, *args)

    async def close(self) -> None:
        pass


@pytest.fixture
def one_kind(monkeypatch: pytest.MonkeyPatch) -> OneKind:
    made = OneKind()
    monkeypatch.setattr(backend, "connect", lambda target: Cluster(cast(Client, made), "lab"))
    job = {"metadata": {"name": "demo", "namespace": "lab"}, "status": {"phase": "Succeeded"}, **KIND}
    made.put(ELASTIC_JOBS, job)
    return made


@pytest.mark.parametrize("what", Listable)
def test_a_registered_kind_that_is_not_installed_is_passed_over_by_listings(
    one_kind: OneKind, toys: ToyKind, what: Listable
) -> None:
    with ClusterJobs(Target(cluster=True), print) as jobs:
        found = next(jobs.watch(Query(what=what)))
    assert [item.name for item in found.items] == (["demo"] if what is Listable.JOBS else [])


def test_jobs_are_found_by_name_if_another_kind_is_not_installed(one_kind: OneKind, toys: ToyKind) -> None:
    with ClusterJobs(Target(cluster=True), print) as jobs:
        assert jobs.kind_of("demo").name == "elasticjob"
        with pytest.raises(CommandError, match="there is no job 'dema' in namespace lab of the cluster; did you mean"):
            jobs.kind_of("dema")


@pytest.mark.parametrize("several", [False, True])
def test_where_no_kind_is_installed_every_command_says_how_to_install_them(
    one_kind: OneKind, request: pytest.FixtureRequest, several: bool
) -> None:
    if several:
        request.getfixturevalue("toys")
    one_kind.without = (TOY, *registry.kinds())
    with ClusterJobs(Target(cluster=True), print) as jobs:
        for ask in (lambda: next(jobs.watch(Query(what=Listable.JOBS))), lambda: jobs.kind_of("demo")):
            with pytest.raises(CommandError, match=r"knows no .*; `make deploy`"):
                ask()
