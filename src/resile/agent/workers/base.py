"""What an agent asks of its workers, whichever way they survive a change of members.

Workers that restart end with their round, as under torchrun; workers that stay meet again in the next one. Both
implement `Workers`, so the agent passes every message on and never asks which of the two it has.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from resile.agent.workers.worker_states import Line
from resile.api.ids import Round
from resile.protocol.agent_to_master import LastStepTaken
from resile.protocol.master_to_agent import RoundOver
from resile.protocol.reports import RoundAssignment, WorkerFailure
from resile.protocol.worker_to_agent import WorkerReady


class Standing(NamedTuple):
    """What a greeting tells the master of the workers."""

    running: bool
    """They are in the newest round, or on their way into it."""
    finished: bool
    """They ended well in the newest round."""
    elastic: bool
    """They stay from round to round."""


class Workers(Protocol):
    """The workers of one node, from the first round to the last."""

    newest: Round
    """The newest round that the master has spoken of."""

    @property
    def is_training(self) -> bool:
        """Whether they have work that goes on without a master."""

    def standing(self) -> Standing: ...

    def is_news(self, over: Round) -> bool:
        """Whether the end of this round concerns them: it is not one that they have left already."""

    def on_welcome(self) -> None:
        """A master has greeted this node: say again what the last one may not have heard."""

    def on_round_formed(self, round_: Round, assignment: RoundAssignment) -> None: ...

    def on_round_over(self, over: RoundOver) -> None: ...

    def on_state_held(self, round_: Round) -> None:
        """Another node has the state of a round: no process that stays in it is the last one that has."""

    def on_stopped(self, following: tuple[Round, RoundAssignment] | None) -> None:
        """All processes are gone: start those of the round that was formed meanwhile, or see to it that one is."""

    def on_end(self, local_rank: int | None, failures: list[WorkerFailure]) -> None:
        """A process ended, badly if there are failures; None: no process could be started."""

    def on_ready(self, line: Line, message: WorkerReady) -> None: ...

    def on_last_step(self, line: Line, message: LastStepTaken) -> None: ...

    def on_close(self, line: Line) -> None:
        """A process hung up the connection on which it said that it is ready."""

    def stop(self) -> None:
        """This node leaves: wait for nothing any more. Ending the processes is for the caller to do."""
