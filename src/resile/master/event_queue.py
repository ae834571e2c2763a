"""The queue of events in front of the core: it handles events, writes the journal, then executes the decisions.

Events that come while a batch is being written are the next batch. A batch is handled in order, written to the journal
in one transaction, and only then are its decisions executed. So the journal has every event that led to an action, and
4,000 agents that join at once cost one commit. A thread does the writing, so a slow disk delays decisions but never
heartbeats.

If the journal cannot be written, for example on a full disk, decisions and new events wait, and the write is tried
again until there is room. Agents train on, nothing is forgotten, and no agent counts as silent for that time. If
handling an event raises, the state may be half changed. Then the process ends at once, and the next one replays the
journal, which never got that event. The process also ends after any other unforeseen error, and when the journal is
damaged or belongs to another master, because a restart repairs more than a master that goes on half working.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from resile.api.ids import NodeKey
from resile.api.job_view import JobEvent
from resile.api.master_exit_codes import BROKEN
from resile.core.decisions import AnyDecision, Note
from resile.core.engine import Engine
from resile.core.events import AnyEvent
from resile.master.journal.base import Journal, JournalDamaged, JournalError

log = logging.getLogger("resile.master")

COMPACT_AFTER = 20_000
"""When the journal has so many events, a snapshot replaces them: a restart replays fewer in well under a second. The
snapshot is written on the event loop in milliseconds; a journal behind a network makes its own (`folds_itself`)."""
RETRY_SECONDS = 0.5


def _die() -> None:
    logging.shutdown()
    os._exit(BROKEN)


def end_master(what: str, error: BaseException | None, die: Callable[[], None] = _die) -> None:
    log.critical("%s broke, and the master ends; the next one goes on from the journal", what, exc_info=error)
    die()


class EventQueue:
    """Passes events to the engine in order, and executes its decisions. All methods are called on the event loop."""

    def __init__(
        self,
        engine: Engine,
        journal: Journal,
        clock: Callable[[], float],
        *,
        told: int = 0,
        replayed: int = 0,
        die: Callable[[], None] = _die,
    ) -> None:
        """Prepare. `told` is the number of the last job event in the journal; 0 if there is none.

        `replayed` is how many events the journal has after its snapshot. `die` is called to end the master's process.
        """
        self.engine = engine
        self._journal = journal
        self._clock = clock
        self._execute: Callable[[AnyDecision], None] | None = None
        self._die = die
        self._told = told
        self._inbox: list[AnyEvent] = []
        self._unwritten: list[tuple[float, AnyEvent]] = []
        self._untold: list[JobEvent] = []
        self._held: list[AnyDecision] = []
        self._since_snapshot = replayed
        self._loop = asyncio.get_running_loop()
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="resile-journal")
        self._writing_since: float | None = None
        self._failed_writes = 0
        self.trouble: JournalError | None = None
        """Why the journal cannot be written now; None if it can."""
        self._wake: asyncio.Handle | None = None
        self._alarm: asyncio.TimerHandle | None = None
        self._retry: asyncio.TimerHandle | None = None
        self._closed = False
        self.observers: list[Callable[[], None]] = []
        """Functions that are called after every batch of events, when the job's state may have changed."""
        self._watch_own_pulse(self._clock())

    def start(self, execute: Callable[[AnyDecision], None]) -> None:
        self._execute = execute
        if self._inbox:
            self._wake = self._loop.call_soon(self._turn)

    def submit(self, event: AnyEvent) -> None:
        if self.trouble is not None and not self.engine.durable(event):
            return  # such an event only moves gauges, and many could pile up before there is room again
        self._inbox.append(event)
        if self._execute is not None and self._wake is None and not self._closed:
            self._wake = self._loop.call_soon(self._turn)

    def heard(self, node: NodeKey) -> None:
        """Note that a node's agent sent a message, so that it does not count as silent. Costs one dictionary write."""
        self.engine.heard(node, self._clock())

    @property
    def now(self) -> float:
        return self._clock()

    def broke(self, what: str, error: BaseException | None) -> None:
        """End the process, because a part that the master needs raised an unforeseen error. `what` names the part.

        After `close`, do nothing.
        """
        if not self._closed:
            end_master(what, error, self._die)

    def close(self) -> None:
        """Stop handling events, and write the rest of the story and a snapshot to the journal."""
        self._closed = True
        for handle in (self._wake, self._alarm, self._pulse, self._retry):
            if handle is not None:
                handle.cancel()
        self._writer.shutdown(wait=True)
        try:
            # The result of a write that has just ended may not be known yet. The snapshot holds its events anyway.
            if self._untold and self._untold[-1].number > self._journal.last_told():
                self._journal.append([], self._untold)
            self._journal.snapshot(self.engine.state, self._clock())
        except JournalError as error:
            log.error("%s", error)

    def _turn(self) -> None:
        self._wake = None
        if self._writing_since is not None or self._closed:
            return  # the end of the write comes back here
        now = self._clock()
        events, self._inbox = self._inbox, []
        try:
            for event in (*events, *self.engine.due(now)):
                self._handle(event, now)
        except Exception as error:  # any error: the state may be half changed
            self.broke("the handling of an event", error)
            return
        if self._unwritten or self._untold:
            self._writing_since = now
            self._write()
        else:
            self._finish_turn()

    def _handle(self, event: AnyEvent, now: float) -> None:
        for decision in self.engine.handle(event, now):
            if isinstance(decision, Note):
                self._tell(decision, now)
            self._held.append(decision)
        if self.engine.durable(event):
            self._unwritten.append((now, event))

    def _tell(self, note: Note, now: float) -> None:
        self._told += 1
        node = str(note.node) if note.node is not None else ""
        self._untold.append(
            JobEvent(
                number=self._told, at=now, reason=note.reason, message=note.message, node=node, warning=note.warning
            )
        )

    def _write(self) -> None:
        self._retry = None
        work = self._loop.run_in_executor(self._writer, self._journal.append, self._unwritten, self._untold)
        work.add_done_callback(self._written)

    def _written(self, work: asyncio.Future[None]) -> None:
        if self._closed or work.cancelled():
            return
        try:
            work.result()
        except JournalDamaged as error:  # or taken over by another master
            log.critical("%s; this master ends", error)
            self._die()
            return
        except JournalError as error:
            first, self.trouble = not self._failed_writes, error
            self._failed_writes += 1
            self._retry = self._loop.call_later(RETRY_SECONDS, self._write)
            if first:
                log.error("%s; decisions are held back until it can be written", error)
                self._tell_observers()
            return
        except Exception as error:  # any error: without the writer no decision would ever be executed
            self.broke("the writing of the journal", error)
            return
        if self._failed_writes:
            log.info("the journal can be written again, after %d attempts", self._failed_writes)
        self._failed_writes, self.trouble = 0, None
        self._since_snapshot += len(self._unwritten)
        self._unwritten, self._untold = [], []
        self._finish_turn()

    def _finish_turn(self) -> None:
        try:
            self._carry_out()
        except Exception as error:  # any error: a decision that was written must not be lost in silence
            self.broke("the carrying out of a decision", error)

    def _carry_out(self) -> None:
        now, since = self._clock(), self._writing_since
        self._writing_since = None
        if since is not None and now - since > self.engine.state.spec.timeouts.heartbeat_timeout / 4:
            self.engine.restart_silence_timers(now)  # agents that came meanwhile could not be admitted
        held, self._held = self._held, []
        assert self._execute is not None  # there is no turn before `start`
        for decision in held:
            self._execute(decision)
        if self._since_snapshot >= COMPACT_AFTER and not self._journal.folds_itself:
            self._compact()
        if self._inbox and self._wake is None:
            self._wake = self._loop.call_soon(self._turn)
        self._set_alarm()
        self._tell_observers()

    def _tell_observers(self) -> None:
        for observer in self.observers:
            observer()

    def _compact(self) -> None:
        try:
            self._journal.snapshot(self.engine.state, self._clock())
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
        """Check whether this process stood still, and schedule the next check.

        This check was due at the time `expected`. If it comes much later, the alarms for silent agents are restarted,
        so that no agent counts as silent for the time in which the master itself stood still.
        """
        timeouts = self.engine.state.spec.timeouts
        now = self._clock()
        late = now - expected
        if late > timeouts.heartbeat_timeout / 4:
            log.warning("the master itself stood still for %.1f s; no agent counts as silent for that time", late)
            self.engine.restart_silence_timers(now)
        self._pulse = self._loop.call_later(timeouts.heartbeat, self._watch_own_pulse, now + timeouts.heartbeat)
