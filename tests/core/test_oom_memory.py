"""The replacement of a node that ran out of memory gets more."""

from resile.api.ids import Bytes, GiB
from resile.api.job import Resources
from resile.core import decisions as de
from resile.core.nodes.failure_causes import Cause
from resile.core.nodes.relaunch import GiveUp, Relaunch, decide
from resile.protocol.reports import NodeEnd, NodeStatus
from tests.core.given import PREEMPTED, failure, lose, managed, running


def test_memory_doubles_after_running_out_of_it_but_grows_by_no_more_than_a_step_and_ends_at_a_cap():
    assert decide(Cause.OOM, 0, 3, Bytes(2 * GiB)) == Relaunch(Bytes(4 * GiB))
    assert decide(Cause.OOM, 0, 3, Bytes(16 * GiB)) == Relaunch(Bytes(24 * GiB))
    assert decide(Cause.OOM, 0, 3, Bytes(60 * GiB)) == Relaunch(Bytes(64 * GiB))
    assert isinstance(decide(Cause.OOM, 0, 3, Bytes(64 * GiB)), GiveUp)
    assert decide(Cause.OOM, 0, 3, None) == Relaunch()


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


def test_memory_that_is_used_up_at_the_cap_ends_the_job_with_that_reason():
    job = running(1, limits=Resources(memory=Bytes(64 * GiB)))
    job.fails(0, failure(oom=True))
    assert job.state.reason == "WorkerOOM"


def test_running_out_of_memory_that_is_explained_late_still_gives_the_place_more():
    job = running(2, limits=Resources(memory=Bytes(4 * GiB)))
    lose(job, 1, connection=2)
    job.seen(1, NodeStatus.FAILED, NodeEnd(exit_code=137, reason="OOMKilled"))
    assert (job.deleted, job.launched) == ([2], [3])
    assert job.node(3).resources.memory == 8 * GiB
