"""Elastic nodes: rounds without restarts."""

from __future__ import annotations

import msgspec
import pytest

from resile.api.ids import Round
from resile.core import decisions as de
from resile.core import events as ev
from resile.core.nodes.failure_causes import LOST
from resile.core.rendezvous.state import RoundEnd
from resile.core.state import Idle, Resting, Stuck, Training, Waiting
from resile.protocol.agent_to_master import (
    CanRegroup,
    Join,
    LastStepTaken,
    Leaving,
    NodeFinished,
    WorkerFailed,
    WorkersChanged,
    WorkerStuck,
)
from resile.protocol.master_to_agent import Leave, RoundComplete, RoundOver, StateHeld, Welcome
from resile.protocol.reports import NodeEnd, NodeStatus
from tests.core.given import Job, failure, key, managed, running, running_bare


def elastic(nodes: int, least: int = 1, make=running, **more) -> Job:
    """A job in its first round whose processes all turned out to be elastic."""
    job = make(nodes, least, nodes, **more)
    for number in range(nodes):
        job.says(number, CanRegroup())
    return job


def interrupted(nodes: int) -> Job:
    """The same, and one more has come and ended the round."""
    job = running_bare(nodes, 1, nodes + 1)
    for number in range(nodes):
        job.says(number, CanRegroup())
    steps(job)
    job.comes(name=f"agent{nodes}")
    rejoins(job, nodes, after=0)
    assert [over.because for over in job.sent(RoundOver)] == [f"worker-{nodes} is ready to join"]
    return job


def steps(job: Job) -> None:
    """A step is taken, and noted."""
    job.steps(job.state.progress.step + 1, number=job.members[0])
    job.wait(0.0)


def rejoins(job: Job, number: int, nproc: int = 1, after: int | None = None, holds: int = 0) -> list[de.AnyDecision]:
    last = job.state.rendezvous.last_round if after is None else Round(after)
    return job.says(number, Join(after=last, store_port=29500, nproc=nproc, elastic=True, holds=Round(holds)))


def settles(job: Job) -> None:
    """Nobody else comes in time."""
    job.heartbeats()
    job.engine.restart_silence_timers(job.now + job.timeouts.straggler_wait)
    job.wait(job.timeouts.straggler_wait)


def stuck(job: Job, number: int, round_: int = 1) -> list[de.Send]:
    """A process of this node does not leave its round; what its agent is told at once."""
    job.says(number, WorkerStuck(round=Round(round_)))
    return held(job)


def held(job: Job) -> list[de.Send]:
    """Who is told that another node has the state of a round."""
    return [sent for sent in job.said(de.Send) if isinstance(sent.message, StateHeld)]


def dies(
    job: Job, number: int, left: int = 0, pid: int = 7, member: bool = True, placed: int = 0
) -> list[de.AnyDecision]:
    last, what = job.state.rendezvous.last_round, failure(pid=pid)
    return job.says(number, WorkerFailed(round=last, failure=what, member=member, left=left, placed=Round(placed)))


def test_survivors_meet_again_without_waiting_for_the_process_that_died():
    job = elastic(3)
    dies(job, 1)
    (over,) = job.sent(RoundOver)
    assert over.lost
    assert {each.id for each in job.told(RoundOver)} == {0, 1, 2}
    assert isinstance(job.node(1).agent.phase, Idle)
    rejoins(job, 0)
    assert not job.members
    rejoins(job, 2)
    assert job.members == [0, 2]
    assert job.state.rendezvous.last_round == 2


def test_the_replacement_comes_in_with_a_new_round_and_gets_its_old_place():
    job = elastic(3)
    dies(job, 1)
    rejoins(job, 0)
    rejoins(job, 2)
    steps(job)
    rejoins(job, 1, after=1)
    (over,) = job.sent(RoundOver)
    assert (over.because, over.lost) == ("worker-1 is ready to join", False)
    rejoins(job, 2)
    rejoins(job, 0)
    assert job.members == [0, 1, 2]
    assert job.assignments[key(1)].first_rank == 1


