"""What a loss costs depends on its cause."""

import pytest

from resile.api.ids import Bytes, GiB
from resile.api.job import Resources
from resile.api.kinds.elasticjob.roles import PS
from resile.core import decisions as de
from resile.core import events as ev
from resile.core.nodes.relaunch import (
    MAX_SUSPECTS,
    PREEMPTION_BUDGET,
    SUSPECT_SECONDS,
    Cause,
    GiveUp,
    Relaunch,
    Spent,
    cause_of,
    decide,
)
from resile.protocol.master_to_agent import JobOver
from resile.protocol.reports import NodeEnd, NodeStatus
from tests.core.given import Job, failure, joins_again, key, managed, place_of, running

CRASH = NodeEnd(exit_code=1)
PREEMPTED = NodeEnd(reason="Preempted")


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


def test_memory_doubles_after_running_out_of_it_but_grows_by_no_more_than_a_step_and_ends_at_a_cap():
    assert decide(Cause.OOM, 0, 3, Bytes(2 * GiB)) == Relaunch(Bytes(4 * GiB))
    assert decide(Cause.OOM, 0, 3, Bytes(16 * GiB)) == Relaunch(Bytes(24 * GiB))
    assert decide(Cause.OOM, 0, 3, Bytes(60 * GiB)) == Relaunch(Bytes(64 * GiB))
    assert isinstance(decide(Cause.OOM, 0, 3, Bytes(64 * GiB)), GiveUp)
    assert decide(Cause.OOM, 0, 3, None) == Relaunch()


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


def test_a_node_that_ran_out_of_memory_comes_back_with_more():
    job = managed(1, limits=Resources(memory=Bytes(4 * GiB)))
    job.seen(0, NodeStatus.FAILED, NodeEnd(exit_code=137, reason="OOMKilled"))
    (launch,) = job.said(de.LaunchNode)
    assert launch.resources.memory == 8 * GiB
    job.seen(1, NodeStatus.FAILED, PREEMPTED)
    assert job.said(de.LaunchNode)[0].resources.memory == 8 * GiB


def test_a_process_that_ran_out_of_memory_gets_a_larger_node():
    job = running(2, limits=Resources(memory=Bytes(4 * GiB)))
    job.fails(1, failure(oom=True))
    assert job.deleted == [1]
    assert job.said(de.LaunchNode)[0].resources.memory == 8 * GiB


def test_running_out_of_memory_counts_even_if_the_echo_of_it_was_reported_first():
    job = running(2, limits=Resources(memory=Bytes(4 * GiB)))
    job.fails(0, failure(at=2.0))
    job.fails(1, failure(at=1.0, pid=8, oom=True), round_=1)
    assert job.said(de.LaunchNode)[0].resources.memory == 8 * GiB


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
    job.does(ev.AgentDisconnected(node=job.node(1).key, session=2))
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


def test_memory_that_is_used_up_at_the_cap_ends_the_job_with_that_reason():
    job = running(1, limits=Resources(memory=Bytes(64 * GiB)))
    job.fails(0, failure(oom=True))
    assert job.state.reason == "WorkerOOM"


def lose(job, number: int, session: int) -> None:
    job.heartbeats()
    job.does(ev.AgentDisconnected(node=job.node(number).key, session=session))
    job.wait(job.timeouts.reconnect)


def test_a_crash_that_is_explained_late_still_spends_the_budget():
    job = running(2, crash_budget=0)
    lose(job, 1, session=2)
    assert job.launched == [2]
    job.seen(1, NodeStatus.FAILED, CRASH)
    assert job.deleted == [2]
    joins_again(job, 0)
    assert (job.members, job.state.phase) == ([0], "Running")


def test_running_out_of_memory_that_is_explained_late_still_gives_the_place_more():
    job = running(2, limits=Resources(memory=Bytes(4 * GiB)))
    lose(job, 1, session=2)
    job.seen(1, NodeStatus.FAILED, NodeEnd(exit_code=137, reason="OOMKilled"))
    assert (job.deleted, job.launched) == ([2], [3])
    assert job.node(3).resources.memory == 8 * GiB


def test_the_deletion_that_the_core_asked_for_explains_nothing():
    job = running(2)
    lose(job, 1, session=2)
    job.seen(1, NodeStatus.FAILED, NodeEnd(exit_code=137))
    assert spent(job, Cause.INFRASTRUCTURE, rank=1) == 1


def test_a_place_that_keeps_crashing_at_once_is_held_back_longer_and_longer():
    job = managed(1, crash_budget=9)
    delays = []
    for number in range(4):
        job.seen(number, NodeStatus.RUNNING)
        job.seen(number, NodeStatus.FAILED, CRASH)
        begun = job.now
        if not job.launched:
            job.wait(2.0 ** (number - 1))
        assert job.launched == [number + 1]
        delays.append(job.node(number + 1).launched_at - begun)
    assert delays == [0.0, 1.0, 2.0, 4.0]


