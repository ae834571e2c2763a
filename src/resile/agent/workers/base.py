"""The interface between an agent and its workers, for both ways to survive a change of members.

Workers that restart end with their round, as under torchrun; workers that stay join the next one. Both implement
`Workers`, so the agent passes every message on and never asks which of the two it has.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from resile.api.ids import Round
from resile.protocol.agent_to_master import LastStepTaken
from resile.protocol.master_to_agent import RoundOver
from resile.protocol.message import Message
from resile.protocol.reports import RoundAssignment, WorkerFailure
from resile.protocol.worker_to_agent import WorkerReady


class Line(Protocol):
    """The connection on which a worker said that it is ready."""

    def send(self, message: Message, /) -> None: ...

    def close(self, because: str = "", /) -> None: ...


class Standing(NamedTuple):
    """What a Hello says about the workers of its node."""

    running: bool
    """True if the workers are in the newest round, or are being started for it."""
    finished: bool
    """True if all workers ended well in the newest round."""
    elastic: bool


class Workers(Protocol):
    """The workers of one node, from first to last round.

    Methods whose body here is a bare `return` do nothing by default. Subclasses need not define them.
    """

    newest: Round
    """The newest round that the master has named."""

    @property
    def is_training(self) -> bool:
        """True if the workers are training. They go on while the master is away, so the agent does not give up then."""

    def standing(self) -> Standing: ...

    def is_news(self, over: Round) -> bool:
        """True if the workers have not left the round `over` yet, so that its end concerns them."""

    def on_welcome(self) -> None:
        """Send a master that has admitted this node what an earlier master may not have received."""

    def on_round_formed(self, round_: Round, assignment: RoundAssignment) -> None: ...

    def on_round_over(self, over: RoundOver) -> None: ...

    def on_round_complete(self, round_: Round) -> None:
        """Handle that the master has noted that all members of `round_` took the last step."""
        return

    def on_state_held(self, round_: Round) -> None:
        """Kill processes that are stuck in `round_` or an older round.

        They are not needed any more, because another node has the training's state.
        """
        return

    def on_stopped(self, following: tuple[Round, RoundAssignment] | None) -> None:
        """Start processes in the round `following`; if it is None, ask for a round. All old processes are gone."""

    def on_end(self, local_rank: int | None, failures: list[WorkerFailure]) -> None:
        """Handle the end of a process. `failures` is empty if the end is no failure.

        If no process could be started, `local_rank` is None.
        """

    def on_ready(self, line: Line, message: WorkerReady) -> None: ...

    def on_last_step(self, line: Line, message: LastStepTaken) -> None:
        return

    def on_close(self, line: Line) -> None:
        """Handle that a process closed the connection on which it had said that it is ready."""
        return

    def stop(self) -> None:
        """Cancel all deadlines, because this node leaves. The caller ends the processes."""
        return
