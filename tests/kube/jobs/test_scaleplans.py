"""ScalePlans on a real cluster: what they do to a job's pods, and what is told of them however they end.

The job of these tests takes seconds to start, so that what lies between two states is long enough to be written down;
a node with a request that no machine can meet keeps a plan open for as long as a test needs.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.kube.namespace import KubeNamespace, job, master, plan, training

NOWHERE = {"cpu": "1000"}
"""What no machine has."""
PATIENCE = 120.0
"""For a plan with pods that start and others that end."""
RANK = "elasticjob.dlrover/rank-index"


@pytest.fixture(scope="module")
def long(cluster: KubeNamespace) -> str:
    """A job of two workers that trains all the time."""
    slow = "trap 'exit 143' TERM; sleep 2 & wait; trap - TERM"
    cluster.apply(job("long", f"{slow}; exec {training(100_000)}"))
    cluster.until_members("long", 2)
    return "long"


@pytest.fixture
def two(cluster: KubeNamespace, long: str) -> Iterator[KubeNamespace]:
    """The namespace of that job: whatever a test does to it, two workers train again afterwards."""
    yield cluster
    cluster.kubectl("patch", "elasticjob", long, "--type=merge", "-p", '{"spec": {"suspend": false}}')
    cluster.apply(plan("reset", long, replicaResourceSpecs={"worker": {"replicas": 2}}))
    told(cluster, "reset", "Succeeded")
    cluster.kubectl("delete", "scaleplan", "--all")
    cluster.until_members(long, 2)


def told(namespace: KubeNamespace, name: str, *phases: str) -> dict[str, Any]:
    """The status of a plan once it is in one of these phases."""

    def look() -> dict[str, Any]:
        status = namespace.status(name, "scaleplan")
        return status if status.get("phase") in phases else {}

    found: dict[str, Any] = namespace.until(f"ScalePlan {name} to be {' or '.join(phases)}", look, PATIENCE)
    return found


def ranks(namespace: KubeNamespace) -> dict[str, str]:
    """The pods that stay, and their ranks."""
    return {name: pod["metadata"]["labels"][RANK] for name, pod in namespace.pods("long").items()}


def requests(pod: dict[str, Any]) -> dict[str, str]:
    return dict(pod["spec"]["containers"][0].get("resources", {}).get("requests") or {})


def condition(namespace: KubeNamespace, kind: str) -> dict[str, str]:
    """What the job's history says of a phase; nothing if it was never in it."""
    entries = (namespace.status("long").get("status") or {}).get("conditions") or []
    return next((dict(entry) for entry in entries if entry["type"] == kind), {})


def test_a_plan_gives_new_nodes_its_resources_and_leaves_the_others_as_they_are(two: KubeNamespace) -> None:
    before = two.pods("long")
    resource = {"cpu": "10m", "memory": "300Mi"}
    two.apply(plan("more", "long", replicaResourceSpecs={"worker": {"replicas": 3, "resource": resource}}))
    two.until_status("long", phase="Scaling", scalePlan="more")
    status = told(two, "more", "Succeeded")
    assert status["reason"] == "Scaled"
    assert status["createTime"] <= status["finishTime"]
    after = two.pods("long")
    (new,) = set(after) - set(before)
    assert requests(after[new]) == resource
    assert all(requests(after[name]) == {} for name in before)
    two.until_members("long", 3)
    assert "scalePlan" not in two.until_status("long", phase="Running")
    assert condition(two, "Scaling")["reason"] == "JobScaling"


def test_plans_at_once_are_executed_in_order_and_a_created_node_gets_its_rank(two: KubeNamespace) -> None:
    before = set(two.pods("long"))
    first = plan("first", "long", createPods=[{"type": "worker", "rankIndex": 5, "resource": {"cpu": "20m"}}])
    two.apply(first, plan("second", "long", createPods=[{}]))
    for name in ("first", "second"):
        told(two, name, "Succeeded")
    pods = two.pods("long")
    fifth, lowest = sorted(set(pods) - before, key=lambda name: int(name.rpartition("-")[2]))
    assert (ranks(two)[fifth], requests(pods[fifth])["cpu"]) == ("5", "20m")
    assert ranks(two)[lowest] == "2"
    two.until_members("long", 4)


def test_a_plan_removes_the_very_pod_that_it_names(two: KubeNamespace) -> None:
    two.kubectl("scale", "elasticjob/long", "--replicas=3")
    two.until_members("long", 3)
    before = ranks(two)
    victim = next(name for name, rank in before.items() if rank == "0")
    two.apply(plan("fewer", "long", removePods=[{"name": victim}]))
    told(two, "fewer", "Succeeded")
    del before[victim]
    assert ranks(two) == before
    two.until_members("long", 2)
    two.apply(plan("again", "long", replicaResourceSpecs={"worker": {"replicas": 3}}))
    told(two, "again", "Succeeded")
    assert sorted(ranks(two).values()) == ["0", "1", "2"], "gaps are filled first"


