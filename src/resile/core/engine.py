"""The engine: one job's state, and the one function that changes it.

The master passes events to `handle`, one after the other, and executes the decisions that it returns. `durable` events
must be in the journal before their decisions are executed. `Engine.replay` of those events gives the same state again.
"""

from __future__ import annotations

from collections.abc import Iterable

from resile.api.ids import NodeKey
from resile.api.plan import Plan
from resile.core import agents, completion, progress, shard_ledger, shard_requests
from resile.core import events as ev
from resile.core.completion import Reason
from resile.core.context import Context, Index
from resile.core.deadlines import Alarm, Deadlines
from resile.core.decisions import AnyDecision, Reply
from resile.core.nodes import launching, lifecycle, migration, relaunch, scale_operations, scaling
from resile.core.rendezvous import forming, rounds, running, state_holders
from resile.core.state import JobState, Node, Phase
from resile.protocol.agent_to_master import (
    AgentMessage,
    CanRegroup,
    Join,
    LastStepTaken,
    Leaving,
    NodeFinished,
    ShardsFreed,
    StepReport,
    WorkerFailed,
    WorkersChanged,
    WorkerStuck,
)
from resile.protocol.job_changes import Change, Scale, Stop, Suspend
from resile.protocol.reports import NodeStatus
from resile.protocol.shards import OpenDataset, ShardProgress, TakeShard

NOTE_STEPS = 1 / 60
"""How much training time the step summaries in the journal (`StepsNoted`) may lag, as a fraction of `budget_window`."""


class Engine:
    """Decides for one job: `handle` takes an event, changes the job's state and returns decisions. Not thread-safe."""

    def __init__(self, state: JobState) -> None:
        self.state = state
        self._index = Index(state)
        self._deadlines = Deadlines(state.spec.timeouts.heartbeat_timeout)
        self._steps_due: float | None = None

    @classmethod
    def replay(cls, state: JobState, history: Iterable[tuple[float, ev.AnyEvent]]) -> Engine:
        """Make an engine from a snapshot and the (time, event) pairs after it. Drops the decisions on these events."""
        engine = cls(state)
        for now, event in history:
            engine.handle(event, now)
        engine._deadlines.reset()  # they belong to the master that is gone; MasterReturned sets new ones
        engine._steps_due = None
        return engine

    def heard(self, node: NodeKey, now: float) -> None:
        """Restart the silence alarm of a node whose agent sent a message. Costs one dictionary write."""
        self._deadlines.heard(node, now)

    def restart_silence_timers(self, now: float) -> None:
        """Start all silence alarms afresh. Call this if the master stood still and could hear no agent."""
        self._deadlines.restart_silence_timers(now)

    def next_deadline(self) -> float | None:
        """When to call `due` again; None if no alarm is set."""
        return self._deadlines.next() if self._steps_due is None else self._steps_due

    def due(self, now: float) -> list[ev.AnyEvent]:
        """The events to pass to `handle` now: those of alarms that are due, and a summary of steps if it is due."""
        events = self._deadlines.due(now)
        if self._steps_due is not None:
            self._steps_due = None
            events.append(progress.summary(self.state.progress))
        return events

    def consistent(self) -> bool:
        """True if the indexes agree with the state. Scans all nodes, so it is only for tests and simulations."""
        fresh, kept, hints = vars(Index(self.state)), vars(self._index), {"incarnations", "lowest_free"}
        return all(kept[name] == value for name, value in fresh.items() if name not in hints)

    @staticmethod
    def durable(event: ev.AnyEvent) -> bool:
        """True if the event must be written to the journal. This is so for all events but step reports.

        Step reports reach the journal as a summary, the event `StepsNoted`, which `due` returns.
        """
        return not (isinstance(event, ev.AgentSaid) and isinstance(event.message, StepReport))

    def handle(self, event: ev.AnyEvent, now: float) -> list[AnyDecision]:
        """Change the state by one event and return the decisions. Repeated and late events are harmless."""
        ctx = Context(self.state, self._index, self._deadlines, now)
        _handle(ctx, event)
        shard_requests.grant_waiting(ctx)
        scale_operations.close_complete(ctx)
        if ctx.note_steps:
            self._steps_due = now
        return ctx.decisions


def _handle(ctx: Context, event: ev.AnyEvent) -> None:
    state = ctx.state
    match event:
        case ev.Started():
            _start(ctx)
        case ev.MasterReturned():
            _return(ctx)
        case ev.NodeSeen():
            lifecycle.on_node_seen(ctx, event)
        case ev.NodesListed():
            lifecycle.on_nodes_listed(ctx, event)
        case ev.AgentConnected():
            agents.on_agent_connected(ctx, event)
        case ev.ChangeWanted():
            _change(ctx, event.change, event.request)
        case ev.PlanDeleted():
            scale_operations.on_plan_deleted(ctx, event.uid)
        case ev.StragglerWaitOver():
            rounds.on_straggler_wait_over(ctx, state.rendezvous)
        case ev.JoinTimeout():
            _on_join_timeout(ctx)
        case ev.StepsNoted():
            state.trained = max(state.trained, event.trained)
            progress.on_steps_noted(state.progress, event)
            running.on_step_noted(ctx, state.rendezvous, event.round)
        case _:  # the other events are about one node, and are ignored if it is unknown or has ended
            node = state.nodes.get(event.node)
            if node is None:
                return
            if isinstance(event, ev.AgentSaid):
                _handle_message(ctx, node, event.message)
            elif not node.status.ended:
                _handle_of_node(ctx, node, event)


