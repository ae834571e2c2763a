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
    """The workers' part of a Hello."""

    running: bool
    """The workers are in the newest round, or are being started for it."""
    finished: bool
    """All workers ended well in the newest round."""
    elastic: bool


class Workers(Protocol):
    """The workers of one node, from the first round to the last. Methods that only `return` may be left out."""

    newest: Round
    """The newest round that the master has named."""

    @property
    def is_training(self) -> bool:
        """True if the workers have work that goes on without a master."""

    def standing(self) -> Standing: ...

    def is_news(self, over: Round) -> bool:
        """True if the workers have not left this round yet, so that its end concerns them."""

    def on_welcome(self) -> None:
        """A master has admitted this node: repeat what an earlier master may not have received."""

    def on_round_formed(self, round_: Round, assignment: RoundAssignment) -> None: ...

    def on_round_over(self, over: RoundOver) -> None: ...

    def on_state_held(self, round_: Round) -> None:
        """Another node has the state of this round, so a process that hangs in it may be killed."""
        return

    def on_stopped(self, following: tuple[Round, RoundAssignment] | None) -> None:
        """All processes are gone: start new ones in the round that was formed meanwhile, or ask for a round."""

    def on_end(self, local_rank: int | None, failures: list[WorkerFailure]) -> None:
        """A process ended; it failed if there are failures. `local_rank` None: no process could be started."""

    def on_ready(self, line: Line, message: WorkerReady) -> None: ...

    def on_last_step(self, line: Line, message: LastStepTaken) -> None:
        return

    def on_close(self, line: Line) -> None:
        """A process closed the connection on which it said that it is ready."""
        return

    def stop(self) -> None:
        """This node leaves: cancel all deadlines. The caller ends the processes."""
        return