def test_a_round_takes_a_step_before_it_takes_a_newcomer_in():
    job = elastic(3)
    dies(job, 1)
    rejoins(job, 0)
    rejoins(job, 2)
    rejoins(job, 1, after=1)
    assert job.members == [0, 2]
    job.steps(1)
    assert "RoundOver" in [note.reason for note in job.said(de.Note, job.wait(0.0))]
    assert not job.members
    again = job.replayed().state
    assert (again.rendezvous.current, again.nodes) == (job.state.rendezvous.current, job.state.nodes)
    for number in (0, 2):
        rejoins(job, number)
    assert job.members == [0, 1, 2]


def test_however_many_come_one_after_the_other_steps_are_taken_in_between():
    job = running_bare(2, 1, 40)
    for number in range(2):
        job.says(number, CanRegroup())
    for new in range(2, 32):
        job.comes(name=f"agent{new}")
        rejoins(job, new, after=0)
        assert len(job.members) == 2
    steps(job)
    for number in range(2):
        rejoins(job, number)
    assert len(job.members) == 32
    assert job.state.rendezvous.last_round == 2


def test_a_round_that_tells_of_no_step_takes_a_newcomer_in_after_a_while():
    job = elastic(3)
    dies(job, 1)
    rejoins(job, 0)
    rejoins(job, 2)
    job.now += 1.0
    rejoins(job, 1, after=1)
    job.engine.restart_silence_timers(job.now + job.timeouts.straggler_wait)
    job.wait(job.timeouts.straggler_wait - 1.1)
    assert job.members == [0, 2]
    job.wait(0.2)
    assert not job.members
    assert job.node(0).agent.phase == Resting(Round(2))
    assert job.replayed().state == job.state


def test_the_wait_for_a_first_step_ends_with_the_round():
    job = elastic(4)
    dies(job, 1)
    for number in (0, 2, 3):
        rejoins(job, number)
    rejoins(job, 1, after=1)
    job.engine.restart_silence_timers(job.now + job.timeouts.straggler_wait)
    job.wait(job.timeouts.straggler_wait - 0.5)
    assert job.members == [0, 2, 3]
    dies(job, 3)
    rejoins(job, 0)
    job.wait(1.0)
    assert not job.members, "worker-2 has as long to come as ever"
    rejoins(job, 2)
    assert job.members == [0, 1, 2]


def test_survivors_wait_for_the_replacement_when_they_are_too_few():
    job = elastic(3, least=3)
    dies(job, 1)
    rejoins(job, 0)
    rejoins(job, 2)
    assert not job.members
    rejoins(job, 1, after=1)
    assert job.members == [0, 1, 2]


def test_a_node_that_lost_one_of_its_processes_is_near_and_brings_the_others():
    job = elastic(2)
    dies(job, 1, left=2)
    assert job.node(1).agent.phase == Resting(Round(1))
    rejoins(job, 0, nproc=3)
    assert not job.members
    rejoins(job, 1, nproc=2)
    places = job.assignments
    assert [(p.first_rank, p.nproc, p.world_size) for p in places.values()] == [(0, 3, 5), (3, 2, 5)]


def short_of_one(**more) -> Job:
    """Of two nodes with three processes each the second has lost one, and round 2 runs without it."""
    job = elastic(2, **more)
    dies(job, 1, left=2)
    rejoins(job, 0, nproc=3)
    rejoins(job, 1, nproc=2)
    assert job.members == [0, 1]
    return job


def replaced(job: Job) -> list[RoundOver]:
    """The process that the second node has lost is replaced, and ready; who is told at once to leave the round."""
    job.says(1, WorkersChanged(round=job.state.rendezvous.last_round, nproc=3))
    return job.sent(RoundOver)


def test_a_node_with_more_processes_than_places_gets_a_new_round():
    job = short_of_one()
    steps(job)
    (over,) = replaced(job)
    assert (over.round, over.because, over.lost) == (2, "worker-1 has 3 processes ready, not 2", False)
    rejoins(job, 0, nproc=3)
    rejoins(job, 1, nproc=3)
    assert job.assignments[key(1)].world_size == 6


