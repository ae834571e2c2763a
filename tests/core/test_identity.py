"""Ids only grow; ranks are inherited."""

from resile.api.kinds.elasticjob.roles import PS
from resile.core import decisions as de
from resile.protocol.job_changes import Scale
from resile.protocol.reports import NodeEnd, NodeStatus
from tests.core.given import bare, key, managed, running, running_bare


def test_a_job_launches_one_node_for_every_place():
    job = managed(3)
    assert job.launched == [0, 1, 2]
    assert [d.rank for d in job.said(de.LaunchNode)] == [0, 1, 2]


def test_every_role_has_its_own_ids():
    job = managed(1, roles={"ps": PS.declared(replicas=2)})
    assert [str(d.node) for d in job.said(de.LaunchNode)] == ["worker-0", "ps-0", "ps-1"]


def test_a_replacement_has_a_new_id_and_the_old_rank():
    job = running(4)
    job.seen(1, NodeStatus.FAILED, NodeEnd(exit_code=1))
    assert job.launched == [4]
    assert job.node(4).rank == 1
    assert job.node(4).relaunch_count == 1


def test_an_id_is_not_used_again_after_scaling_down_and_up():
    job = running(3)
    job.wants(Scale(role="worker", replicas=2))
    job.seen(2, NodeStatus.DELETED)
    job.wants(Scale(role="worker", replicas=3))
    assert job.launched == [3]
    assert job.node(3).rank == 2


def test_a_bare_node_that_comes_again_after_it_was_lost_has_a_new_id_and_the_lowest_free_rank():
    job = running_bare(2, least=1)
    job.engine.heard(key(1), job.now + 5)
    job.wait(job.timeouts.heartbeat_timeout)
    assert job.node(0).status is NodeStatus.FAILED
    job.comes(name="agent0")
    assert job.node(2).rank == 0


def test_a_bare_agent_gets_the_rank_it_asks_for_if_that_is_free():
    job = bare(1, 4)
    job.comes(name="a", rank=2)
    job.comes(name="b", rank=2)
    assert (job.node(0).rank, job.node(1).rank) == (2, 0)


def test_an_unknown_node_of_the_platform_is_removed():
    job = managed(1)
    job.seen(9, NodeStatus.RUNNING)
    assert job.deleted == [9]
