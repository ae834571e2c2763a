"""Silence, blinks, homecoming and amnesty."""

from resile.core import decisions as de
from resile.core import events as ev
from resile.core.deadlines import Alarm, Deadlines
from resile.core.state import Phase
from resile.protocol.agent_to_master import Leaving, NodeFinished
from resile.protocol.job_changes import Scale, Stop
from resile.protocol.master_to_agent import RoundOver, Welcome
from resile.protocol.reports import NodeStatus
from tests.core.given import bare, joins_again, key, managed, running, running_bare


def test_a_silent_agent_is_lost_and_its_peers_are_told_at_once():
    job = running(3)
    job.engine.heard(key(0), job.now + 5)
    job.engine.heard(key(2), job.now + 5)
    job.wait(job.timeouts.heartbeat_timeout)
    assert job.node(1).status is NodeStatus.FAILED
    assert job.told(RoundOver) == (key(0), key(2))
    assert job.said(de.Drop) == [de.Drop(node=key(1))]
    assert (job.deleted, job.launched) == ([1], [3])


def test_an_agent_that_speaks_now_and_then_is_not_lost():
    job = running(1)
    for _ in range(20):
        job.wait(job.timeouts.heartbeat_timeout * 0.9)
        job.heartbeats()
    assert job.members == [0]


def test_a_connection_may_blink():
    job = running(2)
    job.does(ev.AgentDisconnected(node=key(1), connection=2))
    job.wait(job.timeouts.reconnect * 0.9)
    job.comes(1, round=1, running=True)
    job.wait(job.timeouts.reconnect)
    assert job.members == [0, 1]


def test_a_connection_that_does_not_come_back_costs_the_node():
    job = running(2)
    job.does(ev.AgentDisconnected(node=key(1), connection=2))
    job.wait(job.timeouts.reconnect)
    assert job.members == []
    assert job.node(1).status is NodeStatus.FAILED


def test_the_end_of_an_old_connection_says_nothing():
    job = running(2)
    job.comes(1, round=1, running=True)
    job.does(ev.AgentDisconnected(node=key(1), connection=2))
    job.wait(job.timeouts.reconnect)
    assert job.members == [0, 1]


def test_a_hello_from_an_older_connection_does_not_replace_the_newer_one():
    job = running(1)
    job.comes(0, round=1, running=True)
    newer = job.node(0).agent.connection
    job.connections -= 2
    assert job.comes(0, round=1, running=True) == []
    assert job.node(0).agent.connection == newer


def test_nobody_is_missed_while_the_listener_itself_stood_still():
    job = running(2)
    job.now += 60.0
    job.engine.restart_silence_timers(job.now)
    job.wait(job.timeouts.heartbeat_timeout * 0.9)
    assert job.members == [0, 1]
    job.wait(job.timeouts.heartbeat_timeout * 0.2)
    assert job.members == []


def test_after_its_return_a_master_waits_for_its_agents_to_come_home():
    job = running(2)
    job.does(ev.MasterReturned())
    job.wait(job.timeouts.master_recovery * 0.9)
    assert job.members == [0, 1]
    job.comes(0, round=1, running=True)
    job.wait(job.timeouts.master_recovery * 0.2)
    assert job.members == []
    assert (job.node(0).alive, job.node(1).alive) == (True, False)


def test_the_last_bare_node_may_be_late_but_not_too_late():
    job = running_bare(1, most=2)
    job.does(ev.AgentDisconnected(node=key(0), connection=1))
    job.wait(job.timeouts.reconnect)
    assert job.state.phase == "Running"
    job.comes(name="agent0", round=1, running=True)
    assert job.told(RoundOver) == (key(1),)
    job.does(ev.AgentDisconnected(node=key(1), connection=2))
    job.wait(job.timeouts.reconnect + job.timeouts.master_recovery)
    assert job.state.reason == "NoNodesLeft"


def test_the_last_bare_node_that_leaves_ends_the_job():
    job = bare(1, 2)
    job.comes(name="a")
    job.says(0, Leaving(because="SIGTERM"))
    assert job.state.message == "worker-0 was the last node, and it was deleted (Left): SIGTERM"