def test_a_round_takes_a_step_before_it_takes_a_replaced_process_in():
    job = short_of_one()
    assert replaced(job) == []
    assert replaced(job) == [], "a master that came back hears it again"
    assert job.members == [0, 1]
    job.engine = job.replayed()
    steps(job)
    assert not job.members
    assert job.node(1).agent.phase == Resting(Round(2))
    again = job.replayed().state
    assert (again.rendezvous.current, again.nodes) == (job.state.rendezvous.current, job.state.nodes)


def test_however_often_a_node_loses_a_process_and_has_it_back_steps_are_taken_in_between():
    job = short_of_one(max_restarts=10)
    for _ in range(5):
        replaced(job)
        assert job.members == [0, 1]
        steps(job)
        assert not job.members
        rejoins(job, 0, nproc=3)
        rejoins(job, 1, nproc=3)
        dies(job, 1, left=2, pid=job.state.rendezvous.last_round)
        rejoins(job, 0, nproc=3)
        rejoins(job, 1, nproc=2)
    assert job.state.rendezvous.last_round == 12, "two for each loss, and none in vain"


def test_a_round_that_tells_of_no_step_takes_a_replaced_process_in_after_a_while():
    job = short_of_one()
    job.now += 1.0
    replaced(job)
    job.engine.restart_silence_timers(job.now + job.timeouts.straggler_wait)
    job.wait(job.timeouts.straggler_wait - 1.1)
    assert job.members == [0, 1]
    job.wait(0.2)
    assert not job.members
    assert job.replayed().state == job.state


def test_a_round_is_not_ended_for_a_replaced_process_that_has_failed_again():
    job = short_of_one()
    replaced(job)
    dies(job, 1, left=2, pid=8, member=False)
    steps(job)
    assert job.members == [0, 1]
    assert len(replaced(job)) == 1, "but for the next one"


def test_a_round_that_some_have_finished_is_not_ended_for_a_replaced_process():
    job = short_of_one()
    replaced(job)
    job.says(0, NodeFinished(round=Round(2)))
    steps(job)
    assert job.members == [0, 1]


def test_word_of_a_change_in_an_older_round_changes_nothing():
    job = elastic(2)
    dies(job, 1, left=1)
    rejoins(job, 0)
    rejoins(job, 1)
    job.says(1, WorkersChanged(round=Round(1), nproc=2))
    assert job.members == [0, 1]


def test_a_node_without_processes_for_its_place_is_not_waited_for():
    job = elastic(3)
    job.says(2, WorkersChanged(round=Round(1), nproc=0))
    rejoins(job, 0)
    rejoins(job, 1)
    assert job.members == [0, 1]


def test_a_node_whose_connection_is_gone_is_not_waited_for_though_it_is_not_lost_yet():
    job = elastic(3)
    rejoins(job, 0)  # its collective broke
    rejoins(job, 1)
    assert not job.members
    job.does(ev.AgentDisconnected(node=key(2), connection=job.node(2).agent.connection))
    assert job.members == [0, 1]
    assert job.node(2).alive


def test_a_node_that_is_near_and_does_not_come_is_waited_for_no_longer_than_settle():
    job = elastic(3)
    dies(job, 1)
    rejoins(job, 0)
    settles(job)
    assert job.members == [0]


def test_a_new_agent_is_told_that_the_job_is_elastic():
    job = managed(2, most=3)
    job.comes(0)
    assert not job.sent(Welcome)[0].elastic
    job.says(0, CanRegroup())
    job.comes(1)
    assert job.sent(Welcome)[0].elastic


def test_every_failure_of_an_elastic_process_counts_once_though_its_peers_left_first():
    job = elastic(2, make=running_bare, max_restarts=2)
    rejoins(job, 0)  # its collective broke before anybody heard of the failure
    dies(job, 1, pid=11)
    dies(job, 1, pid=11)
    assert len(job.node(1).crashes) == 1
    dies(job, 1, pid=12, member=False)
    dies(job, 1, pid=13, member=False)
    assert job.state.phase == "Failed"
    assert job.state.reason == "RestartOverLimit"


