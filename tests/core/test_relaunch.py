"""Which node replaces a lost one, and when."""

from resile.core import events as ev
from resile.protocol.master_to_agent import JobOver
from resile.protocol.reports import NodeEnd, NodeStatus
from tests.core.given import CRASH, joins_again, managed, running


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
