"""Workers that restart: all processes of a node serve one round and end with it, as under torchrun.

Nothing is asked of the script for that. The price is a new start, and whatever was not saved, for every change of
members.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from resile.agent.workers.base import Standing
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
    """Implements `Workers`: a change of rounds stops all processes and starts new ones."""

    def __init__(self, send: Callable[[Message], None], launcher: WorkerLauncher) -> None:
        """Nothing runs before a master has spoken.

        Args:
            send: speaks to the master.
            launcher: starts and stops the processes.
        """
        self.newest: Round = NO_ROUND
        self._send = send
        self._launcher = launcher
        self._join: Join | None = None
        """Said, and not answered by a round yet."""

    @property
    def is_training(self) -> bool:
        """Whether processes run."""
        return self._launcher.is_running

    def standing(self) -> Standing:
        """What a greeting tells the master."""
        attempt = self._launcher.attempt
        current = attempt is not None and attempt.round == self.newest
        return Standing(
            running=self._launcher.has_next or (current and attempt is not None and attempt.is_sound),
            finished=current and attempt is not None and attempt.has_finished and self._join is None,
            elastic=False,
        )

    def is_news(self, over: Round) -> bool:
        """A node that has asked for the next round has left the newest one already."""
        return over > self.newest or (over == self.newest and self._join is None)

    def on_welcome(self) -> None:
        """Repeat failures and the wish for a round; ask for the first one."""
        attempt = self._launcher.attempt
        if attempt is not None and attempt.round == self.newest:
            for failure in attempt.failures:
                self._send(WorkerFailed(round=self.newest, failure=failure))
        if self._join is not None:
            self._send(self._join)
        elif self.newest == NO_ROUND:
            self._launcher.regroup()

    def on_round_formed(self, round_: Round, assignment: RoundAssignment) -> None:
        """Stop what runs, and start in the new round."""
        self.newest, self._join = round_, None
        self._launcher.move_to(round_, assignment)

    def on_round_over(self, over: RoundOver) -> None:
        """Stop what runs, and ask for another round."""
        self.newest, self._join = over.round, None
        self._launcher.leave_round()

    def on_state_held(self, round_: Round) -> None:
        """Nothing: these processes are stopped with their round, whatever state they have."""

    def on_stopped(self, following: tuple[Round, RoundAssignment] | None) -> None:
        """Start in the round that was formed meanwhile, or ask for one."""
        if following is not None:
            self._launcher.start(*following)
        else:
            self._join = Join(after=self.newest, port=free_port())
            self._send(self._join)
            self._launcher.idle()

    def on_end(self, local_rank: int | None, failures: list[WorkerFailure]) -> None:
        """A failure ends the round for all processes; the node has finished when all have ended well."""
        attempt = self._launcher.attempt
        assert attempt is not None
        for failure in failures:
            self._send(WorkerFailed(round=attempt.round, failure=failure))
        if failures:
            self._launcher.restarts.count(attempt.round)
            self._launcher.regroup()
        elif attempt.has_finished:
            log.info("all training processes of this node ended well")
            self._send(NodeFinished(round=attempt.round))

    def on_ready(self, line: Line, message: WorkerReady) -> None:
        """Turn it away: it is none of this node's processes, or one that is being stopped."""
        line.close(f"no process '{message.worker}' runs here")

    def on_last_step(self, line: Line, message: LastStepTaken) -> None:
        """Nothing: only processes that said that they are ready are in a round of their own accord."""

    def on_close(self, line: Line) -> None:
        """Nothing: the end of a process is what counts."""

    def stop(self) -> None:
        """Nothing is waited for here."""
