"""What a loss costs depends on its cause."""

import pytest

from resile.api.kinds.elasticjob.roles import PS
from resile.core import events as ev
from resile.core.nodes.failure_causes import Cause, cause_of
from resile.core.nodes.relaunch import GiveUp, Relaunch, decide
from resile.core.nodes.restart_budget import PREEMPTION_BUDGET, Spent
from resile.protocol.reports import NodeEnd, NodeStatus
from tests.core.given import CRASH, PREEMPTED, joins_again, lose, managed, place_of, running


def spent(job, cause: Cause, rank: int = 0) -> int:
    return len(job.state.spent[place_of("worker", rank)].losses.get(cause, []))


@pytest.mark.parametrize(
    ("status", "end", "cause"),
    [
        (NodeStatus.FAILED, NodeEnd(exit_code=1), Cause.CRASH),
        (NodeStatus.FAILED, NodeEnd(exit_code=137, reason="OOMKilled"), Cause.OOM),
        (NodeStatus.FAILED, NodeEnd(exit_code=247), Cause.OOM),
        (NodeStatus.FAILED, NodeEnd(reason="Evicted"), Cause.PREEMPTION),
        (NodeStatus.FAILED, NodeEnd(exit_code=137), Cause.PREEMPTION),
        (NodeStatus.DELETED, NodeEnd(), Cause.PREEMPTION),
        (NodeStatus.FAILED, NodeEnd(exit_code=201), Cause.INFRASTRUCTURE),
        (NodeStatus.FAILED, NodeEnd(reason="Lost"), Cause.INFRASTRUCTURE),
    ],
)
def test_a_cause_is_read_from_what_the_platform_says(status, end, cause):
    assert cause_of(status, end) is cause


def test_an_unspent_budget_relaunches_and_a_spent_one_gives_up():
    assert decide(Cause.CRASH, 2, 3, None) == Relaunch()
    assert decide(Cause.CRASH, 3, 3, None) == GiveUp("it crashed 4 times and restartCount is 3")


def test_what_was_long_ago_in_training_time_no_longer_counts():
    losses = Spent()
    losses.add(Cause.CRASH, 0.0, 100.0)
    assert (losses.count(Cause.CRASH, 99.0, 100.0), losses.count(Cause.CRASH, 100.0, 100.0)) == (1, 0)


def test_preemptions_cost_no_crash():
    job = managed(1, crash_budget=0)
    for number in range(5):
        job.seen(number, NodeStatus.FAILED, PREEMPTED)
        assert job.launched == [number + 1]
    assert spent(job, Cause.CRASH) == 0
    assert spent(job, Cause.PREEMPTION) == 5


def test_a_place_that_is_preempted_for_ever_is_given_up():
    job = managed(2)
    job.comes(0)
    for number in range(PREEMPTION_BUDGET + 1):
        job.seen(1 if number == 0 else number + 1, NodeStatus.DELETED)
    assert place_of("worker", 1) in job.state.given_up


def test_a_crash_is_forgiven_after_enough_training():
    job = running(1, crash_budget=1, timeouts={"budget_window": 100.0})
    job.seen(0, NodeStatus.FAILED, CRASH)
    job.comes(1)
    joins_again(job, 1)
    job.train(101.0, number=1)
    job.seen(1, NodeStatus.FAILED, CRASH)
    assert job.launched == [2]
    job.seen(2, NodeStatus.FAILED, CRASH)
    assert job.launched == []
    assert job.state.phase == "Failed"


def test_a_lost_node_whose_end_the_platform_explains_later_is_charged_to_the_right_budget():
    job = running(2, crash_budget=3)
    job.engine.heard(job.node(0).key, job.now + 10)
    job.does(ev.AgentDisconnected(node=job.node(1).key, connection=2))
    job.wait(job.timeouts.reconnect)
    assert spent(job, Cause.INFRASTRUCTURE, rank=1) == 1
    job.seen(1, NodeStatus.FAILED, CRASH)
    assert spent(job, Cause.INFRASTRUCTURE, rank=1) == 0
    assert spent(job, Cause.CRASH, rank=1) == 1


def test_a_spent_budget_leaves_the_job_with_fewer_nodes_and_below_the_minimum_ends_it():
    job = running(3, least=2, crash_budget=0)
    job.seen(2, NodeStatus.FAILED, CRASH)
    assert job.launched == []
    joins_again(job, 0, 1)
    assert job.members == [0, 1]
    job.seen(1, NodeStatus.FAILED, CRASH)
    assert (job.state.phase, job.state.reason) == ("Failed", "WorkerError")
    assert "restartCount is 0" in job.state.message


def test_a_parameter_server_that_is_given_up_ends_the_job():
    job = managed(1, roles={"ps": PS.declared(replicas=1, crash_budget=0)})
    job.seen(0, NodeStatus.FAILED, CRASH, role="ps")
    assert job.state.reason == "PSError"


def test_a_crash_that_is_explained_late_still_spends_the_budget():
    job = running(2, crash_budget=0)
    lose(job, 1, connection=2)
    assert job.launched == [2]
    job.seen(1, NodeStatus.FAILED, CRASH)
    assert job.deleted == [2]
    joins_again(job, 0)
    assert (job.members, job.state.phase) == ([0], "Running")


def test_the_deletion_that_the_core_asked_for_explains_nothing():
    job = running(2)
    lose(job, 1, connection=2)
    job.seen(1, NodeStatus.FAILED, NodeEnd(exit_code=137))
    assert spent(job, Cause.INFRASTRUCTURE, rank=1) == 1
