"""What `kubectl get elasticjob` shows of a job."""

from __future__ import annotations

from typing import Any

from resile.api.ids import NodeId, NodeKey
from resile.api.job import JobSpec, RoleSpec
from resile.api.reports import NodeEnd, NodeStatus
from resile.core.engine import Engine
from resile.core.events import NodeSeen, ScaleWanted, Started
from resile.core.state import new_state
from resile.master.job_status import difference, status_of

W0, W1 = NodeKey("worker", NodeId(0)), NodeKey("worker", NodeId(1))


def started() -> Engine:
    spec = JobSpec(name="j", roles={"worker": RoleSpec(replicas=2, command=("train",))})
    engine = Engine(new_state(spec, 0.0))
    engine.handle(Started(), 1.0)
    return engine


def status(engine: Engine, now: float = 9.0, before: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    return status_of(engine.state, now, before or {}, 3, **more)


def test_nodes_are_counted_by_role_and_found_by_a_selector() -> None:
    engine = started()
    engine.handle(NodeSeen(node=W0, status=NodeStatus.RUNNING), 2.0)
    engine.handle(NodeSeen(node=W1, status=NodeStatus.PENDING), 2.0)
    assert status(engine)["status"]["replicaStatuses"]["worker"] == {
        "pending": 1,
        "active": 1,
        "labelSelector": "elasticjob.dlrover/name=j,elasticjob.dlrover/replica-type=worker",
    }


def test_what_keeps_a_node_from_starting_is_said_in_one_sentence() -> None:
    engine = started()
    engine.handle(NodeSeen(node=W1, status=NodeStatus.PENDING), 2.0)
    told = status(engine, hindrance=lambda _: "0/3 nodes are available: 3 Insufficient cpu.")
    assert told["message"] == "worker-1 cannot start now: 0/3 nodes are available: 3 Insufficient cpu."


def test_history_goes_on_where_the_cluster_has_it() -> None:
    engine = started()
    first = status(engine, 2.0)
    engine.handle(NodeSeen(node=W0, status=NodeStatus.RUNNING), 3.0)
    second = status(engine, 4.0, first)
    history = [(entry["type"], entry["status"]) for entry in second["status"]["conditions"]]
    assert history == [("Pending", "False"), ("Running", "True")]
    assert status(engine, 60.0, second)["status"]["conditions"] == second["status"]["conditions"]


def test_the_newest_loss_is_told_and_an_asked_for_one_is_not() -> None:
    engine = started()
    engine.handle(NodeSeen(node=W0, status=NodeStatus.FAILED, end=NodeEnd(exit_code=3)), 5.0)
    told = status(engine)["lastFailure"]
    assert told == {
        "node": "j-edljob-worker-0",
        "reason": "NodeFailed",
        "message": "worker-0 failed: exit code 3",
        "time": "1970-01-01T00:00:05Z",
        "exitCode": 3,
    }
    engine.handle(ScaleWanted(role="worker", replicas=1), 6.0)
    engine.handle(NodeSeen(node=W1, status=NodeStatus.DELETED), 7.0)
    assert status(engine)["lastFailure"] == told


def test_a_job_without_steps_shows_none() -> None:
    assert "step" not in status(started())["progress"]


def test_a_patch_holds_what_changed_and_removes_what_went() -> None:
    before = {"a": 1, "deep": {"x": 1, "y": 2}, "gone": True}
    assert difference(before, {"a": 1, "deep": {"x": 1, "y": 3}}) == {"deep": {"y": 3}, "gone": None}
    assert difference(before, before) == {}
