"""Workers that restart: all processes of a node serve one round and end with it, as under torchrun.

The script needs no change for that. The price of every change of members is a new start of all processes, and the loss
of what they had not saved.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from resile.agent.workers.base import Line, Standing, Workers
from resile.agent.workers.launcher import WorkerLauncher
from resile.agent.workers.ports import free_port
from resile.api.ids import NO_ROUND, Round
from resile.protocol.agent_to_master import Join, NodeFinished, WorkerFailed
from resile.protocol.master_to_agent import RoundOver
from resile.protocol.message import Message
from resile.protocol.reports import RoundAssignment, WorkerFailure
from resile.protocol.worker_to_agent import WorkerReady

log = logging.getLogger("resile.agent")


class RestartingWorkers(Workers):
    """Workers that are all stopped and started anew when the round changes. No process is in more than one round."""

    def __init__(self, send: Callable[[Message], None], launcher: WorkerLauncher) -> None:
        self.newest: Round = NO_ROUND
        self._send = send
        self._launcher = launcher
        self._join: Join | None = None
        """The node's request for a round, until a round answers it."""

    @property
    def is_training(self) -> bool:
        return self._launcher.is_running

    def standing(self) -> Standing:
        attempt = self._launcher.attempt
        current = attempt is not None and attempt.round == self.newest
        return Standing(
            running=self._launcher.has_next or (current and attempt is not None and attempt.is_sound),
            finished=current and attempt is not None and attempt.has_finished and self._join is None,
            elastic=False,
        )

    def is_news(self, over: Round) -> bool:
        return over > self.newest or (over == self.newest and self._join is None)

    def on_welcome(self) -> None:
        attempt = self._launcher.attempt
        if attempt is not None and attempt.round == self.newest:
            for failure in attempt.failures:
                self._send(WorkerFailed(round=self.newest, failure=failure))
        if self._join is not None:
            self._send(self._join)
        elif self.newest == NO_ROUND:
            self._launcher.restart()

    def on_round_formed(self, round_: Round, assignment: RoundAssignment) -> None:
        self.newest, self._join = round_, None
        self._launcher.move_to(round_, assignment)

    def on_round_over(self, over: RoundOver) -> None:
        self.newest, self._join = over.round, None
        self._launcher.leave_round()

    def on_stopped(self, following: tuple[Round, RoundAssignment] | None) -> None:
        if following is not None:
            self._launcher.start(*following)
        else:
            self._join = Join(after=self.newest, store_port=free_port())
            self._send(self._join)
            self._launcher.idle()

    def on_end(self, local_rank: int | None, failures: list[WorkerFailure]) -> None:
        attempt = self._launcher.attempt
        assert attempt is not None
        for failure in failures:
            self._send(WorkerFailed(round=attempt.round, failure=failure))
        if failures:
            self._launcher.restarts.count(attempt.round)
            self._launcher.restart()
        elif attempt.has_finished:
            log.info("all training processes of this node ended well")
            self._send(NodeFinished(round=attempt.round))

    def on_ready(self, line: Line, message: WorkerReady) -> None:
        line.close(f"no process '{message.worker}' runs here")
