"""Invariants of the core, checked after every event from outside: by its events, decisions and state."""

from __future__ import annotations

from resile.api.ids import NO_ROUND, NodeKey, Rank, Round
from resile.api.plan import Plan
from resile.core import decisions as de
from resile.core import events as ev
from resile.core.engine import Engine
from resile.core.nodes.failure_causes import Cause, cause_of
from resile.core.state import JobState, Phase
from resile.protocol.agent_to_master import LastStepTaken, NodeFinished, StepReport, WorkerFailed
from resile.protocol.job_changes import Scale
from resile.protocol.master_to_agent import RoundFormed, RoundOver
from resile.protocol.reports import NodeStatus, RoundAssignment

CRASHES = (Cause.CRASH, Cause.OOM)
"""Not taken from the core, which is checked by it."""


class InvariantBroken(AssertionError):
    """The core did what it promises never to do."""


def require(holds: bool, promise: str) -> None:
    if not holds:
        raise InvariantBroken(promise)


class Invariants:
    """Checks the core after every event. Knows earlier values, because some may only grow and others never change."""

    def __init__(self) -> None:
        self._rank_of: dict[NodeKey, Rank] = {}
        self._highest: dict[str, int] = {}
        self._ended: set[NodeKey] = set()
        self._round: Round = NO_ROUND
        self._places: dict[NodeKey, RoundAssignment] = {}
        self._evaluating: set[NodeKey] = set()
        """Members of the newest round that took its last step and have not ended."""
        self._failed_in: Round = NO_ROUND
        """The newest round in which a script failed. Its work after the last step may be done again."""
        self._over: Phase | None = None
        self._crashes = 0
        self._step = -1
        self._scaled = False
        self._plans: set[str] = set()
        self.events = 0
        self.rounds = 0

    def __call__(self, engine: Engine, event: ev.AnyEvent, made: list[de.AnyDecision]) -> None:
        self.events += 1
        state = engine.state
        require(engine.consistent(), "the indexes agree with the state")
        self._nodes(state)
        self._budgets(state, event)
        self._changes(state)
        self._last_steps(state, event)
        self._formed(state, made)
        self._round_state(state)
        self._steps(state, event)
        self._ending(state, made)

    def _nodes(self, state: JobState) -> None:
        filled = set()
        for key, node in state.nodes.items():
            if key not in self._rank_of:
                require(key.id > self._highest.get(key.role, -1), f"ids only grow, and {key} is not new")
                self._highest[key.role] = key.id
                self._rank_of[key] = node.rank
            require(self._rank_of[key] == node.rank, f"the rank of {key} never changes")
            if node.status.ended:
                self._ended.add(key)
            else:
                require(key not in self._ended, f"{key} ended and is not back")
            if node.fills:
                place = (key.role, node.rank)
                require(place not in filled, f"only one node fills place {place}")
                filled.add(place)
        require(self._rank_of.keys() == state.nodes.keys(), "no node is forgotten")

    def _changes(self, state: JobState) -> None:
        open_ = {change.uid for change in state.changes if change.uid}
        for uid in self._plans - open_:
            require(uid in state.plan_ends, f"the end of plan {uid} is told")
        self._plans = open_
        for change in state.changes:
            dead = [str(key) for key in change.coming if not state.nodes[key].alive]
            require(not dead, f"no change waits for {dead}")
            ended = [str(key) for key in change.going if state.nodes[key].status.ended]
            require(not ended, f"{ended} have ended, and no change waits for that")
            reserves = {key for key, node in state.nodes.items() if node.replaces is not None and node.alive}
            require(set(change.moves.values()) <= reserves, "only reserves take over")
        require(not (state.changes and state.phase.over), "nothing changes after the end")

    def _budgets(self, state: JobState, event: ev.AnyEvent) -> None:
        crashes = sum(len(s.losses.get(c, ())) for s in state.spent.values() for c in CRASHES)
        if crashes > self._crashes:
            match event:
                case ev.NodesListed() | ev.AgentSaid(message=WorkerFailed()):
                    blamed = True
                case ev.NodeSeen(status=NodeStatus.FAILED):
                    blamed = cause_of(event.status, event.end) in CRASHES
                case _:
                    blamed = False
            require(blamed, f"only a crash costs a crash, and this was {event}")
        self._crashes = crashes
        change = event.change if isinstance(event, ev.ChangeWanted) else None
        self._scaled |= isinstance(change, Scale | Plan)  # after which no place is given up any more
        for (role, rank), spent in state.spent.items():
            used = spent.count(Cause.CRASH, state.trained, state.spec.timeouts.budget_window)
            within = used <= state.spec.roles[role].crash_budget or (role, rank) in state.given_up
            require(within or self._scaled, f"place {rank} is given up after {used} crashes")

    def _formed(self, state: JobState, made: list[de.AnyDecision]) -> None:
        sent = [(d.to[0], d.message) for d in made if isinstance(d, de.Send) and isinstance(d.message, RoundFormed)]
        if not sent:
            return
        config = state.rendezvous.config
        assert config is not None, "there are rules before there are rounds"
        (number,) = {formed.round for _, formed in sent}
        places = {key: formed.assignment for key, formed in sent}
        if number == self._round:  # a member that connected again is told again
            for key, place in places.items():
                require(self._places.get(key) == place, f"{key} has the place in round {number} that it had")
            return
        require(number > self._round, f"round numbers grow, and {number} is not above {self._round}")
        size = len(places)
        require(config.min_nodes <= size <= config.max_nodes, f"a round of {size} is within {config}")
        require(size % config.node_unit == 0, f"a round of {size} is a whole number of units of {config.node_unit}")
        ranks = [place.group_rank for place in places.values()]
        require(ranks == list(range(size)), "group ranks are 0, 1, 2, …")
        fills = [(state.spec.role_order(key.role), self._rank_of[key]) for key in places]
        require(fills == sorted(fills), "group ranks follow the nodes' roles and ranks")
        require(not self._ended & places.keys(), "members are alive")
        busy = [key for key in self._evaluating if state.nodes[key].alive and key not in places]
        require(not busy, f"no node trains again what {busy} have trained and still evaluate")
        self._evaluating.clear()
        self._round, self._places = number, places
        self.rounds += 1

    def _last_steps(self, state: JobState, event: ev.AnyEvent) -> None:
        match event:
            case ev.AgentSaid(node=node, message=LastStepTaken(round=number)):
                running = state.rendezvous.running
                complete = running is not None and running.round == number and running.complete
                if complete and self._failed_in < number and node in self._places:
                    self._evaluating.add(node)
            case ev.AgentSaid(node=node, message=NodeFinished()):
                self._evaluating.discard(node)
            case ev.AgentSaid(message=WorkerFailed()):
                self._failed_in = self._round
                self._evaluating.clear()

    def _round_state(self, state: JobState) -> None:
        require(state.rendezvous.last_round == self._round, "a round is announced when it forms")
        running = state.rendezvous.running
        if running is not None:
            require(running.round == state.rendezvous.last_round, "only the newest round runs")
            if not state.phase.over:
                lost = [k for k in running.assignments if not state.nodes[k].alive]
                require(set(lost) <= running.done, f"a round does not outlive its members {lost}")

    def _steps(self, state: JobState, event: ev.AnyEvent) -> None:
        report = event.message if isinstance(event, ev.AgentSaid) else None
        if state.progress.step != self._step and isinstance(report, StepReport):
            running = state.rendezvous.running
            runs = running is not None and running.round == report.round
            require(runs, f"a step of round {report.round} counts only while that round runs")
        self._step = state.progress.step

    def _ending(self, state: JobState, made: list[de.AnyDecision]) -> None:
        if self._over is not None:
            require(state.phase is self._over, f"a job that {self._over} stays so")
            sent = [d.message for d in made if isinstance(d, de.Send)]
            begun = [d for d in (*made, *sent) if isinstance(d, de.LaunchNode | RoundFormed | RoundOver)]
            require(not begun, f"nothing begins after the end: {begun}")
        elif state.phase.over:
            self._over = state.phase
            require(any(isinstance(d, de.Finish) for d in made), "the end is told")

    def reborn(self, step: int) -> None:
        """Note that the master was restarted. Its progress begins at `step`, the newest step in the journal."""
        self._step = step
