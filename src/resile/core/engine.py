"""The engine: one job's state, and the one function that changes it.

The shell feeds `handle` one ordered queue of events and executes the decisions that come out. `durable` events must
be in the journal before their decisions are executed; `Engine.replay` of those events gives the same state again.
"""

from __future__ import annotations

from collections.abc import Iterable

from resile.api.ids import NodeKey
from resile.api.reports import NodeStatus
from resile.core import agents, completion, ledger, progress
from resile.core import events as ev
from resile.core.completion import Reason
from resile.core.context import Index, Turn
from resile.core.deadlines import Alarm, Deadlines
from resile.core.decisions import AnswerDataset, AnswerProgress, AnswerShard, AnyDecision, Reply
from resile.core.ledger import Lease, Wish
from resile.core.nodes import lifecycle, scale_operations, scaling
from resile.core.rendezvous import rounds, state_holders
from resile.core.state import Forming, JobState, Phase, Underway

NOTE_STEPS = 1 / 60
"""Of the time after which a failure is forgiven: how much training time the journal may lack."""


class Engine:
    """One job's brain. Not thread-safe: events come one after the other."""

    def __init__(self, state: JobState) -> None:
        self.state = state
        self._index = Index(state)
        self._deadlines = Deadlines(state.spec.timeouts.silence)
        self._steps_due: float | None = None

    @classmethod
    def replay(cls, state: JobState, history: Iterable[tuple[float, ev.AnyEvent]]) -> Engine:
        """The engine after a journal: a snapshot and what happened since. Decisions were executed long ago."""
        engine = cls(state)
        for now, event in history:
            engine.handle(event, now)
        engine._deadlines.reset()  # they belong to the master that is gone; MasterReturned sets new ones
        engine._steps_due = None
        return engine

    def heard(self, node: NodeKey, now: float) -> None:
        """An agent spoke. Costs one dictionary write; changes nothing but the moment it would be missed."""
        self._deadlines.heard(node, now)

    def amnesty(self, now: float) -> None:
        """The shell stood still and could hear nobody: nobody is to be missed for that."""
        self._deadlines.amnesty(now)

    def next_deadline(self) -> float | None:
        """When to ask `due` again; None if nothing is awaited."""
        return self._deadlines.next() if self._steps_due is None else self._steps_due

    def due(self, now: float) -> list[ev.AnyEvent]:
        """What the passing of time has brought; feed each to `handle` like any other event."""
        events = self._deadlines.due(now)
        if self._steps_due is not None:
            self._steps_due = None
            events.append(_steps_noted(self.state))
        return events

    def consistent(self) -> bool:
        """Whether the indexes agree with the state; a scan, for tests and simulations."""
        fresh, kept = Index(self.state), self._index
        same = ("waiting", "coming", "places", "trainers", "elastic", "near", "rigid", "stuck", "holders")
        return all(getattr(fresh, name) == getattr(kept, name) for name in same)

    @staticmethod
    def durable(event: ev.AnyEvent) -> bool:
        """Whether the journal must have this event: all but step reports, of which `due` gives a summary."""
        return not isinstance(event, ev.Stepped)

    def handle(self, event: ev.AnyEvent, now: float) -> list[AnyDecision]:
        """Change the state by one event and say what is to be done. Repeated and late events are harmless."""
        turn = Turn(self.state, self._index, self._deadlines, now)
        _handle(turn, event)
        _serve_wishes(turn)
        scale_operations.settle(turn)
        if turn.note_steps:
            self._steps_due = now
        return turn.decisions


def _handle(turn: Turn, event: ev.AnyEvent) -> None:
    state = turn.state
    match event:
        case ev.Started():
            _start(turn)
        case ev.MasterReturned():
            _return(turn)
        case ev.NodeSeen():
            lifecycle.seen(turn, event)
        case ev.NodesListed():
            lifecycle.listed(turn, event)
        case ev.AgentCame():
            agents.came(turn, event)
        case ev.ScaleWanted():
            scaling.scale(turn, event)
        case ev.PlanWanted():
            scaling.plan(turn, event)
        case ev.PlanDropped():
            scale_operations.dropped(turn, event.uid)
        case ev.SuspendWanted():
            lifecycle.suspend(turn, event)
        case ev.StopWanted():
            turn.decide(Reply(request=event.request))
            completion.fail(turn, Reason.STOPPED, event.because)
        case ev.SettleOver():
            rounds.settle_over(turn)
        case ev.JoinOver():
            _join_over(turn)
        case ev.StepsNoted():
            state.trained = max(state.trained, event.trained)
            progress.noted(state.progress, event.step, event.total, event.round, event.trained, event.at)
            rounds.stepped(turn, event.round)
        case ev.DatasetOpened():
            error = ledger.open_dataset(
                state.ledger, event.name, event.size, event.shard_size, event.epochs, event.seed
            )
            turn.decide(AnswerDataset(node=event.node, worker=event.worker, request=event.request, error=error))
        case _:
            _handle_of_node(turn, event)


