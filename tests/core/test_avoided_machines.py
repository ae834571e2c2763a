"""A machine that fell silent gets no new node for a while."""

import pytest

from resile.core import decisions as de
from resile.core import events as ev
from resile.core.nodes.launching import MAX_SUSPECTS, SUSPECT_SECONDS
from resile.protocol.reports import NodeEnd, NodeStatus
from tests.core.given import CRASH, PREEMPTED, Job, key, running


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
    job.does(ev.AgentDisconnected(node=key(1), connection=2))
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
