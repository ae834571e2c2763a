"""Both sides of a connection come to the same view of the round."""

import pytest

from resile.api.ids import Round
from resile.core import decisions as de
from resile.core import events as ev
from resile.protocol.agent_to_master import NodeFinished
from resile.protocol.job_changes import Scale, Stop
from resile.protocol.master_to_agent import JobOver, Leave, Refused, RoundFormed, RoundOver, Welcome
from resile.protocol.reports import NodeStatus, RendezvousConfig
from tests.core.given import bare, failure, joins_again, key, managed, running, running_bare


def test_an_agent_that_returns_with_the_same_incarnation_goes_on():
    job = running(2)
    job.comes(1, round=1, running=True)
    assert job.members == [0, 1]
    assert job.sent(Welcome)[0].node == key(1)
    assert job.said(de.Send) == []


def test_another_incarnation_means_that_the_old_processes_are_gone():
    job = running(2)
    job.comes(1, name="another")
    assert job.told(RoundOver) == (key(0),)
    joins_again(job, 0)
    job.joins(1, after=0)
    assert job.members == [0, 1]


def test_an_agent_that_missed_the_round_is_told_again():
    job = managed(2)
    job.comes(0)
    job.joins(0)
    job.comes(1)
    job.joins(1)
    place = job.assignments[key(1)]
    job.comes(1, round=0)
    assert job.said(de.Send) == [de.Send(to=(key(1),), message=RoundFormed(round=Round(1), assignment=place))]


def test_an_agent_in_an_old_round_is_told_that_it_is_over():
    job = running(2)
    job.fails(0)
    job.comes(1, round=1, running=True)
    assert job.said(de.Send) == [
        de.Send(to=(key(1),), message=RoundOver(round=Round(1), because="the job is in another round"))
    ]


def test_an_agent_that_finished_while_it_was_away_is_heard():
    job = running(2)
    job.says(0, NodeFinished(round=Round(1)))
    job.comes(1, round=1, finished=True)
    assert job.state.phase == "Succeeded"


def test_an_agent_whose_process_failed_while_it_was_away_is_still_a_member_until_it_says_how():
    job = running(2)
    job.comes(1, round=1)
    assert job.members == [0, 1]
    job.fails(1)
    assert job.node(1).crashes == [0.0]


def test_an_agent_with_other_rules_is_refused_with_the_sentence():
    job = bare(1, 2)
    job.comes(name="a")
    job.comes(name="b", rendezvous=RendezvousConfig(min_nodes=2, max_nodes=4))
    (refusal,) = job.sent(Refused)
    assert refusal.because == (
        "this node was started with --nnodes=2:4, but the job runs with --nnodes=1:2; "
        "start all nodes with the same --nnodes and --node_unit"
    )


@pytest.mark.parametrize(
    ("rendezvous", "nproc"),
    [
        (RendezvousConfig(min_nodes=3, max_nodes=2), 1),
        (RendezvousConfig(min_nodes=0, max_nodes=2), 1),
        (RendezvousConfig(node_unit=0), 1),
        (RendezvousConfig(), 0),
    ],
)
def test_rules_that_make_no_sense_are_refused(rendezvous, nproc):
    job = bare(1, 2)
    job.comes(name="a", rendezvous=rendezvous, nproc=nproc)
    assert "make no sense" in job.sent(Refused)[0].because
    assert job.state.nodes == {}


def test_a_managed_job_accepts_a_larger_maximum_from_nodes_launched_after_it_was_scaled():
    job = running(2)
    job.wants(Scale(role="worker", replicas=3))
    job.comes(2, rendezvous=RendezvousConfig(min_nodes=1, max_nodes=3))
    assert job.sent(Refused) == []
    assert job.state.rendezvous.config.max_nodes == 3


def test_an_agent_of_a_node_that_is_not_part_of_the_job_any_more_is_refused():
    job = running(2)
    job.seen(1, NodeStatus.FAILED)
    job.comes(1, name="agent1", round=1, running=True)
    assert job.sent(Refused)[0].because == "worker-1 failed; it is not part of the job any more"


