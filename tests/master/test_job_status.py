"""What `kubectl get elasticjob` shows of a job."""

from __future__ import annotations

import json
from typing import Any

from resile.api.ids import NodeId, NodeKey
from resile.api.job import JobSpec, RoleSpec
from resile.api.plan import Plan, RoleChange
from resile.core.engine import Engine
from resile.core.events import ChangeWanted, NodeSeen, Started
from resile.core.state import new_state
from resile.master.kubernetes.job_status import difference, status_of
from resile.protocol.job_changes import Scale
from resile.protocol.reports import NodeEnd, NodeStatus
from tests.core.given import joins_again, managed, running

W0, W1 = NodeKey("worker", NodeId(0)), NodeKey("worker", NodeId(1))


def started() -> Engine:
    spec = JobSpec(name="j", kind="elasticjob", roles={"worker": RoleSpec(replicas=2, command=("train",))})
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
    engine.handle(ChangeWanted(change=Scale(role="worker", replicas=1)), 6.0)
    engine.handle(NodeSeen(node=W1, status=NodeStatus.DELETED), 7.0)
    assert status(engine)["lastFailure"] == told


def test_a_job_without_steps_shows_none() -> None:
    assert "step" not in status(started())["progress"]


def test_a_patch_holds_what_changed_and_removes_what_went() -> None:
    before = {"a": 1, "deep": {"x": 1, "y": 2}, "gone": True}
    assert difference(before, {"a": 1, "deep": {"x": 1, "y": 3}}) == {"deep": {"y": 3}, "gone": None}
    assert difference(before, before) == {}


def test_a_status_that_comes_back_from_the_server_as_it_was_written_is_not_written_again() -> None:
    told = status(started())
    back = json.loads(json.dumps(told))
    assert difference(back, status(started(), before=back)) == {}


def test_a_condition_that_this_version_does_not_know_is_left_out() -> None:
    history = [{"type": "Dreaming", "status": "False"}, "?", {"type": "Created", "status": "True"}]
    told = status(started(), before={"status": {"conditions": history}})
    assert [entry["type"] for entry in told["status"]["conditions"]] == ["Created", told["phase"]]


# phases -------------------------------------------------------------------------------------------------------------


def test_a_job_that_lost_a_node_is_restarting_until_it_trains_again() -> None:
    job = running(2)
    job.steps(1)
    assert status(job.engine)["phase"] == "Running"
    job.seen(1, NodeStatus.DELETED)
    told = status(job.engine)
    assert (told["phase"], told["reason"]) == ("Restarting", "JobRestarting")
    assert told["message"] == "worker-1 was deleted"
    job.comes(2)
    job.joins(2)
    joins_again(job, 0)
    assert status(job.engine)["phase"] == "Restarting"
    job.steps(2)
    assert status(job.engine)["phase"] == "Running"


def test_a_job_that_fails_again_and_again_before_its_first_step_says_so() -> None:
    job = running(2)

    def fail_and_join() -> None:
        job.fails(1)
        for number in (0, 1):
            joins_again(job, number)

    fail_and_join()
    assert "no step so far" not in status(job.engine).get("message", "")
    fail_and_join()
    told = status(job.engine)
    assert told["phase"] == "Running"
    assert told["message"].startswith("2 failures and no step so far; the last on worker-1: rank ")
    job.steps(1)
    assert "no step so far" not in status(job.engine).get("message", "")


def test_a_job_of_plain_commands_restarts_until_they_run_again() -> None:
    engine = started()
    for key in (W0, W1):
        engine.handle(NodeSeen(node=key, status=NodeStatus.RUNNING), 2.0)
    engine.handle(NodeSeen(node=W1, status=NodeStatus.DELETED), 3.0)
    assert status(engine)["phase"] == "Restarting"
    engine.handle(NodeSeen(node=NodeKey("worker", NodeId(2)), status=NodeStatus.RUNNING), 4.0)
    assert status(engine)["phase"] == "Running"


def test_a_job_is_scaling_until_its_nodes_are_those_that_were_asked_for() -> None:
    job = running(2)
    job.wants(Plan(name="more", uid="u", roles={"worker": RoleChange(replicas=3)}))
    told = status(job.engine)
    assert (told["phase"], told["scalePlan"], told["message"]) == ("Scaling", "more", "to come: worker-2")
    job.comes(2)
    job.joins(2)
    assert status(job.engine)["phase"] == "Scaling"
    joins_again(job, 0, 1)
    after = status(job.engine, before=told)
    assert (after["phase"], after.get("scalePlan")) == ("Running", None)
    job.wants(Scale(role="worker", replicas=2))
    told = status(job.engine, before=after)
    assert (told["phase"], told["message"]) == ("Scaling", "to leave: worker-2")
    assert "scalePlan" not in told


def test_the_conditions_tell_of_every_phase() -> None:
    job = running(2)
    seen = status(job.engine)
    job.seen(1, NodeStatus.DELETED)
    seen = status(job.engine, before=seen)
    job.wants(Scale(role="worker", replicas=1))
    joins_again(job, 0)
    seen = status(job.engine, before=seen)
    history = {entry["type"]: (entry["status"], entry["reason"]) for entry in seen["status"]["conditions"]}
    assert history == {
        "Running": ("False", "JobRunning"),
        "Restarting": ("False", "JobRestarting"),
        "Scaling": ("True", "JobScaling"),
    }


def test_a_job_that_grows_by_itself_is_neither_restarting_nor_scaling() -> None:
    job = managed(2)
    job.comes(0)
    job.seen(1, NodeStatus.PENDING)
    job.joins(0)
    assert job.members == [0]
    job.comes(1)
    job.joins(1)
    assert (job.members, status(job.engine)["phase"]) == ([], "Running")
