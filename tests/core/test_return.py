"""A new master knows all that the old one knew, and finds out what it missed."""

import msgspec

from resile.core import decisions as de
from resile.core import events as ev
from resile.core.engine import Engine
from resile.core.progress import Progress
from resile.core.state import JobState, new_state
from resile.protocol.agent_to_master import Leaving
from resile.protocol.job_changes import Scale, Stop
from resile.protocol.reports import NodeEnd, NodeStatus
from tests.core.given import Job, failure, key, managed, running


def returned(job: Job, *there: tuple[int, NodeStatus]) -> list[de.AnyDecision]:
    """A new master takes over; these nodes are on the platform."""
    job.does(ev.MasterReturned())
    seen = tuple(ev.NodeSeen(node=key(number), status=status) for number, status in there)
    return job.does(ev.NodesListed(seen=seen))


def test_a_node_that_was_never_launched_is_launched_now():
    job = managed(2)
    returned(job, (0, NodeStatus.RUNNING))
    assert job.launched == [1]


def test_a_node_that_went_meanwhile_is_replaced():
    job = running(2)
    returned(job, (0, NodeStatus.RUNNING))
    assert job.node(1).status is NodeStatus.DELETED
    assert job.launched == [2]


def test_a_node_that_failed_meanwhile_is_replaced():
    job = running(2)
    returned(job, (0, NodeStatus.RUNNING), (1, NodeStatus.FAILED))
    assert job.launched == [2]


def test_an_orphan_is_deleted():
    job = running(1)
    returned(job, (0, NodeStatus.RUNNING), (7, NodeStatus.RUNNING))
    assert job.deleted == [7]


def test_a_node_that_was_to_leave_is_asked_again():
    job = running(2)
    job.wants(Scale(role="worker", replicas=1))
    returned(job, (0, NodeStatus.RUNNING), (1, NodeStatus.RUNNING))
    assert job.deleted == [1]


def test_a_node_that_was_counted_as_lost_and_lives_is_removed():
    job = running(2)
    job.fails(1, failure(oom=True))
    returned(job, (0, NodeStatus.RUNNING), (1, NodeStatus.RUNNING), (2, NodeStatus.RUNNING))
    assert job.deleted == [1]


def test_nodes_of_a_job_that_is_over_are_deleted_again():
    job = running(1)
    job.wants(Stop(because="enough"))
    returned(job, (0, NodeStatus.RUNNING))
    assert (job.deleted, job.launched) == ([0], [])


def test_a_pending_node_gets_its_time_again():
    job = managed(2, least=2, timeouts={"pend": 100.0})
    job.seen(1, NodeStatus.PENDING)
    returned(job, (0, NodeStatus.STARTING), (1, NodeStatus.PENDING))
    job.wait(100.0)
    assert job.state.reason == "PendingTimeout"


def test_a_node_that_could_not_be_made_is_tried_again_under_its_name():
    job = managed(2)
    job.seen(1, NodeStatus.PENDING, NodeEnd(message="a quota"))
    returned(job, (0, NodeStatus.STARTING))
    assert job.launched == [1]
    assert job.node(1).alive


def test_what_appears_of_a_node_after_it_was_deleted_is_removed():
    """Its deletion overtook its launch on their way to the platform."""
    job = managed(2)
    job.wants(Scale(role="worker", replicas=1))
    job.seen(1, NodeStatus.DELETED)
    job.seen(1, NodeStatus.STARTING)
    assert job.deleted == [1]
    job.seen(1, NodeStatus.DELETED)
    assert job.deleted == []


def test_a_node_that_takes_its_leave_is_left_to_it():
    job = running(2)
    job.says(1, Leaving(because="it was told to"))
    job.seen(1, NodeStatus.RUNNING)
    assert job.deleted == []


def test_agents_that_wait_must_join_again():
    job = managed(2, least=2)
    job.comes(0)
    job.joins(0)
    job.does(ev.MasterReturned())
    job.comes(0)
    job.comes(1)
    job.joins(1)
    assert job.members == []
    job.joins(0)
    assert job.members == [0, 1]


def test_no_alarm_of_the_old_master_goes_off_at_the_new_one():
    job = running(2)
    job.fails(0)
    again = Engine.replay(msgspec.convert(msgspec.to_builtins(job.state), JobState), [])
    assert again.next_deadline() is None
    state = new_state(job.state.spec, 0.0)
    replayed = Engine.replay(state, [(0.0, ev.Started()), (1.0, ev.NodeSeen(node=key(0), status=NodeStatus.PENDING))])
    assert replayed.due(1e9) == []


def test_a_replay_without_step_reports_makes_the_same_decisions_about_budgets():
    job = managed(1, crash_budget=1, timeouts={"budget_window": 100.0})
    for number in range(3):
        job.comes(number)
        job.joins(number)
        job.train(101.0, number)
        job.seen(number, NodeStatus.FAILED, NodeEnd(exit_code=1))
        assert job.launched == [number + 1]
    again = job.replayed().state
    assert msgspec.structs.replace(again, progress=Progress()) == msgspec.structs.replace(
        job.state, progress=Progress()
    )
    assert (again.progress.step, again.progress.trained) == (job.state.progress.step, job.state.progress.trained)
