"""The reconcilers around the decisions: what is written, in which order, and what a stale mirror must not cause."""

from __future__ import annotations

from typing import Any, cast

import pytest

from resile.operator.cluster import CONFIG_MAP, ELASTIC_JOB, POD, SCALE_PLAN, SECRET, Cluster, ClusterError
from resile.operator.jobs import Jobs
from resile.operator.metrics import Metrics
from resile.operator.mirror import Mirror, key_of
from resile.operator.scaleplans import ScalePlans
from resile.operator.workqueue import Key, TryAgain
from tests.operator.fake import FakeCluster
from tests.operator.things import NOW, UID, job, plan, pod

KEY = Key("red", "mnist")
MASTER = "elasticjob-mnist-dlrover-master"


class Still:
    """A mirror that shows what the test says."""

    def __init__(self) -> None:
        self.shown: dict[Key, dict[str, Any]] = {}

    def get(self, key: Key) -> dict[str, Any] | None:
        return self.shown.get(key)

    def show(self, item: dict[str, Any]) -> None:
        self.shown[key_of(item)] = item


class Stage:
    def __init__(self) -> None:
        self.cluster = FakeCluster()
        self.jobs, self.pods, self.services, self.plans = Still(), Still(), Still(), Still()
        self.now = NOW
        real = cast(Cluster, self.cluster)
        mirrors = [cast(Mirror, one) for one in (self.jobs, self.pods, self.services)]
        self.reconciler = Jobs(real, *mirrors, "resile:1", Metrics(), clock=lambda: self.now)
        self.plan_reconciler = ScalePlans(real, cast(Mirror, self.plans), mirrors[0], clock=lambda: self.now)

    def submit(self, item: dict[str, Any]) -> None:
        self.jobs.show(self.cluster.put(ELASTIC_JOB, item))

    async def look(self) -> None:
        await self.reconciler.look(KEY)
        self.jobs.show(self.cluster.objects["ElasticJob", *KEY])
        there = self.cluster.objects.get(("Pod", "red", MASTER))
        if there is not None:
            self.pods.show(there)

    def names(self, kind: str) -> list[str]:
        return [key[2] for key in self.cluster.objects if key[0] == kind]

    def reasons(self) -> list[str]:
        return [item["reason"] for key, item in self.cluster.objects.items() if key[0] == "Event"]


@pytest.fixture
def stage() -> Stage:
    return Stage()


async def test_a_new_job_gets_everything_a_master_needs(stage: Stage) -> None:
    stage.submit(job())
    await stage.look()
    for kind in ("Pod", "Service", "ServiceAccount", "Role", "RoleBinding", "ConfigMap"):
        assert stage.names(kind) == [MASTER], kind
    assert stage.names("Secret") == ["elasticjob-mnist-token"]
    assert stage.reasons() == ["MasterCreated"]
    assert stage.cluster.objects["ElasticJob", *KEY]["status"]["phase"] == "Created"


async def test_the_token_and_the_journal_are_never_written_again(stage: Stage) -> None:
    stage.submit(job())
    await stage.look()
    before = [
        stage.cluster.objects[kind, "red", name]
        for kind, name in (("Secret", "elasticjob-mnist-token"), ("ConfigMap", MASTER))
    ]
    stage.cluster.drop(POD, "red", MASTER)
    stage.pods.shown.clear()
    await stage.look()
    assert stage.names("Pod") == [MASTER]
    assert stage.reasons() == ["MasterCreated", "MasterRestarted"]
    assert before == [
        stage.cluster.objects[kind, "red", name]
        for kind, name in (("Secret", "elasticjob-mnist-token"), ("ConfigMap", MASTER))
    ]


@pytest.mark.parametrize(("kind", "name"), [(SECRET, "elasticjob-mnist-token"), (CONFIG_MAP, MASTER)])
async def test_what_an_earlier_job_of_this_name_left_is_waited_out_not_adopted(
    stage: Stage, kind: Any, name: str
) -> None:
    old = {"name": name, "namespace": "red", "ownerReferences": [{"uid": "another", "controller": True}]}
    stage.cluster.put(kind, {"metadata": old})
    stage.submit(job())
    with pytest.raises(TryAgain, match="earlier job"):
        await stage.look()
    assert stage.names("Pod") == []
    stage.cluster.drop(kind, "red", name)
    stage.jobs.show(stage.cluster.objects["ElasticJob", *KEY])
    await stage.look()
    assert stage.names("Pod") == [MASTER]


async def test_a_mirror_that_is_behind_does_not_cost_the_new_master_its_life(stage: Stage) -> None:
    stage.submit(job("Running", "JobRunning"))
    stage.cluster.put(POD, pod(uid="new"))
    stage.pods.show(pod("Failed", uid="old", exit_code=1))
    await stage.reconciler.look(KEY)
    assert stage.cluster.objects["Pod", "red", MASTER]["metadata"]["uid"] == "new"


async def test_a_status_that_the_master_wrote_in_between_is_not_overwritten(stage: Stage) -> None:
    stage.submit(job("Running", "JobRunning"))
    stage.pods.show(pod("Succeeded", exit_code=0))
    stage.cluster.put(ELASTIC_JOB, job("Failed", "OutOfBudget", "worker-1 crashed"))
    with pytest.raises(TryAgain):
        await stage.reconciler.look(KEY)
    assert stage.cluster.objects["ElasticJob", *KEY]["status"]["reason"] == "OutOfBudget"


async def test_a_pod_that_the_api_server_refuses_is_explained_once(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    create = stage.cluster.create

    async def refuse(kind: Any, item: Any) -> Any:
        if kind is POD:
            raise ClusterError(403, "exceeded quota: small")
        return await create(kind, item)

    monkeypatch.setattr(stage.cluster, "create", refuse)
    stage.submit(job())
    for _ in range(3):
        with pytest.raises(ClusterError):
            await stage.reconciler.look(KEY)
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
        stage.cluster.put(POD, pod("Succeeded", uid=name, owner=owner, metadata={"name": name}))
    await stage.look()
    await stage.look()
    assert stage.names("Pod") == ["stranger"]
    assert stage.reasons() == ["PodsRemoved"]


async def test_two_jobs_of_one_name_in_two_namespaces_never_meet(stage: Stage) -> None:
    stage.submit(job("Running", "JobRunning"))
    stage.submit(job(namespace="blue", uid="blue-uid"))
    stage.pods.show(pod())
    await stage.reconciler.look(Key("blue", "mnist"))
    made = stage.cluster.objects["Pod", "blue", MASTER]
    assert made["metadata"]["ownerReferences"][0]["uid"] == "blue-uid"
    assert ("Pod", "red", MASTER) not in stage.cluster.objects


async def test_a_plan_is_not_refused_because_a_mirror_is_behind(stage: Stage) -> None:
    stage.now = NOW + 60
    stage.plans.show(stage.cluster.put(SCALE_PLAN, plan()))
    stage.cluster.put(ELASTIC_JOB, job("Running"))
    await stage.plan_reconciler.look(Key("red", "up"))
    assert stage.cluster.objects["ScalePlan", "red", "up"]["status"] == {}


async def test_a_refused_plan_says_why(stage: Stage) -> None:
    stage.now = NOW + 60
    stage.plans.show(stage.cluster.put(SCALE_PLAN, plan()))
    await stage.plan_reconciler.look(Key("red", "up"))
    status = stage.cluster.objects["ScalePlan", "red", "up"]["status"]
    assert (status["phase"], status["reason"]) == ("Failed", "JobNotFound")
    assert stage.reasons() == ["JobNotFound"]
