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
    """The connection of a worker to the agent. The worker has sent WorkerReady on it."""

    def send(self, message: Message, /) -> None: ...

    def close(self, because: str = "", /) -> None: ...


class Standing(NamedTuple):
    """The state of a node's workers, as the agent's first message to the master (Hello) reports it."""

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
        """True if the workers are training. While they are, the agent does not give up when the master is away."""

    def standing(self) -> Standing: ...

    def is_news(self, over: Round) -> bool:
        """True if the end of the round `over` concerns the workers, because they have not left that round yet."""

    def on_welcome(self) -> None:
        """Handle that the master has admitted this node. Send again what an earlier master may not have received."""

    def on_round_formed(self, round_: Round, assignment: RoundAssignment) -> None: ...

    def on_round_over(self, over: RoundOver) -> None: ...

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

    def on_end(self, local_rank: int | None, failures: list[WorkerFailure]) -> None:
        """Handle the end of a process. `failures` is empty if the end is no failure.

        If no process could be started, `local_rank` is None.
        """

    def on_ready(self, line: Line, message: WorkerReady) -> None: ...

    def on_last_step(self, line: Line, message: LastStepTaken) -> None:
        return

    def on_close(self, line: Line) -> None:
        """Handle that a worker closed its connection `line`."""
        return

    def stop(self) -> None:
        """Cancel all deadlines, because this node leaves. The caller ends the processes."""
        return
