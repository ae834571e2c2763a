"""The reconcilers around the decisions: what is written, in which order, and what a stale informer must not cause."""

from __future__ import annotations

from typing import Any, cast

import pytest

from resile.kube.client import Client
from resile.kube.errors import KubeError
from resile.kube.informer import Informer, Key, key_of
from resile.kube.kinds import CONFIG_MAPS, PODS, SECRETS
from resile.operator import intervals
from resile.operator.jobs.reconciler import JobReconciler
from resile.operator.metrics import Metrics
from resile.operator.plans import PlanReconciler
from resile.operator.workqueue import TryAgain
from tests.operator.objects import NOW, UID, job, plan, pod
from tests.support.fake_kube import FakeKube
from tests.support.kinds import ELASTIC_JOB, ELASTIC_JOBS, SCALE_PLAN, SCALE_PLANS

KEY = Key("red", "mnist")
MASTER = "elasticjob-mnist-dlrover-master"
TOKEN, TLS = "elasticjob-mnist-token", "elasticjob-mnist-tls"
ONCE = [(SECRETS, TOKEN), (SECRETS, TLS), (CONFIG_MAPS, MASTER)]


class Still:
    """An informer that shows what the test says."""

    def __init__(self) -> None:
        self.shown: dict[Key, dict[str, Any]] = {}

    def get(self, key: Key) -> dict[str, Any] | None:
        return self.shown.get(key)

    def show(self, item: dict[str, Any]) -> None:
        self.shown[key_of(item)] = item


class Stage:
    def __init__(self) -> None:
        self.cluster = FakeKube()
        self.jobs, self.pods, self.services, self.plans = Still(), Still(), Still(), Still()
        self.now = NOW
        self.reconciler = self.another_operator()
        real, jobs = cast(Client, self.cluster), cast(Informer, self.jobs)
        self.plan_reconciler = PlanReconciler(
            SCALE_PLAN, real, cast(Informer, self.plans), jobs, clock=lambda: self.now
        )

    def another_operator(self) -> JobReconciler:
        """One that has seen nothing yet."""
        informers = [cast(Informer, one) for one in (self.jobs, self.pods, self.services)]
        return JobReconciler(
            ELASTIC_JOB, cast(Client, self.cluster), *informers, "resile:1", Metrics(), clock=lambda: self.now
        )

    def submit(self, item: dict[str, Any]) -> None:
        self.jobs.show(self.cluster.put(ELASTIC_JOBS, item))

    async def reconcile(self) -> None:
        await self.reconciler.reconcile(KEY)
        self.jobs.show(self.cluster.objects["ElasticJob", *KEY])
        for still, kind in ((self.pods, "Pod"), (self.services, "Service")):
            there = self.cluster.objects.get((kind, "red", MASTER))
            if there is not None:
                still.show(there)

    def secret(self, name: str) -> dict[str, Any]:
        return self.cluster.objects["Secret", "red", name]

    def names(self, kind: str) -> list[str]:
        return [key[2] for key in self.cluster.objects if key[0] == kind]

    def reasons(self) -> list[str]:
        return [item["reason"] for key, item in self.cluster.objects.items() if key[0] == "Event"]


@pytest.fixture
def stage() -> Stage:
    return Stage()


async def test_a_new_job_gets_everything_a_master_needs(stage: Stage) -> None:
    stage.submit(job())
    await stage.reconcile()
    for kind in ("Pod", "Service", "ServiceAccount", "Role", "RoleBinding", "ConfigMap"):
        assert stage.names(kind) == [MASTER], kind
    assert stage.names("Secret") == [TLS, TOKEN]
    assert stage.reasons() == ["MasterCreated"]
    assert stage.cluster.objects["ElasticJob", *KEY]["status"]["phase"] == "Created"


