"""Deadlines of workers that stay: a worker that does not get ready, or does not leave its round, is killed.

A round cannot form while a process hangs in the last one, so every wait for a process has an end. A process that may
be the only one with the state of the training is waited for longer: its step may be a long one, and killing the process
would lose the state. The price is a pause of up to `STAY` recovery budgets, unless a sibling or another node turns out
to have the state. Only a process that asks whether its round is complete has no deadline here: it has its own time-out.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from resile.agent.workers.worker_states import (
    Completing,
    Detached,
    Event,
    Finishing,
    InRound,
    Leaving,
    Member,
    Ready,
    Starting,
    Stuck,
    Worker,
    WorkerList,
)
from resile.api.ids import Round
from resile.protocol.agent_to_master import WorkerStuck
from resile.protocol.message import Message

log = logging.getLogger("resile.agent")

STAY = 12
"""How many more recovery budgets a process gets to leave its round, if no other process has the state."""


class HungWorkers:
    def __init__(
        self,
        workers: WorkerList,
        *,
        kill: Callable[[Worker], None],
        send: Callable[[Message], None],
        go_on: Callable[[], None],
        leave_within: float,
        ready_within: float,
    ) -> None:
        """`go_on` is called when the other workers of the node need not wait for a worker any longer.

        A process has `leave_within` seconds (the recovery budget) to leave a round, and `ready_within` to get ready.
        """
        self._workers = workers
        self._kill = kill
        self._send = send
        self._go_on = go_on
        self._leave_within = leave_within
        self._ready_within = ready_within
        self.some_never_got_ready = False
        """True if a process did not get ready in time, so its siblings form a round without it."""

    def reset(self) -> None:
        """Wait for all processes again, because a new round has formed or all were started anew."""
        self.some_never_got_ready = False

    def expect_ready(self, worker: Worker) -> None:
        worker.set_deadline(self._ready_within, self._never_ready)

    def expect_all_ready(self) -> None:
        for worker, _ in self._workers.in_state(Starting):
            if not worker.has_deadline:
                self.expect_ready(worker)

    def expect_to_leave(self, worker: Worker, event: Event, state: Member | Completing | Stuck) -> None:
        worker.on(event, Leaving(state.line, state.round))
        worker.set_deadline(self._leave_within, self._never_left)

    def let_finish(self, worker: Worker, event: Event, state: InRound) -> None:
        """Let a worker finish its loop (store, evaluate, end), because it needs no peer for that. It is not killed."""
        worker.on(event, Finishing(state.round))
        worker.set_deadline(self._leave_within, self._detach)

    def on_state_found(self) -> None:
        """Give stuck workers only `leave_within` more seconds to leave their round.

        Called when another worker of this node has left its round and has the state of the training.
        """
        for worker, stuck in self._workers.in_state(Stuck):
            self.expect_to_leave(worker, Event.STATE_FOUND, stuck)

    def on_state_held(self, round_: Round) -> None:
        for worker, stuck in self._workers.in_state(Stuck):
            if stuck.round <= round_:
                log.error(
                    "local rank %d did not leave its round within %g s (--recovery-budget), and another node has the "
                    "state of the training: killing it",
                    worker.local_rank,
                    self._leave_within,
                )
                self._kill(worker)

    def _never_ready(self, worker: Worker) -> None:
        log.error("local rank %d did not get ready within %g s: killing it", worker.local_rank, self._ready_within)
        self.some_never_got_ready = True
        self._kill(worker)
        self._go_on()

    def _detach(self, worker: Worker) -> None:
        if isinstance(worker.state, Finishing):
            worker.on(Event.DETACHED, Detached(worker.state.round))
            self._go_on()

    def _never_left(self, worker: Worker) -> None:
        state = worker.state
        if isinstance(state, Leaving) and not any(ready.has_state for _, ready in self._workers.in_state(Ready)):
            worker.on(Event.OVERDUE, Stuck(state.line, state.round))
            log.warning(
                "local rank %d did not leave its round within %g s (--recovery-budget): waiting %g s more for the end "
                "of its step, unless another node has the state of the training: no other process of this one has",
                worker.local_rank,
                self._leave_within,
                STAY * self._leave_within,
            )
            worker.set_deadline(STAY * self._leave_within, self._never_left)
            self._send(WorkerStuck(round=state.round))
            return
        log.error(
            "local rank %d did not leave its round within %g s (--recovery-budget): killing it",
            worker.local_rank,
            self._leave_within * (1 + STAY if isinstance(state, Stuck) else 1),
        )
        self._kill(worker)
