"""Scaling, suspending, stopping."""

import pytest

from resile.api.defaults import MAX_REPLICAS
from resile.api.kinds.elasticjob.roles import PS
from resile.core import decisions as de
from resile.protocol.job_changes import Scale, Stop, Suspend
from resile.protocol.master_to_agent import Refused
from resile.protocol.reports import NodeEnd, NodeStatus
from tests.core.given import bare, joins_again, key, managed, place_of, running


def scale(job, replicas: int, role: str = "worker") -> str:
    job.wants(Scale(role=role, replicas=replicas), request=5)
    (reply,) = job.said(de.Reply)
    assert reply.request == 5
    return reply.error


def suspend(job, on: bool) -> str:
    job.wants(Suspend(on=on), request=6)
    return job.said(de.Reply)[0].error


def test_scaling_up_launches_nodes_and_makes_room_for_them():
    job = running(2)
    assert scale(job, 4) == ""
    assert job.launched == [2, 3]
    assert [d.replicas for d in job.said(de.LaunchNode)] == [4, 4]
    assert job.state.rendezvous.config.max_nodes == 4


def test_scaling_down_takes_the_highest_ranks_and_costs_nothing():
    job = running(3)
    assert scale(job, 1) == ""
    assert job.deleted == [1, 2]
    assert job.members == []
    joins_again(job, 0)
    assert job.members == [0]
    job.seen(2, NodeStatus.DELETED)
    job.seen(1, NodeStatus.FAILED, NodeEnd(exit_code=143))
    assert job.launched == []
    assert job.state.spent == {}


def test_scaling_below_the_minimum_is_refused_and_changes_nothing():
    job = running(3, least=2)
    assert scale(job, 1) == "1 nodes are fewer than the 2 that the job needs (--nnodes)"
    assert job.members == [0, 1, 2]
    assert job.state.targets == {"worker": 3}


def test_scaling_to_nothing_is_refused_even_before_the_rules_are_known():
    assert "fewer than the 1" in scale(managed(2), 0)


@pytest.mark.parametrize(
    ("role", "replicas", "words"),
    [("gpu", 2, "has no role 'gpu'"), ("ps", -1, "0 or more"), ("worker", MAX_REPLICAS + 1, "10000 or fewer")],
)
def test_scaling_to_nonsense_is_refused_with_a_sentence(role, replicas, words):
    job = managed(1, roles={"ps": PS.declared(replicas=1)})
    assert words in scale(job, replicas, role)


def test_a_bare_job_cannot_be_scaled_or_suspended():
    job = bare(1, 2)
    assert "bare machines" in scale(job, 2)
    assert "bare machines" in suspend(job, True)
    assert job.state.phase != "Suspended"


def test_scaling_gives_a_place_that_was_given_up_another_chance():
    job = running(2, crash_budget=0)
    job.seen(1, NodeStatus.FAILED, NodeEnd(exit_code=1))
    assert job.state.given_up == {place_of("worker", 1)}
    scale(job, 2)
    assert job.launched == [2]


def test_a_suspended_job_lets_go_of_its_nodes_and_a_resumed_one_takes_new_ones():
    job = running(2)
    assert suspend(job, True) == ""
    assert (job.deleted, job.state.phase) == ([0, 1], "Suspended")
    for number in (0, 1):
        job.seen(number, NodeStatus.DELETED)
        assert job.launched == []
    job.wait(1000.0)
    assert job.state.phase == "Suspended"
    suspend(job, False)
    assert (job.launched, job.state.phase) == ([2, 3], "Pending")
    assert job.state.rendezvous.last_round == 1


def test_a_resumed_job_whose_nodes_never_come_ends_with_a_reason():
    job = running(2)
    suspend(job, True)
    suspend(job, False)
    job.wait(job.timeouts.join)
    assert job.state.reason == "RdzvTimeout"


def test_suspending_twice_is_once():
    job = running(1)
    suspend(job, True)
    suspend(job, True)
    assert job.deleted == []


def test_a_job_that_is_over_can_be_neither_scaled_nor_resumed():
    job = running(1)
    job.wants(Stop(because="enough"), request=1)
    assert job.state.reason == "Stopped"
    assert job.deleted == [0]
    assert scale(job, 2) == suspend(job, False) == "the job is over (Failed)"


def test_a_node_that_leaves_is_not_part_of_the_job_any_more():
    job = running(2)
    scale(job, 1)
    job.comes(1, round=1, running=True)
    assert job.sent(Refused)[0].because == "worker-1 was scaled down; it is not part of the job any more"
    assert job.joins(1, after=1) == []
    assert key(1) not in job.engine._index.waiting