async def test_the_secrets_and_the_journal_are_never_written_again(stage: Stage) -> None:
    stage.submit(job())
    await stage.reconcile()
    before = [stage.cluster.objects[kind.name, "red", name] for kind, name in ONCE]
    stage.cluster.drop(PODS, "red", MASTER)
    stage.pods.shown.clear()
    await stage.reconcile()
    assert stage.names("Pod") == [MASTER]
    assert stage.reasons() == ["MasterCreated", "MasterRestarted"]
    assert before == [stage.cluster.objects[kind.name, "red", name] for kind, name in ONCE]


@pytest.mark.parametrize(("kind", "name"), ONCE)
async def test_what_an_earlier_job_of_this_name_left_is_waited_out_not_adopted(
    stage: Stage, kind: Any, name: str
) -> None:
    old = {"name": name, "namespace": "red", "ownerReferences": [{"uid": "another", "controller": True}]}
    stage.cluster.put(kind, {"metadata": old})
    stage.submit(job())
    with pytest.raises(TryAgain, match="earlier job"):
        await stage.reconcile()
    assert stage.names("Pod") == []
    stage.cluster.drop(kind, "red", name)
    stage.jobs.show(stage.cluster.objects["ElasticJob", *KEY])
    await stage.reconcile()
    assert stage.names("Pod") == [MASTER]


async def test_a_job_from_before_there_were_certificates_gets_one_and_keeps_its_token_and_its_master(
    stage: Stage,
) -> None:
    owner = [{"uid": UID, "controller": True}]
    metadata = {"name": TOKEN, "namespace": "red", "ownerReferences": owner}
    stage.cluster.put(SECRETS, {"metadata": metadata, "data": {"token": "b2xk"}})
    stage.submit(job("Running", "JobRunning"))
    stage.pods.show(stage.cluster.put(PODS, pod(uid="old")))
    await stage.reconcile()
    given, pair = stage.secret(TOKEN), stage.secret(TLS)
    assert given["data"] == {"token": "b2xk", "ca.crt": pair["data"]["tls.crt"]}
    assert stage.cluster.objects["Pod", "red", MASTER]["metadata"]["uid"] == "old"
    assert stage.reasons() == []


@pytest.mark.parametrize("name", [TOKEN, TLS])
async def test_a_secret_that_is_deleted_under_way_comes_back_as_it_was(stage: Stage, name: str) -> None:
    stage.submit(job())
    await stage.reconcile()
    before = stage.secret(name)["data"]
    stage.cluster.drop(SECRETS, "red", name)
    await stage.reconcile()
    assert name not in stage.names("Secret"), "what a running master needs is looked after now and then, not always"
    stage.now += intervals.RECHECK
    await stage.reconcile()
    assert stage.secret(name)["data"] == before
    assert stage.reasons() == ["MasterCreated", "SecretRestored"]


@pytest.mark.parametrize("name", [TOKEN, TLS])
async def test_a_secret_that_nobody_remembers_is_made_anew_and_its_master_with_it(stage: Stage, name: str) -> None:
    stage.submit(job())
    await stage.reconcile()
    before = stage.secret(name)["data"]
    stage.cluster.drop(SECRETS, "red", name)
    another = stage.another_operator()
    await another.reconcile(KEY)
    assert stage.secret(name)["data"] != before
    assert stage.secret(TOKEN)["data"]["ca.crt"] == stage.secret(TLS)["data"]["tls.crt"]
    assert stage.names("Pod") == []
    assert stage.reasons() == ["MasterCreated", "SecretReplaced"]