def test_an_outage_is_blamed_on_the_process_that_failed_though_its_peers_left_first():
    job = elastic(3)
    steps(job)
    rejoins(job, 0)
    (outage,) = job.state.progress.outages
    assert (outage.node, outage.because) == ("worker-0", "worker-0 missed a peer and left the round")
    dies(job, 1, pid=11)
    assert outage.node == "worker-1"
    assert outage.because.startswith("on worker-1, rank ")
    dies(job, 2, pid=12)
    assert outage.node == "worker-1", "the first failure that is reported"


def test_a_process_that_fails_ahead_of_its_round_does_not_end_the_round_of_the_others():
    job = elastic(3)
    dies(job, 1)
    rejoins(job, 0)
    rejoins(job, 2)
    dies(job, 1, pid=8, member=False)
    assert job.members == [0, 2]
    assert len(job.node(1).crashes) == 2


def test_a_process_that_dies_after_its_node_joined_takes_the_round_with_it_at_once():
    job = elastic(2)
    dies(job, 1, left=1)
    rejoins(job, 0)
    rejoins(job, 1)
    assert job.members == [0, 1]
    # said before the agent heard of round 2
    job.says(1, WorkerFailed(round=Round(1), failure=failure(pid=9), left=0))
    assert not job.members
    rejoins(job, 0)
    assert job.members == [0]


def test_inelastic_nodes_among_elastic_ones_are_waited_for_as_ever():
    job = running(3)
    job.says(0, CanRegroup())
    job.fails(1)
    job.joins(1, after=1)
    rejoins(job, 0)
    assert not job.members  # worker-2 stops its processes and will come
    job.joins(2, after=1)
    assert job.members == [0, 1, 2]


def test_an_elastic_agent_that_comes_back_from_another_round_rests_and_is_near():
    job = elastic(3)
    dies(job, 1)
    job.comes(2, round=Round(1), running=True, elastic=True)
    assert job.told(RoundOver) == (key(2),)
    assert job.node(2).agent.phase == Resting(Round(1))
    rejoins(job, 0)
    assert not job.members
    rejoins(job, 2)
    assert job.members == [0, 2]


def test_a_master_that_dies_in_the_middle_of_a_recovery_knows_who_rested():
    job = elastic(3)
    dies(job, 1)
    rejoins(job, 0)
    again = job.replayed()
    assert again.state == job.state
    assert again.consistent()
    stances = [type(again.state.nodes[key(n)].agent.phase) for n in range(3)]
    assert stances == [Waiting, Idle, Resting]


def test_a_late_word_about_joining_an_older_round_is_not_believed():
    job = elastic(2)
    dies(job, 1, left=1)
    rejoins(job, 0)
    rejoins(job, 1)
    job.says(1, Join(after=Round(1), store_port=1, nproc=1, elastic=True))
    assert job.node(1).agent.phase == Training(Round(2))


def test_a_round_that_a_newcomer_ends_while_its_processes_end_well_has_finished():
    job = interrupted(2)
    job.says(0, NodeFinished(round=Round(1)))
    assert job.state.phase == "Running", "the other one may go on with the state"
    job.says(1, NodeFinished(round=Round(1)))
    assert job.state.phase == "Succeeded"


def test_processes_may_end_well_although_their_agent_was_silent_and_counted_as_lost():
    for finished in (False, True):
        job = running_bare(1, 1, 1)
        job.says(0, CanRegroup())
        job.wait(job.timeouts.heartbeat_timeout + 1.0)
        assert job.node(0).status is NodeStatus.FAILED
        job.comes(0, name="agent0", round=1, running=not finished, finished=finished, elastic=True)
        assert key(1) in job.state.nodes, "it is another node now"
        if not finished:
            assert job.state.phase == "Running"
            job.says(1, NodeFinished(round=Round(1)))
        assert job.state.phase == "Succeeded"


