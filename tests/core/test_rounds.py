"""Rounds close at once when they can, wait only as long as it pays, and end when it must be."""

from resile.api.ids import Round
from resile.core import events as ev
from resile.protocol.agent_to_master import NodeFinished, StepReport
from resile.protocol.job_changes import Scale, Stop
from resile.protocol.master_to_agent import JobOver, RoundOver
from resile.protocol.reports import NodeEnd, NodeStatus
from tests.core.given import bare, joins_again, key, managed, running, running_bare


def test_a_round_closes_at_once_when_every_live_node_has_joined():
    job = managed(2, least=1, most=4)
    job.comes(0)
    job.joins(0)
    assert job.members == []
    job.comes(1)
    job.joins(1)
    assert job.members == [0, 1]


def test_a_round_closes_at_once_when_it_is_full():
    job = managed(3, least=1, most=2)
    for number in (0, 1):
        job.comes(number)
        job.joins(number)
    assert job.members == [0, 1]


def test_a_round_does_not_wait_for_nodes_that_cannot_start():
    job = managed(2)
    job.comes(0)
    job.joins(0)
    assert job.members == []
    job.seen(1, NodeStatus.PENDING)
    assert job.members == [0]


def test_a_round_waits_for_starting_nodes_as_long_as_settle():
    job = managed(2)
    job.seen(1, NodeStatus.STARTING)
    job.comes(0)
    job.joins(0)
    job.engine.heard(key(0), job.now + 2)
    job.wait(job.timeouts.straggler_wait - 0.1)
    assert job.members == []
    job.wait(0.1)
    assert job.members == [0]


def test_every_newcomer_gives_the_others_another_settle():
    job = managed(3, least=1, most=3)
    for number in (0, 1):
        job.comes(number)
        job.joins(number)
        job.wait(job.timeouts.straggler_wait * 0.6)
        job.heartbeats()
    assert job.members == []


def test_a_round_forms_with_those_who_are_left_when_the_missing_node_ends():
    job = running(3, least=2, crash_budget=0)
    job.seen(2, NodeStatus.FAILED, NodeEnd(exit_code=1))
    joins_again(job, 0)
    assert job.members == []
    joins_again(job, 1)
    assert job.members == [0, 1]


def test_the_first_round_of_a_bare_job_waits_for_the_last_call():
    job = bare(1, 3)
    job.comes(name="a")
    job.joins(0)
    job.wait(job.timeouts.heartbeat_timeout - 0.1)
    job.heartbeats()
    assert job.members == []
    job.wait(job.timeouts.heartbeat_timeout - 0.1)
    job.heartbeats()
    job.wait(1.2)
    assert job.members == [0]


def test_a_last_call_that_the_agents_were_given_is_kept():
    job = bare(1, 3, last_call=0.5)
    job.comes(name="a")
    job.joins(0)
    job.wait(0.5)
    assert job.members == [0]


def test_later_rounds_of_a_bare_job_close_at_once():
    job = running_bare(2, most=3)
    job.fails(1)
    joins_again(job, 0, 1)
    assert job.members == [0, 1]


def test_a_round_is_a_whole_number_of_units():
    job = managed(3, least=2, most=4, node_unit=2)
    for number in (2, 1):
        job.comes(number)
        job.joins(number)
    job.comes(0)
    job.joins(0)
    assert job.members == [0, 1]
    assert job.state.rendezvous.last_round == 1


def test_fewer_than_the_minimum_wait():
    job = managed(2, least=2)
    job.comes(0)
    job.joins(0)
    job.seen(1, NodeStatus.PENDING)
    assert job.members == []


def test_the_lowest_ranks_come_first_and_group_ranks_are_contiguous():
    job = managed(4, least=2, most=2)
    job.comes(3, nproc=2)
    job.joins(3)
    job.comes(1, nproc=4, address="10.0.0.9")
    job.joins(1)
    first, second = job.assignments[key(1)], job.assignments[key(3)]
    assert (first.group_rank, second.group_rank) == (0, 1)
    assert (first.first_rank, second.first_rank) == (0, 4)
    assert first.world_size == second.world_size == 6
    assert second.master_addr == "10.0.0.9"


def test_a_newcomer_ends_the_round_if_that_makes_it_larger():
    job = running(2, most=3)
    job.wants(Scale(role="worker", replicas=3))
    job.comes(2)
    job.joins(2)
    assert set(job.told(RoundOver)) == {key(0), key(1)}
    joins_again(job, 0, 1)
    assert job.members == [0, 1, 2]
    assert job.state.rendezvous.last_round == 2