def test_a_node_that_leaves_by_itself_is_replaced_without_costing_a_crash():
    job = running(2, crash_budget=0)
    job.says(1, Leaving(because="SIGTERM"))
    assert job.launched == [2]


def test_a_node_that_runs_but_whose_agent_never_comes_is_replaced():
    job = managed(2, timeouts={"join": 50.0})
    job.comes(0)
    job.joins(0)
    job.seen(1, NodeStatus.RUNNING)
    job.engine.restart_silence_timers(50.0)
    job.wait(50.0)
    assert (job.deleted, job.launched) == ([1], [2])


def test_nobody_is_missed_in_a_job_whose_nodes_have_no_agents():
    job = managed(2)
    job.seen(0, NodeStatus.RUNNING)
    job.seen(1, NodeStatus.RUNNING)
    job.wait(10 * job.timeouts.join)
    assert job.node(0).alive
    assert job.node(1).alive


def test_an_agent_knows_better_than_a_late_word_of_the_platform_whether_it_runs():
    job = running(1)
    job.seen(0, NodeStatus.PENDING)
    assert job.node(0).status is NodeStatus.RUNNING


def test_a_heartbeat_does_not_grow_the_heap():
    alarms = Deadlines(2.0)
    alarms.watch(key(0), 0.0)
    for beat in range(10_000):
        alarms.heard(key(0), beat * 0.1)
        alarms.due(beat * 0.1)
    assert len(alarms._heap) == 1


def test_setting_and_calling_off_an_alarm_does_not_grow_the_heap():
    alarms = Deadlines(2.0)
    for blink in range(10_000):
        alarms.set(Alarm.AWAY, blink + 600.0, key(0))
        alarms.clear(Alarm.AWAY, key(0))
    assert len(alarms._heap) == 1


def test_an_alarm_that_is_moved_goes_off_once_at_its_last_time():
    alarms = Deadlines(2.0)
    alarms.set(Alarm.JOIN, 10.0)
    alarms.set(Alarm.JOIN, 5.0)
    alarms.set(Alarm.JOIN, 7.0)
    assert alarms.due(6.9) == []
    assert alarms.due(7.0) == [ev.JoinTimeout()]
    assert alarms.due(100.0) == []


def test_an_unwatched_node_is_not_missed():
    alarms = Deadlines(2.0)
    alarms.heard(key(0), 0.0)
    assert alarms.next() is None


def test_survivors_regroup_without_the_lost_node_while_its_successor_starts():
    job = running(3, least=2)
    job.does(ev.AgentDisconnected(node=key(2), connection=3))
    job.wait(job.timeouts.reconnect)
    joins_again(job, 0, 1)
    assert job.members == []
    job.wait(job.timeouts.straggler_wait / 2)
    job.heartbeats()
    job.wait(job.timeouts.straggler_wait / 2)
    assert job.members == [0, 1]


def test_a_node_that_is_out_of_reach_when_the_job_ends_well_is_removed_in_the_end():
    job = running(2)
    for number in (0, 1):
        job.says(number, NodeFinished(round=job.state.rendezvous.last_round))
    assert (job.state.phase, job.deleted) == (Phase.SUCCEEDED, [])
    job.seen(0, NodeStatus.SUCCEEDED)
    job.wait(job.timeouts.exit_grace)
    assert job.deleted == [1], "its machine lost power, so it can neither exit nor say so"


def test_a_node_that_is_removed_has_the_time_to_save_that_its_pod_gives():
    job = managed(2, grace=120.0)
    for number in (0, 1):
        job.comes(number)
        assert [welcome.exit_grace for welcome in job.sent(Welcome)] == [120.0]
    job.wants(Scale(role="worker", replicas=1))
    assert [decision.grace for decision in job.said(de.DeleteNode)] == [120.0]
    job.wants(Stop(because="enough"))
    assert {decision.grace for decision in job.said(de.DeleteNode)} == {120.0}