def test_a_member_that_did_not_get_to_the_end_takes_a_newcomer_there():
    job = interrupted(2)
    job.says(0, NodeFinished(round=Round(1)))
    rejoins(job, 1)
    assert job.members == [1, 2]
    job.says(1, NodeFinished(round=Round(2)))
    job.says(2, NodeFinished(round=Round(2)))
    assert job.state.phase == "Succeeded"


def test_the_last_step_of_a_round_counts_although_a_member_was_lost_right_after_it():
    for end in (NodeEnd(reason=LOST), NodeEnd(exit_code=137), NodeEnd(reason="Evicted")):
        job = elastic(2)
        job.says(0, NodeFinished(round=Round(1)))
        job.seen(1, NodeStatus.FAILED, end)
        assert job.state.phase == "Succeeded"


def test_a_script_that_fails_after_the_last_step_is_tried_again_with_those_that_had_ended_well():
    job = elastic(2, least=2)
    job.says(0, NodeFinished(round=Round(1)))
    dies(job, 1)
    assert job.told(RoundOver) == (key(0), key(1))
    rejoins(job, 1)
    assert job.state.phase == "Running"
    rejoins(job, 0)
    assert job.members == [0, 1]
    for number in range(2):
        job.says(number, NodeFinished(round=Round(2)))
    assert job.state.phase == "Succeeded"


def test_processes_that_fail_in_one_round_of_their_node_count_once():
    job = elastic(1, make=running_bare, max_restarts=1)
    for pid in (7, 8, 9):
        dies(job, 0, left=9 - pid, pid=pid, placed=1)
    assert (len(job.node(0).crashes), job.state.phase) == (1, "Running")
    rejoins(job, 0, nproc=3)
    assert job.state.rendezvous.last_round == 2
    dies(job, 0, left=2, pid=10, placed=2)
    assert job.state.phase == "Failed"
    assert "that was failure 2 and max_restarts is 1" in job.state.message


@pytest.mark.parametrize("member", [False, True])
def test_processes_that_fail_while_they_wait_for_a_round_count_each(member: bool):
    job = elastic(1, make=running_bare, max_restarts=2)
    dies(job, 0, pid=7, placed=1)
    dies(job, 0, pid=8, member=member)
    assert (len(job.node(0).crashes), job.state.phase) == (2, "Running")
    dies(job, 0, pid=9, member=member)
    assert job.state.phase == "Failed"


def test_the_first_failure_counts_also_of_a_node_that_was_in_no_round():
    job = running_bare(1, 1, 2, max_restarts=0)
    job.says(0, CanRegroup())
    job.comes(name="agent1")
    rejoins(job, 1, after=0)
    job.says(1, WorkerFailed(round=Round(0), failure=failure(pid=8), left=0))
    assert job.state.phase == "Failed"


def test_those_that_end_well_are_told_to_come_again_whoever_is_heard_first():
    job = elastic(2)
    dies(job, 1)
    job.says(0, NodeFinished(round=Round(1)))
    assert [(over.round, job.told(RoundOver)) for over in job.sent(RoundOver)] == [(1, (key(0),))]
    assert job.replayed().state == job.state

    job = interrupted(2)
    job.says(0, NodeFinished(round=Round(1)))
    dies(job, 1)
    assert [(over.round, job.told(RoundOver)) for over in job.sent(RoundOver)] == [(1, (key(0),))]
    assert isinstance(job.node(0).agent.phase, Idle)


def complete(job: Job, number: int, round_: int = 1) -> list[de.AnyDecision]:
    """All of a round have taken the last step; this node's agent says so."""
    return job.says(number, LastStepTaken(round=Round(round_)))


def waits_in_vain(job: Job) -> None:
    """Whoever waits for a round waits longer than for anything, while all agents are heard."""
    settles(job)
    for _ in range(3):
        job.heartbeats()
        job.engine.restart_silence_timers(job.now + job.timeouts.join)
        job.wait(job.timeouts.join)
    assert job.state.phase == "Running"