def test_an_agent_of_a_node_that_nobody_launched_is_refused():
    job = managed(1)
    job.comes(7)
    assert job.sent(Refused)[0].because == "this job has no node worker-7"
    job.comes(None, name="a")
    assert job.sent(Refused)[0].because == "this job's nodes have ids (NODE_ID) and this agent has none"


def test_an_agent_that_comes_after_the_end_hears_of_it():
    job = running_bare(1)
    job.says(0, NodeFinished(round=Round(1)))
    job.comes(name="late")
    (refused,) = job.said(de.Refuse)
    assert (refused.connection, refused.message.succeeded) == (job.connections, True)


def test_what_agents_say_after_the_end_changes_nothing():
    job = running(2)
    job.wants(Stop(because="enough"))
    before = job.state.rendezvous.last_round
    assert job.fails(0) == job.joins(0, after=1) == job.joins(1, after=1) == []
    assert (job.state.phase, job.state.rendezvous.last_round) == ("Failed", before)


def test_nodes_that_go_after_a_good_end_are_left_to_the_platform():
    job = running(1)
    job.says(0, NodeFinished(round=Round(1)))
    job.does(ev.AgentDisconnected(node=key(0), connection=1))
    job.wait(60.0)
    assert (job.deleted, job.node(0).status) == ([], NodeStatus.RUNNING)
    job.seen(0, NodeStatus.SUCCEEDED)
    assert job.node(0).status is NodeStatus.SUCCEEDED


# failures of training processes


def test_the_first_failure_by_time_is_blamed_and_not_the_first_that_was_reported():
    job = running_bare(2, max_restarts=0)
    job.fails(1, failure(at=20.0, pid=1, rank=1))
    assert job.state.phase == "Failed"
    job = running_bare(2, max_restarts=1)
    job.fails(1, failure(at=20.0, pid=1, rank=1))
    job.fails(0, failure(at=10.0, pid=2, rank=0), round_=1)
    joins_again(job, 0, 1)
    job.wants(Stop(because="enough"))
    (finish,) = job.sent(JobOver)
    assert (finish.failed_node, finish.failure.pid) == ("worker-0", 2)


def test_collateral_failures_are_not_charged():
    job = running(3)
    job.fails(1, failure(at=1.0))
    job.fails(0, failure(at=1.1), round_=1)
    job.fails(2, failure(at=1.2), round_=1)
    assert [len(job.node(n).crashes) for n in range(3)] == [0, 1, 0]


def test_a_report_that_comes_twice_is_charged_once():
    job = running(1)
    job.fails(0)
    job.fails(0, round_=1)
    assert len(job.node(0).crashes) == 1


def test_a_bare_job_fails_with_its_first_failure_when_max_restarts_is_spent():
    job = running_bare(2, max_restarts=1)
    job.fails(1)
    joins_again(job, 0, 1)
    job.fails(1, failure(at=5.0, pid=9, rank=1))
    (finish,) = job.sent(JobOver)
    assert (finish.reason, finish.failed_node, finish.failure.pid) == ("RestartOverLimit", "worker-1", 9)
    assert "failure 2 and max_restarts is 1" in finish.message


def test_a_managed_node_that_spent_max_restarts_is_sent_away_and_replaced_and_then_given_up():
    job = running(2, crash_budget=1, max_restarts=0)
    job.fails(1)
    assert job.told(Leave) == (key(1),)
    assert job.launched == [2]
    job.comes(2)
    joins_again(job, 0)
    job.joins(2)
    assert job.members == [0, 2]
    job.fails(2)
    assert job.launched == []
    joins_again(job, 0)
    assert job.members == [0]
    assert job.state.phase == "Running"


def test_process_failures_are_forgiven_after_enough_training():
    job = running_bare(1, max_restarts=1, timeouts={"budget_window": 100.0})
    for _ in range(3):
        job.fails(0)
        joins_again(job, 0)
        job.train(101.0)
    assert job.state.phase == "Running"
    job.fails(0)
    joins_again(job, 0)
    job.fails(0)
    assert job.state.phase == "Failed"