def test_a_migrated_pod_leaves_when_its_heir_has_taken_over(two: KubeNamespace) -> None:
    before = ranks(two)
    old = next(name for name, rank in before.items() if rank == "1")
    two.apply(plan("move", "long", migratePods=[{"name": old, "resource": {"memory": "256Mi"}}]))
    new = two.until("the new pod", lambda: set(two.pods("long")) - set(before)).pop()
    assert "deletionTimestamp" not in two.get("pod", old)["metadata"], "the old one works until the new one can"
    told(two, "move", "Succeeded")
    assert requests(two.pods("long")[new])["memory"] == "256Mi"
    assert ranks(two) == {**{name: rank for name, rank in before.items() if name != old}, new: "1"}
    two.until_members("long", 2)


@pytest.mark.parametrize(
    ("name", "spec", "sentence"),
    [
        ("role", {"createPods": [{"type": "evaluator"}]}, "has no role"),
        ("gone", {"removePods": [{"type": "worker", "id": 999}]}, "the job has no node worker-999"),
        ("least", {"replicaResourceSpecs": {"worker": {"replicas": 0}}}, "0 nodes are fewer than the 1"),
        ("taken", {"createPods": [{"rankIndex": 0}]}, "rank 0 of worker is taken"),
        ("servers", {"psHosts": ["somewhere:2222"]}, "later version"),
        ("mistake", {"removePods": [{"name": "other-edljob-worker-0"}]}, "must be a pod of the job"),
    ],
)
def test_a_plan_that_cannot_be_is_refused_with_a_sentence(
    cluster: KubeNamespace, long: str, name: str, spec: dict[str, Any], sentence: str
) -> None:
    cluster.apply(plan(name, long, **spec))
    assert sentence in told(cluster, name, "Failed")["message"]


def test_a_plan_that_another_one_overtakes_says_which(two: KubeNamespace) -> None:
    two.apply(plan("large", "long", replicaResourceSpecs={"worker": {"replicas": 4, "resource": NOWHERE}}))
    told(two, "large", "Scaling")
    two.until("the trouble", lambda: "Insufficient cpu" in two.status("long").get("message", ""))
    two.apply(plan("small", "long", replicaResourceSpecs={"worker": {"replicas": 2}}))
    status = told(two, "large", "Succeeded", "Failed")
    assert (status["reason"], status["message"]) == ("Superseded", "the plan small came before it was done")
    assert told(two, "small", "Succeeded", "Failed")["phase"] == "Succeeded"
    two.apply(plan("usual", "long", replicaResourceSpecs={"worker": {"resource": {"cpu": "10m"}}}))
    told(two, "usual", "Succeeded")


def test_a_plan_outlives_the_master_and_is_told_how_it_ends_by_the_next(two: KubeNamespace) -> None:
    two.apply(plan("stuck", "long", createPods=[{"resource": NOWHERE}]))
    told(two, "stuck", "Scaling")
    old = two.uid("pod", master("long"))
    two.kubectl("delete", "pod", master("long"), "--grace-period=0", "--force")
    two.replaced("long", old)
    two.until("its word", lambda: "MasterReturned" in two.logs(master("long")))
    stuck = [name for name, pod in two.pods("long").items() if requests(pod).get("cpu") in ("1000", "1k")]
    assert len(stuck) == 1, "a plan that is under way is not executed again"
    assert two.status("stuck", "scaleplan")["phase"] == "Scaling"
    two.apply(plan("instead", "long", replicaResourceSpecs={"worker": {"replicas": 2}}))
    status = told(two, "stuck", "Succeeded", "Failed")
    assert (status["reason"], status["message"]) == ("Superseded", "the plan instead came before it was done")


def test_a_plan_that_is_deleted_or_whose_job_is_suspended_is_told_of(two: KubeNamespace) -> None:
    two.apply(plan("forgotten", "long", createPods=[{"resource": NOWHERE}]))
    told(two, "forgotten", "Scaling")
    two.kubectl("delete", "scaleplan", "forgotten")
    two.until("the Event", lambda: "the plan forgotten ended (PlanDeleted)" in two.events("long"))
    two.apply(plan("paused", "long", createPods=[{}]))
    told(two, "paused", "Scaling")
    two.kubectl("patch", "elasticjob", "long", "--type=merge", "-p", '{"spec": {"suspend": true}}')
    assert told(two, "paused", "Succeeded", "Failed")["reason"] == "JobSuspended"
    two.apply(plan("asleep", "long", createPods=[{}]))
    assert told(two, "asleep", "Failed")["message"] == "the job is suspended; resume it first"


def test_a_plan_ends_with_its_job(cluster: KubeNamespace) -> None:
    cluster.apply(job("short", training(60), 1), plan("late", "short", createPods=[{"resource": NOWHERE}]))
    status = told(cluster, "late", "Succeeded", "Failed")
    assert (status["reason"], status["message"]) == ("JobEnded", "the job is over (Succeeded)")


def test_a_lost_node_makes_the_job_restart_until_it_trains_again(two: KubeNamespace) -> None:
    two.until_status("long", phase="Running")
    before = condition(two, "Restarting").get("lastTransitionTime")
    victim = max(two.pods("long"))
    two.kubectl("delete", "pod", victim, "--wait=false")
    two.until("the phase Restarting", lambda: condition(two, "Restarting").get("lastTransitionTime") != before)
    assert condition(two, "Restarting")["reason"] == "JobRestarting"
    two.until_members("long", 2)
    two.until_status("long", phase="Running")
    assert condition(two, "Restarting")["status"] == "False"
    assert victim not in two.pods("long")