@pytest.mark.parametrize("name", [TOKEN, TLS])
@pytest.mark.parametrize("verb", ["apply", "delete"])
async def test_a_master_that_holds_an_old_secret_goes_whatever_failed_when_the_new_one_was_made(
    stage: Stage, name: str, verb: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage.submit(job())
    await stage.reconcile()
    stage.cluster.drop(SECRETS, "red", name)
    stage.reconciler = stage.another_operator()

    async def fail(*_: Any, **__: Any) -> None:
        raise KubeError("the API server cannot be reached")

    with monkeypatch.context() as broken:
        broken.setattr(stage.cluster, verb, fail)
        with pytest.raises(KubeError):
            await stage.reconcile()
    assert stage.names("Pod") == [MASTER]
    stage.jobs.show(stage.cluster.objects["ElasticJob", *KEY])
    await stage.reconcile()
    assert stage.names("Pod") == []
    stage.pods.shown.clear()
    await stage.reconcile()
    stage.now += intervals.RECHECK
    await stage.reconcile()
    assert stage.names("Pod") == [MASTER], "the next one has the new ones, and stays"
    assert stage.reasons().count("MasterRestarted") == 1


async def test_a_secret_that_was_restored_is_the_same_to_the_next_operator(stage: Stage) -> None:
    stage.submit(job())
    await stage.reconcile()
    master = stage.cluster.objects["Pod", "red", MASTER]["metadata"]["uid"]
    for _ in range(2):
        stage.cluster.drop(SECRETS, "red", TOKEN)
        stage.now += intervals.RECHECK
        await stage.reconcile()
    stage.reconciler = stage.another_operator()
    await stage.reconcile()
    assert stage.cluster.objects["Pod", "red", MASTER]["metadata"]["uid"] == master
    assert "SecretReplaced" not in stage.reasons()


async def test_an_informer_that_is_behind_does_not_cost_the_new_master_its_life(stage: Stage) -> None:
    stage.submit(job("Running", "JobRunning"))
    stage.cluster.put(PODS, pod(uid="new"))
    stage.pods.show(pod("Failed", uid="old", exit_code=1))
    await stage.reconciler.reconcile(KEY)
    assert stage.cluster.objects["Pod", "red", MASTER]["metadata"]["uid"] == "new"


async def test_a_status_that_the_master_wrote_in_between_is_not_overwritten(stage: Stage) -> None:
    stage.submit(job("Running", "JobRunning"))
    stage.pods.show(pod("Succeeded", exit_code=0))
    stage.cluster.put(ELASTIC_JOBS, job("Failed", "OutOfBudget", "worker-1 crashed"))
    with pytest.raises(TryAgain):
        await stage.reconciler.reconcile(KEY)
    assert stage.cluster.objects["ElasticJob", *KEY]["status"]["reason"] == "OutOfBudget"


async def test_a_pod_that_the_api_server_refuses_is_explained_once(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    create = stage.cluster.create

    async def refuse(kind: Any, item: Any) -> Any:
        if kind is PODS:
            raise KubeError("exceeded quota: small", code=403)
        return await create(kind, item)

    monkeypatch.setattr(stage.cluster, "create", refuse)
    stage.submit(job())
    for _ in range(3):
        with pytest.raises(KubeError):
            await stage.reconciler.reconcile(KEY)
        stage.jobs.show(stage.cluster.objects["ElasticJob", *KEY])
    status = stage.cluster.objects["ElasticJob", *KEY]["status"]
    assert (status["phase"], status["message"]) == (
        "Pending",
        "the master's pod cannot be created: exceeded quota: small",
    )
    assert stage.reasons() == ["MasterCannotStart"]


async def test_when_their_time_is_over_only_the_pods_of_this_job_go(stage: Stage) -> None:
    ended = job(
        "Succeeded",
        inner={"completionTime": "2027-01-15T07:00:00Z"},
        annotations={"ttl_seconds_after_finished": "60"},
    )
    stage.submit(ended)
    for name, owner in (("mnist-edljob-worker-0", UID), ("mnist-edljob-worker-1", UID), ("stranger", "another")):
        stage.cluster.put(PODS, pod("Succeeded", uid=name, owner=owner, metadata={"name": name}))
    await stage.reconcile()
    await stage.reconcile()
    assert stage.names("Pod") == ["stranger"]
    assert stage.reasons() == ["PodsRemoved"]


async def test_two_jobs_of_one_name_in_two_namespaces_never_meet(stage: Stage) -> None:
    stage.submit(job("Running", "JobRunning"))
    stage.submit(job(namespace="blue", uid="blue-uid"))
    stage.pods.show(pod())
    await stage.reconciler.reconcile(Key("blue", "mnist"))
    made = stage.cluster.objects["Pod", "blue", MASTER]
    assert made["metadata"]["ownerReferences"][0]["uid"] == "blue-uid"
    assert ("Pod", "red", MASTER) not in stage.cluster.objects


async def test_a_plan_is_not_refused_because_a_mirror_is_behind(stage: Stage) -> None:
    stage.now = NOW + 60
    stage.plans.show(stage.cluster.put(SCALE_PLANS, plan()))
    stage.cluster.put(ELASTIC_JOBS, job("Running"))
    await stage.plan_reconciler.reconcile(Key("red", "up"))
    assert stage.cluster.objects["ScalePlan", "red", "up"]["status"] == {}


async def test_a_refused_plan_says_why(stage: Stage) -> None:
    stage.now = NOW + 60
    stage.plans.show(stage.cluster.put(SCALE_PLANS, plan()))
    await stage.plan_reconciler.reconcile(Key("red", "up"))
    status = stage.cluster.objects["ScalePlan", "red", "up"]["status"]
    assert (status["phase"], status["reason"]) == ("Failed", "JobNotFound")
    assert stage.reasons() == ["JobNotFound"]


def with_image(image: str, **given: Any) -> dict[str, Any]:
    """A running job whose master has an image of its own."""
    template = {"spec": {"containers": [{"name": "main", "image": image}]}}
    return job("Running", "JobRunning", master={"template": template}, **given)


@pytest.mark.parametrize("saw_it_well", [True, False], ids=["the same operator", "another operator"])
async def test_a_master_lost_while_the_manifest_is_wrong_comes_back_as_it_was(stage: Stage, saw_it_well: bool) -> None:
    if saw_it_well:
        stage.submit(with_image("master:1"))
        await stage.reconcile()
        stage.cluster.drop(PODS, "red", MASTER)
        stage.pods.shown.clear()
    wrong = with_image("master:1", generation=2)
    wrong["spec"]["replicaSpecs"]["worker"]["replicas"] = "two"
    stage.submit(wrong)
    await stage.reconcile()
    made = stage.cluster.objects["Pod", "red", MASTER]
    assert made["spec"]["containers"][0]["image"] == "master:1"
    assert stage.jobs.shown[KEY]["status"]["phase"] == "Running"


async def test_a_master_comes_back_even_if_its_own_part_of_the_manifest_is_wrong(stage: Stage) -> None:
    wrong = with_image("master:1")
    wrong["spec"]["replicaSpecs"]["dlrover-master"] = {"template": "nonsense"}
    stage.submit(wrong)
    await stage.reconcile()
    assert stage.cluster.objects["Pod", "red", MASTER]["spec"]["containers"][0]["image"] == "resile:1"


async def test_only_nodes_that_run_are_stopped_when_no_master_will_come(stage: Stage) -> None:
    stage.submit(job("Running", "JobRunning"))
    stage.pods.show(stage.cluster.put(PODS, pod("Failed", exit_code=78, words="the journal is damaged")))
    for name, phase, owner in (("runs", "Running", UID), ("ended", "Failed", UID), ("stranger", "Running", "another")):
        stage.cluster.put(PODS, pod(phase, uid=name, owner=owner, metadata={"name": name}))
    await stage.reconcile()
    assert set(stage.names("Pod")) == {"ended", MASTER, "stranger"}
    assert stage.jobs.shown[KEY]["status"]["message"].endswith("(the journal is damaged)")


async def test_pods_are_deleted_a_few_at_a_time(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lease is renewed over the same connections."""
    stage.submit(job("Running", "JobRunning"))
    stage.pods.show(stage.cluster.put(PODS, pod("Failed", exit_code=78)))
    for number in range(100):
        stage.cluster.put(PODS, pod(uid=f"{number}", metadata={"name": f"worker-{number}"}))
    under_way, most, delete = 0, 0, stage.cluster.delete

    async def counted(*what: Any, **how: Any) -> None:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        await delete(*what, **how)
        under_way -= 1

    monkeypatch.setattr(stage.cluster, "delete", counted)
    await stage.reconcile()
    assert stage.names("Pod") == [MASTER]
    assert most == intervals.DELETIONS