def test_a_newcomer_that_does_not_fill_a_unit_waits_without_disturbing_anybody():
    job = running_bare(2, least=2, most=4, node_unit=2)
    job.comes(name="c")
    job.joins(2)
    assert job.sent(RoundOver) == []
    job.comes(name="d")
    job.joins(3)
    assert len(job.sent(RoundOver)) == 1


def test_a_newcomer_beyond_the_maximum_waits():
    job = running_bare(2, most=2)
    job.comes(name="c")
    job.joins(2)
    assert job.members == [0, 1]


def test_a_newcomer_does_not_disturb_a_round_that_is_about_to_end_well():
    job = running(2, most=3)
    job.says(0, NodeFinished(round=Round(1)))
    job.wants(Scale(role="worker", replicas=3))
    job.comes(2)
    job.joins(2)
    assert job.members == [0, 1]


def test_a_member_that_joins_again_ends_its_round():
    job = running(2)
    job.joins(1, after=1)
    assert "RoundOver" in job.notes()


def test_a_join_from_before_the_round_is_ignored_while_it_runs_and_after():
    job = running(2)
    job.joins(1, after=0)
    assert job.members == [0, 1]
    job.fails(0)
    job.joins(1, after=0)
    joins_again(job, 0)
    assert job.members == []
    joins_again(job, 1)
    assert job.members == [0, 1]


def test_words_about_an_old_round_change_nothing():
    job = running(2)
    job.fails(0)
    joins_again(job, 0, 1)
    job.says(0, NodeFinished(round=Round(1)))
    job.says(1, NodeFinished(round=Round(1)))
    job.fails(1, round_=1)
    job.says(0, StepReport(round=Round(1), step=99))
    assert job.members == [0, 1]
    assert job.state.progress.step == -1
    assert job.state.phase == "Running"


def test_too_few_nodes_for_too_long_end_the_job():
    job = managed(2, least=2, join_timeout=30.0)
    job.comes(0)
    job.joins(0)
    job.engine.heard(key(0), job.now + 60)
    job.seen(1, NodeStatus.PENDING)
    job.wait(30.0)
    assert job.state.reason == "RdzvTimeout"
    assert job.state.message == "1 of at least 2 nodes came within 30 s; worker-1 cannot start"


def test_enough_nodes_in_the_last_moment_are_enough():
    job = managed(3, least=2, join_timeout=30.0)
    job.comes(0)
    job.joins(0)
    job.engine.heard(key(0), 40.0)
    job.wait(29.0)
    job.comes(1)
    job.joins(1)
    job.wait(1.0)
    assert job.members == [0, 1]


def test_a_round_that_was_due_does_not_form_after_the_job_failed():
    job = managed(2)
    job.comes(0)
    job.joins(0)
    job.wants(Stop(because="enough"))
    job.does(ev.StragglerWaitOver())
    assert (job.state.phase, job.members) == ("Failed", [])


def test_a_node_that_cannot_start_for_too_long_ends_a_job_that_needs_it():
    job = managed(2, least=2, timeouts={"pend": 100.0})
    job.seen(1, NodeStatus.PENDING)
    job.wait(100.0)
    assert job.state.reason == "PendingTimeout"


def test_a_job_that_can_do_without_a_pending_node_goes_on():
    job = managed(2, least=1, pend_timeout=100.0)
    job.comes(0)
    job.joins(0)
    job.engine.heard(key(0), job.now + 1000)
    job.seen(1, NodeStatus.PENDING)
    job.wait(200.0)
    assert (job.state.phase, job.members) == ("Running", [0])


def test_when_all_members_have_finished_so_has_the_job():
    job = running(2)
    job.says(0, NodeFinished(round=Round(1)))
    assert job.state.phase == "Running"
    job.says(1, NodeFinished(round=Round(1)))
    (finish,) = job.sent(JobOver)
    assert finish.succeeded
    assert job.deleted == []


def test_a_member_that_finished_and_went_does_not_end_the_round_of_the_others():
    job = running(2)
    job.says(0, NodeFinished(round=Round(1)))
    job.seen(0, NodeStatus.SUCCEEDED)
    job.says(1, NodeFinished(round=Round(1)))
    assert job.state.phase == "Succeeded"