def _handle_of_node(turn: Turn, event: ev.AnyEvent) -> None:
    """Events that concern a node; those of unknown nodes and of nodes that ended say nothing new."""
    node = turn.state.nodes.get(event.node)  # type: ignore[union-attr]  # every remaining event has a node
    if node is None:
        return
    match event:
        case ev.ShardAdvanced():  # before the check below: even a lost node gets the truth about its report
            _advance(turn, event)
        case _ if node.status.ended:
            return
        case ev.AgentWent():
            agents.went(turn, node, event.session)
        case ev.WorkerWent():
            ledger.release_worker(turn.state.ledger, event.node, event.worker)
        case ev.AgentStayedAway() if turn.state.phase.over:
            completion.clear_away(turn, node)
        case _ if turn.state.phase.over:
            return
        case ev.AgentLeaving():
            agents.leaving(turn, node, event)
        case ev.AgentJoined():
            if node.relieves is not None and rounds.took_the_last_step(turn, node.relieves):
                lifecycle.dismiss_reserve(turn, turn.state.nodes[node.relieves])
            else:
                lifecycle.take_over(turn, node)
            rounds.join(turn, node, event)
        case ev.AgentElastic():
            agents.elastic(turn, node)
        case ev.AgentChanged():
            rounds.changed(turn, node, event)
        case ev.RoundComplete():
            rounds.complete(turn, node, event)
        case ev.AgentStuck():
            state_holders.stuck(turn, node, event)
            rounds.form(turn)  # nobody who is near waits for it any more
        case ev.WorkerFailed():
            agents.worker_failed(turn, node, event)
        case ev.NodeFinished():
            rounds.finished(turn, node, event)
        case ev.Stepped():
            _stepped(turn, event)
        case ev.ShardWanted():
            _want_shard(turn, event)
        case ev.AgentSilent():
            if node.connected:
                lifecycle.suspect(turn, node)
                lifecycle.lose(turn, node, f"its agent was silent for {event.seconds:g} s")
        case ev.AgentStayedAway():
            if node.agent is None:
                lifecycle.miss_agent(turn, node)
            elif not node.connected:
                lifecycle.lose(turn, node, "its agent's connection closed and did not come back")
        case ev.LaunchDue():
            lifecycle.launch_due(turn, node)
        case ev.PendOver():
            lifecycle.pend_over(turn, node)


def _start(turn: Turn) -> None:
    state = turn.state
    if state.started_at is not None:
        return
    state.started_at = turn.now
    if state.suspended:
        state.phase = Phase.SUSPENDED
        turn.note("JobSuspended", "the job waits to be resumed")
        return
    state.phase = Phase.PENDING
    turn.note("JobStarted", f"job {state.spec.name} starts")
    if not state.spec.managed:
        rounds.open_forming(turn)
    lifecycle.fill(turn)


def _return(turn: Turn) -> None:
    """A new master: every agent gets time to come home before it counts as lost."""
    turn.deadlines.reset()
    ledger.forget_wishes(turn.state.ledger)
    if turn.state.phase.over:
        for node in turn.state.nodes.values():
            if turn.state.spec.managed and not node.status.ended:
                turn.deadlines.set(Alarm.AWAY, turn.now + turn.timeouts.homecoming, node.key)
        return
    turn.note("MasterReturned", "the master came back from its journal")
    for node in turn.state.nodes.values():
        if node.agent is not None and not node.status.ended:
            turn.detach(node, turn.now + turn.timeouts.homecoming)
        if node.status is NodeStatus.PENDING:
            lifecycle.watch_pending(turn, node)
        elif node.status is NodeStatus.RUNNING:
            lifecycle.expect_agent(turn, node)
    known = turn.state.meeting is not None or not turn.state.spec.managed
    if isinstance(turn.state.gathering, Forming) and known and not turn.state.suspended:
        rounds.open_forming(turn)


def _join_over(turn: Turn) -> None:
    state = turn.state
    if state.nodes and not turn.index.trainers and not state.spec.managed and isinstance(state.gathering, Forming):
        lifecycle.deserted(turn, max(state.nodes.values(), key=lambda node: node.ended_at or 0.0))
    else:
        rounds.join_over(turn)


def _stepped(turn: Turn, event: ev.Stepped) -> None:
    state = turn.state
    gathering = state.gathering
    if not isinstance(gathering, Underway) or gathering.round != event.round or event.node not in gathering.places:
        return
    first = state.progress.step < 0
    outage = progress.stepped(state.progress, event.round, event.step, event.total, turn.now)
    if outage is not None:
        took = turn.now - outage.noticed_at
        turn.note("TrainingResumed", f"resumed at step {event.step}, {took:.2f} s after: {outage.because}", event.node)
    elif first:
        turn.note("TrainingStarted", f"step {event.step} was taken", event.node)
    behind = state.progress.trained - state.trained
    turn.note_steps = first or outage is not None or behind >= turn.timeouts.forgive * NOTE_STEPS


def _steps_noted(state: JobState) -> ev.StepsNoted:
    now = state.progress
    return ev.StepsNoted(
        trained=now.trained, step=now.step, total=now.total, round=now.round, at=now.reported_at or 0.0
    )


def _want_shard(turn: Turn, event: ev.ShardWanted) -> None:
    wish = Wish(event.node, event.worker, event.request)
    error = ledger.denied(turn.state.ledger, event.dataset, wish)
    if error:
        turn.decide(AnswerShard(node=event.node, worker=event.worker, request=event.request, error=error))
        return
    granted = ledger.want(turn.state.ledger.datasets[event.dataset], wish)
    if granted is not None:
        _grant(turn, wish, *granted)


def _advance(turn: Turn, event: ev.ShardAdvanced) -> None:
    dataset = turn.state.ledger.datasets.get(event.dataset)
    counted = dataset is not None and ledger.advance(dataset, event.node, event.worker, event.lease, event.upto)
    turn.decide(AnswerProgress(node=event.node, worker=event.worker, request=event.request, counted=counted))


def _serve_wishes(turn: Turn) -> None:
    for wish, number, lease in ledger.grantable(turn.state.ledger):
        _grant(turn, wish, number, lease)


def _grant(turn: Turn, wish: Wish, number: int, lease: Lease) -> None:
    turn.decide(
        AnswerShard(
            node=wish.node,
            worker=wish.worker,
            request=wish.request,
            lease=number,
            epoch=lease.epoch,
            start=lease.start,
            end=lease.end,
        )
    )