def test_who_comes_after_the_last_step_ends_no_round():
    job = running_bare(1, 1, 2)
    job.says(0, CanRegroup())
    steps(job)
    complete(job, 0)
    job.comes(name="agent1")
    rejoins(job, 1, after=0)
    waits_in_vain(job)
    assert (job.sent(RoundOver), job.members) == ([], [0])
    assert job.replayed().state.rendezvous.current == job.state.rendezvous.current
    job.says(0, NodeFinished(round=Round(1)))
    assert job.state.phase == "Succeeded"


def test_all_members_are_told_that_their_round_is_complete_and_one_that_asks_again_is_told_again():
    job = elastic(2)
    complete(job, 1)
    assert job.sent(RoundComplete) == [RoundComplete(round=Round(1))]
    assert job.told(RoundComplete) == (key(0), key(1))
    complete(job, 0)
    assert job.told(RoundComplete) == (key(0),)
    complete(job, 0, round_=7)
    assert job.sent(RoundComplete) == []


def test_members_whose_round_was_ended_before_are_not_told_that_it_is_complete_and_meet_once_more():
    job = interrupted(1)
    complete(job, 0)
    assert job.sent(RoundComplete) == []
    rejoins(job, 0, holds=1)
    assert job.members == [0, 1]


@pytest.mark.parametrize("is_done", [True, False])
def test_a_newcomer_ends_no_round_while_a_member_that_may_have_taken_the_last_step_is_away(is_done: bool):
    job = running_bare(2, 1, 3)
    for number in range(2):
        job.says(number, CanRegroup())
    steps(job)
    agent = job.node(1).agent
    assert agent is not None
    job.does(ev.AgentDisconnected(node=key(1), connection=agent.connection))
    job.comes(name="agent2")
    rejoins(job, 2, after=0)
    assert job.sent(RoundOver) == []
    job.comes(name="agent1", round=Round(1), running=True, elastic=True)
    assert job.sent(RoundOver) == []
    if is_done:
        complete(job, 1)
        assert job.told(RoundComplete) == (key(0), key(1))
    settles(job)
    assert [over.because for over in job.sent(RoundOver)] == ([] if is_done else ["worker-2 is ready to join"])


def test_a_member_of_a_complete_round_that_joins_again_is_no_loss():
    job = elastic(2)
    complete(job, 0)
    rejoins(job, 0, after=1, holds=1)
    (over,) = job.sent(RoundOver)
    assert (over.because, over.lost) == ("worker-0 took the last step and joins again", False)


def test_who_came_before_that_was_known_does_not_train_all_over_again():
    job = interrupted(1)
    complete(job, 0)
    waits_in_vain(job)
    assert job.state.rendezvous.last_round == 1
    job.says(0, NodeFinished(round=Round(1)))
    assert job.state.phase == "Succeeded"


def test_the_story_names_the_node_that_does_not_end_and_those_that_wait_for_that():
    job = interrupted(1)
    complete(job, 0)
    job.does(ev.JoinTimeout())
    assert awaited(job) == "worker-0 took the last step and did not end; worker-1 came later and waits for that"
    job.comes(name="agent2")
    rejoins(job, 2, after=0)
    job.does(ev.JoinTimeout())
    assert awaited(job).endswith("; worker-1, worker-2 came later and wait for that")
    for number in (1, 2):
        job.says(number, Leaving(because="it got SIGTERM"))
    job.does(ev.JoinTimeout())
    assert awaited(job) == "worker-0 took the last step and did not end"


def awaited(job: Job) -> str:
    (note,) = (note for note in job.said(de.Note) if note.reason == "RoundAwaited")
    return note.message


def test_who_comes_after_the_last_step_meets_the_others_in_another_loop():
    job = interrupted(2)
    complete(job, 0)
    rejoins(job, 0, holds=1)
    settles(job)
    assert job.members == [0, 2], "the third is busy with something else"


def test_who_comes_after_the_last_step_begins_anew_if_those_that_took_it_are_lost():
    job = interrupted(1)
    complete(job, 0)
    job.says(0, Leaving(because="it got SIGTERM"))
    assert job.members == [1]


