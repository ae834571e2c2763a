"""A simulated master: the real core in a process that can be killed between any two of its acts.

Like the production master it handles waiting events as one batch, writes the journal, and only then executes. If it is
killed before the writing, nothing has happened. If it is killed before the executing, the journal knows what no agent
was told.
"""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING

import msgspec

from resile.api.ids import NodeKey
from resile.core import decisions as de
from resile.core import events as ev
from resile.core.engine import Engine
from resile.core.state import JobState
from resile.protocol.agent_to_master import AgentMessage, Heartbeat, Hello
from resile.protocol.master_to_agent import MasterMessage
from resile.sim.clock import Timer
from resile.sim.world.network import Link

if TYPE_CHECKING:
    from resile.sim.cluster import Cluster


_encode = msgspec.msgpack.Encoder().encode
_decode_event = msgspec.msgpack.Decoder(tuple[float, ev.AnyEvent]).decode
_decode_state = msgspec.msgpack.Decoder(JobState).decode


class MemoryJournal:
    """The newest snapshot and the events after it, as bytes. A dead master leaves nothing else behind."""

    def __init__(self, state: JobState) -> None:
        self.compact(state)

    def append(self, now: float, event: ev.AnyEvent) -> None:
        self._events.append(_encode((now, event)))

    def compact(self, state: JobState) -> None:
        self._snapshot = _encode(state)
        self._events: list[bytes] = []

    def load(self) -> tuple[JobState, list[tuple[float, ev.AnyEvent]]]:
        return _decode_state(self._snapshot), [_decode_event(event) for event in self._events]


class SimMaster:
    def __init__(self, host: Cluster, engine: Engine, journal: MemoryJournal) -> None:
        self._host = host
        self.engine = engine
        self.journal = journal
        self.dead = False
        self._numbers = count(1)
        self._by_number: dict[int, Link] = {}
        self._links: dict[NodeKey, Link] = {}
        self._inbox: list[ev.AnyEvent] = []
        self._woken = False
        self._alarm = Timer()
        self._execute_at = 0.0

    # what comes in -------------------------------------------------------------------------------------------------

    def hear(self, link: Link, message: Hello | AgentMessage) -> None:
        if self.dead:
            link.tear()
            return
        if link.node is not None:
            self.engine.heard(link.node, self._host.clock.now)
        if isinstance(message, Hello):
            link.number = link.number or next(self._numbers)
            self._by_number[link.number] = link
            self.submit(ev.AgentConnected(connection=link.number, hello=message))
        elif link.node is not None and not isinstance(message, Heartbeat):
            self.submit(ev.AgentSaid(node=link.node, message=message))

    def unlinked(self, link: Link) -> None:
        self._by_number.pop(link.number, None)
        if link.node is not None:
            if self._links.get(link.node) is link:
                del self._links[link.node]
            self.submit(ev.AgentDisconnected(node=link.node, connection=link.number))

    def submit(self, event: ev.AnyEvent) -> None:
        """Queue an event. If this master is dead, the event is lost."""
        if self.dead:
            return
        self._inbox.append(event)
        if not self._woken:
            self._woken = True
            late = self._host.rng.uniform(0.0, 0.01) if self._host.rng.random() < 0.2 else 0.0
            self._host.clock.after(late, self._turn)

    def die(self) -> None:
        """End at once. Queued events are lost, and queued decisions are not executed."""
        self.dead = True
        for link in self._by_number.values():
            link.tear()

    # the queue of events -------------------------------------------------------------------------------------------

    def _turn(self) -> None:
        if self.dead:
            return
        self._woken = False
        now = self._host.clock.now
        events, self._inbox = self._inbox, []
        decisions: list[de.AnyDecision] = []
        for event in (*events, *self.engine.due(now)):
            self._host.tell("core", event)
            made = self.engine.handle(event, now)
            if self.engine.durable(event) or self._host.rng.random() < 0.1:
                self.journal.append(now, event)
            self._host.checks(self.engine, event, made)
            self._host.ledger.check(self.engine.state.ledger, event, made)
            decisions.extend(made)
        if self._host.rng.random() < 0.005:
            self.journal.compact(self.engine.state)
        if decisions:
            late = self._host.rng.uniform(0.0, 0.01) if self._host.rng.random() < 0.2 else 0.0
            self._execute_at = max(self._execute_at, now + late)
            self._host.clock.at(self._execute_at, lambda: self._execute_all(decisions))
        self._alarm.cancel()
        at = self.engine.next_deadline()
        if at is not None:
            self._alarm = self._host.clock.at(at, self._turn)

    def _execute_all(self, decisions: list[de.AnyDecision]) -> None:
        for decision in decisions:
            if self.dead:
                return
            self._execute(decision)

    def _execute(self, decision: de.AnyDecision) -> None:
        match decision:
            case de.Send():
                self._send(decision.to, decision.message)
            case de.Admit():
                self._admit(decision)
            case de.Refuse():
                link = self._by_number.get(decision.connection)
                if link is not None:
                    link.down(decision.message)
            case de.Drop():
                link = self._links.pop(decision.node, None)
                if link is not None:
                    link.node = None
                    link.tear()
            case de.LaunchNode():
                self._host.platform.launch(decision)
            case de.DeleteNode():
                self._host.platform.delete(decision)
            case de.Reply():
                self._host.replied(decision)
            case de.Finish():
                self._send(tuple(self._links), decision.message)
            case de.Note():
                self._host.tell("story", f"{decision.reason}: {decision.message}")

    def _admit(self, decision: de.Admit) -> None:
        link, node = self._by_number.get(decision.connection), decision.message.node
        if link is None:
            return
        old = self._links.get(node)
        if old is not None and old is not link:
            old.node = None
            old.tear()
        link.node = node
        self._links[node] = link
        link.down(decision.message)

    def _send(self, nodes: tuple[NodeKey, ...], message: MasterMessage) -> None:
        for node in nodes:
            link = self._links.get(node)
            if link is not None:
                link.down(message)
