"""Workers that restart: all processes of a node serve one round and end with it, as under torchrun.

The script needs no change for that. The price of every change of members is a new start of all processes, and the loss
of what they had not saved. Workers that stay (`elastic_workers`) have the same methods, so the agent passes every
message on and does not ask which of the two it has.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from resile.agent.workers.launcher import WorkerLauncher
from resile.agent.workers.ports import free_port
from resile.agent.workers.worker_states import Line
from resile.api.ids import NO_ROUND, Round
from resile.protocol.agent_to_master import Join, LastStepTaken, NodeFinished, WorkerFailed
from resile.protocol.master_to_agent import RoundOver
from resile.protocol.message import Message
from resile.protocol.reports import RoundAssignment, WorkerFailure
from resile.protocol.worker_to_agent import WorkerReady

log = logging.getLogger("resile.agent")


class RestartingWorkers:
    """Workers that are all stopped and started anew when the round changes. No process is in more than one round.

    Methods whose body is a bare `return` are for workers that stay.
    """

    is_elastic = False

    def __init__(self, send: Callable[[Message], None], launcher: WorkerLauncher) -> None:
        self.newest: Round = NO_ROUND
        """The newest round that the master has named."""
        self._send = send
        self._launcher = launcher
        self._join: Join | None = None
        """The node's request for a round, until a round answers it."""

    @property
    def is_training(self) -> bool:
        """True if the workers are training. While they are, the agent does not give up when the master is away."""
        return self._launcher.is_running

    @property
    def serves_newest(self) -> bool:
        """True if the workers are in the newest round, or are being started for it."""
        attempt = self._launcher.attempt
        return self._launcher.has_next or (attempt is not None and attempt.round == self.newest and attempt.is_sound)

    @property
    def finished_newest(self) -> bool:
        """True if all workers ended well in the newest round."""
        attempt = self._launcher.attempt
        return attempt is not None and attempt.round == self.newest and attempt.has_finished and self._join is None

    def is_news(self, over: Round) -> bool:
        """True if the end of the round `over` concerns the workers, because they have not left that round yet."""
        return over > self.newest or (over == self.newest and self._join is None)

    def on_welcome(self) -> None:
        """Handle that the master has admitted this node. Send again what an earlier master may not have received."""
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

    def on_round_complete(self, round_: Round) -> None:
        """Handle the master's message that `round_` is complete, because all its members took the last step."""
        return

    def on_state_held(self, round_: Round) -> None:
        """Kill processes that are stuck in `round_` or an older round.

        They are not needed any more, because another node has the training's state.
        """
        return

    def on_stopped(self, following: tuple[Round, RoundAssignment] | None) -> None:
        """Start processes in the round `following`; if None, ask for a round. Called after all old processes ended."""
        if following is not None:
            self._launcher.start(*following)
        else:
            self._join = Join(after=self.newest, store_port=free_port())
            self._send(self._join)
            self._launcher.idle()

    def on_end(self, local_rank: int | None, failures: list[WorkerFailure]) -> None:
        """Handle the end of a process. `failures` is empty if the end is no failure.

        If no process could be started, `local_rank` is None.
        """
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

    def on_last_step(self, line: Line, message: LastStepTaken) -> None:
        return

    def on_close(self, line: Line) -> None:
        """Handle that a worker closed its connection `line`."""
        return

    def stop(self) -> None:
        """Cancel all deadlines, because this node leaves. The caller ends the processes."""
        return