def _change(ctx: Context, change: Change, request: int) -> None:
    match change:
        case Scale():
            scaling.on_scale(ctx, change, request)
        case Plan():
            scaling.on_plan(ctx, change, request)
        case Suspend():
            lifecycle.on_suspend(ctx, change, request)
        case Stop():
            ctx.decide(Reply(request=request))
            completion.fail(ctx, Reason.STOPPED, change.because)


def _handle_message(ctx: Context, node: Node, message: AgentMessage) -> None:
    rdzv = ctx.state.rendezvous
    match message:
        case OpenDataset():
            shard_requests.on_open_dataset(ctx, node.key, message)
        case ShardProgress():
            shard_requests.on_shard_progress(ctx, node.key, message)
        case _ if node.status.ended:
            return
        case ShardsFreed():
            shard_ledger.release_worker(ctx.state.ledger, node.key, message.worker)
        case _ if ctx.state.phase.over:
            return
        case Leaving():
            agents.on_leaving(ctx, node, message)
        case Join():
            if node.replaces is not None and rdzv.has_taken_last_step(node.replaces):
                migration.cancel(ctx, ctx.state.nodes[node.replaces])
            else:
                migration.complete(ctx, node)
            rounds.on_join(ctx, rdzv, node, message)
        case CanRegroup():
            agents.on_can_regroup(ctx, node)
        case WorkersChanged():
            running.on_workers_changed(ctx, rdzv, node, message)
        case LastStepTaken():
            rounds.on_last_step_taken(ctx, rdzv, node, message)
        case WorkerStuck():
            state_holders.on_worker_stuck(ctx, node, message)
            forming.form(ctx, rdzv)  # no round waits for it any more
        case WorkerFailed():
            agents.on_worker_failed(ctx, node, message)
        case NodeFinished():
            rounds.on_node_finished(ctx, rdzv, node, message)
        case StepReport():
            _on_step(ctx, node, message)
        case TakeShard():
            shard_requests.on_take_shard(ctx, node.key, message)


NodeEvent = ev.AgentDisconnected | ev.AgentSilent | ev.AgentStayedAway | ev.LaunchDue | ev.PendingTimeout


def _handle_of_node(ctx: Context, node: Node, event: NodeEvent) -> None:
    match event:
        case ev.AgentDisconnected():
            agents.on_agent_disconnected(ctx, node, event.connection)
        case ev.AgentStayedAway() if ctx.state.phase.over:
            completion.remove_leftover(ctx, node)
        case _ if ctx.state.phase.over:
            return
        case ev.AgentSilent():
            if node.connected:
                launching.avoid_machine(ctx, node)
                lifecycle.declare_lost(ctx, node, f"its agent was silent for {event.seconds:g} s")
        case ev.AgentStayedAway():
            if node.agent is None:
                lifecycle.on_agent_never_connected(ctx, node)
            elif not node.connected:
                lifecycle.declare_lost(ctx, node, "its agent's connection closed and did not come back")
        case ev.LaunchDue():
            launching.on_launch_due(ctx, node)
        case ev.PendingTimeout():
            lifecycle.on_pending_timeout(ctx, node)


def _start(ctx: Context) -> None:
    state = ctx.state
    if state.started_at is not None:
        return
    state.started_at = ctx.now
    if state.suspended:
        state.phase = Phase.SUSPENDED
        ctx.note("JobSuspended", "the job waits to be resumed")
        return
    state.phase = Phase.PENDING
    ctx.note("JobStarted", f"job {state.spec.name} starts")
    if not state.spec.managed:
        forming.start_join_timer(ctx, state.rendezvous)
    launching.fill(ctx)


def _return(ctx: Context) -> None:
    """Give every agent time to connect to this new master before its node counts as lost."""
    ctx.deadlines.reset()
    shard_ledger.forget_waiting(ctx.state.ledger)
    if ctx.state.phase.over:
        for node in ctx.state.nodes.values():
            if ctx.state.spec.managed and not node.status.ended:
                ctx.deadlines.set(Alarm.AWAY, ctx.now + ctx.timeouts.master_recovery, node.key)
        return
    ctx.note("MasterReturned", "the master came back from its journal")
    for node in ctx.state.nodes.values():
        if node.agent is not None and not node.status.ended:
            ctx.detach(node, ctx.now + ctx.timeouts.master_recovery)
        if node.status is NodeStatus.PENDING:
            lifecycle.watch_pending(ctx, node)
        elif node.status is NodeStatus.RUNNING:
            lifecycle.expect_agent(ctx, node)
    rdzv = ctx.state.rendezvous
    known = rdzv.config is not None or not ctx.state.spec.managed
    if rdzv.forming is not None and known and not ctx.state.suspended:
        forming.start_join_timer(ctx, rdzv)


def _on_join_timeout(ctx: Context) -> None:
    state, rdzv = ctx.state, ctx.state.rendezvous
    if state.nodes and not ctx.index.trainers and not state.spec.managed and rdzv.forming is not None:
        relaunch.fail_without_nodes(ctx, max(state.nodes.values(), key=lambda node: node.ended_at or 0.0))
    else:
        forming.on_join_timeout(ctx, rdzv)


def _on_step(ctx: Context, node: Node, report: StepReport) -> None:
    state, current = ctx.state, ctx.state.rendezvous.running
    if current is None or current.round != report.round or node.key not in current.assignments:
        return
    first = state.progress.step < 0
    outage = progress.on_step(state.progress, report.round, report.step, report.total, ctx.now)
    if outage is not None:
        took = ctx.now - outage.noticed_at
        ctx.note("TrainingResumed", f"resumed at step {report.step}, {took:.2f} s after: {outage.because}", node.key)
    elif first:
        ctx.note("TrainingStarted", f"step {report.step} was taken", node.key)
    behind = state.progress.trained - state.trained
    ctx.note_steps = first or outage is not None or behind >= ctx.timeouts.budget_window * NOTE_STEPS