def test_a_script_that_fails_after_the_last_step_is_not_waited_for_as_one_that_is_done():
    job = elastic(2)
    complete(job, 1)
    dies(job, 1)
    assert job.state.rendezvous.previous.end is not RoundEnd.COMPLETE
    job = interrupted(2)
    complete(job, 1)
    dies(job, 1)
    assert job.state.rendezvous.previous.end is not RoundEnd.COMPLETE
    complete(job, 0)
    assert job.state.rendezvous.previous.end is not RoundEnd.COMPLETE


def test_a_process_that_fails_ahead_of_the_next_round_says_nothing_about_the_last_step():
    job = interrupted(2)
    job.says(0, NodeFinished(round=Round(1)))
    dies(job, 1, member=False)
    job.says(1, NodeFinished(round=Round(1)))
    assert job.state.phase == "Succeeded"


def test_a_script_that_failed_after_the_last_step_is_not_forgiven_because_its_node_is_gone():
    job = elastic(2, max_restarts=0)
    job.says(0, NodeFinished(round=Round(1)))
    dies(job, 1)
    assert job.told(Leave) == (key(1),)
    assert job.launched == [2], "its place is filled again, as after any crash"
    assert job.state.phase == "Running"

    job = elastic(2, max_restarts=3)
    job.says(0, NodeFinished(round=Round(1)))
    dies(job, 1)
    job.seen(1, NodeStatus.DELETED)
    assert job.state.phase == "Running"


def test_a_job_whose_script_always_fails_after_the_last_step_fails():
    job = elastic(2, least=2, max_restarts=0, crash_budget=0)
    job.says(0, NodeFinished(round=Round(1)))
    dies(job, 1)
    assert (job.state.phase, job.state.reason) == ("Failed", "WorkerError")


def test_a_node_that_crashed_or_ran_out_of_memory_after_the_last_step_is_not_merely_lost():
    for end in (NodeEnd(exit_code=1), NodeEnd(reason="OOMKilled", exit_code=137)):
        job = elastic(2)
        job.says(0, NodeFinished(round=Round(1)))
        job.seen(1, NodeStatus.FAILED, end)
        assert job.state.phase == "Running"
        assert job.launched == [2]


def test_a_newcomer_that_began_without_those_who_had_finished_is_not_trained_for():
    job = interrupted(1)
    until = job.now + job.timeouts.join
    while job.now <= until:
        job.heartbeats()
        job.wait(job.timeouts.heartbeat_timeout / 2)
    assert job.members == [1], "nobody waits for one that does not come"
    job.says(0, NodeFinished(round=Round(1)))
    assert job.state.phase == "Succeeded"


# processes that hang ------------------------------------------------------------------------------------------------


def hanging(least: int = 1) -> Job:
    """Of three nodes in round 1 the process of the last has died, and that of the first hangs in the round."""
    job = elastic(3, least)
    dies(job, 2)
    return job


def test_a_node_whose_process_hangs_is_told_at_once_if_another_one_has_the_state():
    job = hanging()
    rejoins(job, 1, holds=1)
    assert stuck(job, 0) == [de.Send(to=(key(0),), message=StateHeld(round=Round(1)))]
    assert job.node(0).agent.phase == Idle()


def test_a_node_whose_process_hangs_is_told_when_another_one_comes_that_has_the_state():
    job = hanging(least=3)
    assert stuck(job, 0) == []
    assert job.node(0).agent.phase == Stuck(Round(1))
    rejoins(job, 2, after=1)  # its process is a new one
    assert held(job) == []
    rejoins(job, 1, holds=1)
    assert held(job) == [de.Send(to=(key(0),), message=StateHeld(round=Round(1)))]
    rejoins(job, 1, holds=1)
    assert held(job) == [], "it is told once"
    assert stuck(job, 0), "but again if it asks again"


def test_the_last_that_has_the_state_is_never_taken_for_another_one():
    job = hanging()
    rejoins(job, 0, holds=1)
    rejoins(job, 1, holds=1)  # round 2
    assert job.members == [0, 1]
    dies(job, 1)
    assert stuck(job, 0, round_=2) == [], "what others have is the state of a round before, or none"
    rejoins(job, 1, after=2)  # its process is a new one
    assert job.members == [1]
    assert held(job) == []
    assert job.node(0).agent.phase == Stuck(Round(2))