def test_a_place_whose_node_lived_for_a_while_is_filled_at_once():
    job = managed(1, crash_budget=9)
    for number in range(3):
        job.seen(number, NodeStatus.RUNNING)
        job.now += 60.0
        job.seen(number, NodeStatus.FAILED, CRASH)
        assert job.launched == [number + 1]


def test_nobody_waits_for_a_node_that_is_held_back_and_a_returned_master_remembers_it():
    job = running(3, crash_budget=9)
    job.seen(2, NodeStatus.FAILED, CRASH)
    job.seen(3, NodeStatus.FAILED, CRASH)
    assert job.launched == []
    joins_again(job, 0, 1)
    assert job.members == [0, 1]
    job.does(ev.MasterReturned())
    job.does(ev.NodesListed(seen=()))
    assert 4 not in job.launched
    job.wait(2.0)
    assert job.launched == [4]


def test_a_program_that_is_not_there_is_not_tried_again():
    job = managed(1, crash_budget=9)
    job.seen(0, NodeStatus.FAILED, NodeEnd(exit_code=127, reason="StartError", message="no such program"))
    (finish,) = job.sent(JobOver)
    assert finish.message == "worker-0 failed (StartError): no such program; it is not replaced: it cannot be started"


def avoided(job: Job) -> list[tuple[str, ...]]:
    return [d.avoid for d in job.said(de.LaunchNode)]


def on_machines(nodes: int) -> Job:
    """A job in its first round, each node on a machine of its own."""
    job = running(nodes)
    for number in range(nodes):
        job.seen(number, NodeStatus.RUNNING, host=f"m{number}")
    return job


def test_a_machine_that_fell_silent_gets_no_new_node_for_a_while():
    job = on_machines(3)
    job.does(ev.AgentSilent(node=key(1), seconds=2.0))
    assert avoided(job) == [("m1",)]
    job.seen(2, NodeStatus.DELETED)
    assert avoided(job) == [("m1",)], "nor do the replacements of others go there"
    assert job.replayed().state.suspects == job.state.suspects
    job.now += SUSPECT_SECONDS
    job.seen(0, NodeStatus.DELETED)
    assert avoided(job) == [()]


@pytest.mark.parametrize(("machines", "silent"), [(2, 2), (4, 2), (5, 3), (8, 8)])
def test_no_machine_is_avoided_if_half_of_them_fell_silent_together(machines: int, silent: int):
    job = on_machines(machines)
    for number in range(silent):
        job.does(ev.AgentSilent(node=key(number), seconds=2.0))
    assert avoided(job) == [()]


@pytest.mark.parametrize(("machines", "silent"), [(1, 1), (2, 1), (5, 2)])
def test_a_single_machine_or_a_few_that_fell_silent_are_avoided(machines: int, silent: int):
    job = on_machines(machines)
    for number in range(silent):
        job.does(ev.AgentSilent(node=key(number), seconds=2.0))
    assert avoided(job) == [tuple(f"m{number}" for number in range(silent))]


def test_a_machine_is_trusted_again_when_an_agent_speaks_from_it():
    job = on_machines(2)
    job.does(ev.AgentSilent(node=key(1), seconds=2.0))
    job.seen(2, NodeStatus.STARTING, host="m1")
    job.comes(2)
    job.seen(0, NodeStatus.DELETED)
    assert avoided(job) == [()]


def test_a_machine_is_not_blamed_for_a_crash_a_preemption_or_a_closed_connection():
    for end in (CRASH, PREEMPTED):
        job = on_machines(2)
        job.seen(1, NodeStatus.FAILED, end, host="m1")
        assert avoided(job) == [()]
    job = on_machines(2)
    job.does(ev.AgentDisconnected(node=key(1), session=2))
    job.wait(job.timeouts.reconnect)
    assert avoided(job) == [()]


def test_a_machine_whose_hardware_failed_is_avoided():
    job = on_machines(2)
    job.seen(1, NodeStatus.FAILED, NodeEnd(exit_code=201))
    assert avoided(job) == [("m1",)]


def test_no_more_machines_are_avoided_than_fit_into_a_launch():
    job = on_machines(3 * MAX_SUSPECTS)
    for number in range(MAX_SUSPECTS + 1):
        job.does(ev.AgentSilent(node=key(number), seconds=2.0))
    assert len(avoided(job)[0]) == MAX_SUSPECTS
    assert "m0" not in avoided(job)[0]
