"""The queue in front of the core: events in, journal, decisions out.

Everything that happens while the loop is busy is one batch: handled in order, written to the journal in one
transaction, and only then executed. So what was executed is always in the journal, and 4,000 agents that join at
once cost one commit. If the journal cannot be written (a full disk), decisions are held back, nothing is forgotten,
and the write is tried again until there is room; agents train on meanwhile.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from resile.api.ids import NodeKey
from resile.core.decisions import AnyDecision, Note
from resile.core.engine import Engine
from resile.core.events import AnyEvent, Stepped
from resile.master.journal import Journal, JournalError, Told

log = logging.getLogger("resile.master")

COMPACT_AFTER = 20_000
"""Events in the journal before a snapshot replaces them: a restart replays fewer than this, in well under a second."""
RETRY_SECONDS = 0.5
"""Between two attempts to write a journal that could not be written."""
STEP_RECORD_SECONDS = 1.0
"""Step reports move gauges only; one a second is kept, so that goodput survives a restart."""


class Shell:
    """Runs one engine. All methods are called on the event loop."""

    def __init__(
        self,
        engine: Engine,
        journal: Journal,
        clock: Callable[[], float],
        execute: Callable[[AnyDecision], None],
        *,
        told: int = 0,
        replayed: int = 0,
    ) -> None:
        self.engine = engine
        self._journal = journal
        self._clock = clock
        self._execute = execute
        self._told = told
        self._inbox: list[AnyEvent] = []
        self._unwritten: list[tuple[float, AnyEvent]] = []
        self._untold: list[Told] = []
        self._held: list[AnyDecision] = []
        self._since_snapshot = replayed
        self._step_recorded = 0.0
        self._loop = asyncio.get_running_loop()
        self._wake: asyncio.Handle | None = None
        self._alarm: asyncio.TimerHandle | None = None
        self._closed = False
        self.after_turn: Callable[[], None] = lambda: None
        self._watch_own_pulse(self._clock())

    def submit(self, event: AnyEvent) -> None:
        """Queue an event; it is handled after those before it, before the loop waits again."""
        self._inbox.append(event)
        if self._wake is None and not self._closed:
            self._wake = self._loop.call_soon(self._turn)

    def heard(self, node: NodeKey) -> None:
        """An agent spoke: the cheapest thing that can happen."""
        self.engine.heard(node, self._clock())

    @property
    def now(self) -> float:
        """The moment by the master's clock."""
        return self._clock()

    @property
    def stalled(self) -> bool:
        """Whether decisions are held back because the journal cannot be written."""
        return bool(self._held)

    def close(self) -> None:
        """Handle no more; what the journal has not got yet gets one last try."""
        self._closed = True
        for handle in (self._wake, self._alarm, self._pulse):
            if handle is not None:
                handle.cancel()
        try:
            if self._unwritten or self._untold:
                self._journal.append(self._unwritten, self._untold)
            self._journal.snapshot(self.engine.state)
        except JournalError as error:
            log.error("%s", error)

    def _turn(self) -> None:
        self._wake = None
        now = self._clock()
        events, self._inbox = self._inbox, []
        for event in (*events, *self.engine.due(now)):
            self._handle(event, now)
        self._commit()
        self._set_alarm()
        self.after_turn()

    def _handle(self, event: AnyEvent, now: float) -> None:
        for decision in self.engine.handle(event, now):
            if isinstance(decision, Note):
                self._tell(decision, now)
            self._held.append(decision)
        if self.engine.durable(event):
            self._unwritten.append((now, event))
        elif isinstance(event, Stepped) and now - self._step_recorded >= STEP_RECORD_SECONDS:
            self._step_recorded = now
            self._unwritten.append((now, event))

    def _tell(self, note: Note, now: float) -> None:
        self._told += 1
        node = str(note.node) if note.node is not None else ""
        self._untold.append(
            Told(number=self._told, at=now, reason=note.reason, message=note.message, node=node, warning=note.warning)
        )

    def _commit(self) -> None:
        if self._unwritten or self._untold:
            try:
                self._journal.append(self._unwritten, self._untold)
            except JournalError as error:
                log.error("%s; decisions are held back until it can be written", error)
                self._loop.call_later(RETRY_SECONDS, self._retry)
                return
            self._since_snapshot += len(self._unwritten)
            self._unwritten, self._untold = [], []
        held, self._held = self._held, []
        for decision in held:
            self._execute(decision)
        if self._since_snapshot >= COMPACT_AFTER:
            self._compact()

    def _retry(self) -> None:
        if not self._closed:
            self._commit()
            self._set_alarm()

    def _compact(self) -> None:
        try:
            self._journal.snapshot(self.engine.state)
            self._since_snapshot = 0
        except JournalError as error:
            log.error("%s", error)

    def _set_alarm(self) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None
        at = self.engine.next_deadline()
        if at is not None and not self._closed:
            self._alarm = self._loop.call_later(max(0.0, at - self._clock()), self._turn)

    def _watch_own_pulse(self, expected: float) -> None:
        """If this process itself stood still, nobody is blamed for the silence."""
        timeouts = self.engine.state.spec.timeouts
        now = self._clock()
        late = now - expected
        if late > timeouts.silence / 4:
            log.warning("the master itself stood still for %.1f s; nobody is blamed for that silence", late)
            self.engine.amnesty(now)
        self._pulse = self._loop.call_later(timeouts.heartbeat, self._watch_own_pulse, now + timeouts.heartbeat)