def test_the_state_of_an_older_round_is_not_the_state_of_the_one_in_which_a_process_hangs():
    job = elastic(3)
    dies(job, 2)
    rejoins(job, 0, holds=1)
    settles(job)
    assert job.members == [0]  # the second node was in a long step, and comes late
    steps(job)
    rejoins(job, 1, holds=1)
    assert job.sent(RoundOver)
    assert stuck(job, 0, round_=2) == []


def test_who_lost_a_process_or_its_connection_is_not_known_to_have_the_state_any_more():
    job = hanging(least=3)
    rejoins(job, 1, holds=1)
    job.does(ev.AgentDisconnected(node=key(1), connection=job.node(1).agent.connection))
    assert stuck(job, 0) == []
    job.comes(1, round=Round(1), elastic=True)
    assert held(job) == [de.Send(to=(key(0),), message=StateHeld(round=Round(1)))], "it came back within a blink"
    dies(job, 1, left=1, pid=8)
    assert stuck(job, 0) == []


def test_the_state_of_a_round_that_goes_on_counts_for_who_was_left_behind():
    job = hanging()
    rejoins(job, 1, holds=1)
    settles(job)
    assert job.members == [1]
    assert stuck(job, 0)


def test_a_node_that_has_joined_since_is_not_taken_for_one_whose_process_hangs():
    job = hanging()
    rejoins(job, 0, holds=1)
    rejoins(job, 1, holds=1)
    assert stuck(job, 0) == []
    assert job.node(0).agent.phase == Training(Round(2))


def test_who_asked_and_who_has_the_state_is_known_after_a_return_from_the_journal():
    job = hanging(least=3)
    stuck(job, 0)
    job.engine = job.replayed()
    rejoins(job, 1, holds=1)
    assert held(job) == [de.Send(to=(key(0),), message=StateHeld(round=Round(1)))]
    job.does(ev.MasterReturned())
    job.comes(0, round=Round(1), elastic=True)
    assert stuck(job, 0) == [], "nobody else is there yet"
    job.comes(1, round=Round(1), elastic=True)
    assert held(job) == [de.Send(to=(key(0),), message=StateHeld(round=Round(1)))]


def test_nobody_who_is_near_waits_for_a_process_that_hangs():
    job = hanging()
    rejoins(job, 1, holds=1)
    assert not job.members
    stuck(job, 0)
    assert job.members == [1]


def test_processes_that_have_ended_have_no_state():
    job = hanging()
    rejoins(job, 1, holds=1)
    rejoins(job, 2, after=1)
    settles(job)
    assert job.members == [1, 2]
    job.says(1, NodeFinished(round=Round(2)))
    assert stuck(job, 0) == []


@pytest.mark.parametrize("echo_first", [False, True])
def test_a_failure_that_no_restart_would_mend_ends_the_job_at_once(echo_first: bool):
    job = elastic(2, make=running_bare, max_restarts=10)
    if echo_first:
        dies(job, 1, pid=8, placed=1)
    what = msgspec.structs.replace(failure(), error="NotWritable: it is a file", permanent=True)
    job.says(0, WorkerFailed(round=job.state.rendezvous.last_round, failure=what, member=True, left=0, placed=Round(1)))
    assert (job.state.phase, job.state.reason) == ("Failed", "WorkerError")
    assert "NotWritable: it is a file; no restart would mend that" in job.state.message


def test_a_failure_that_no_restart_would_mend_ends_the_job_with_the_reason_of_the_role():
    job = elastic(2, failure="ChiefError")
    what = msgspec.structs.replace(failure(), error="NotWritable: it is a file", permanent=True)
    job.says(0, WorkerFailed(round=Round(1), failure=what, placed=Round(1)))
    assert (job.state.phase, job.state.reason) == ("Failed", "ChiefError")
