"""The life of one worker that stays from round to round: its states, its events, and which may follow which.

A process that survives rounds is started, gets ready, is placed, is told to leave, hangs, takes its last step, ends:
in many orders, and some of them only when the node or the network is in trouble. Each state here is a type that holds
what is known in that state and nothing else, and `TRANSITIONS` lists every order that can happen. An event that the
table does not list for a state is a mistake of the agent and raises an error that names both, at the moment when it is
made rather than in a round that never forms. The price is one small type for every situation.
"""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Callable
from typing import NamedTuple, Protocol, TypeVar

from resile.api.ids import NO_ROUND, Round
from resile.protocol.message import Message


class Line(Protocol):
    """The connection on which a worker said that it is ready."""

    def send(self, message: Message, /) -> None: ...

    def close(self, because: str = "", /) -> None: ...


class Starting(NamedTuple):
    """The process runs, or is about to, and has not said that it is ready."""

    expected_in: Round = NO_ROUND
    """The round that keeps a place for it; NO_ROUND for a process started ahead of any."""


class Ready(NamedTuple):
    """It is in no round and waits for a place."""

    line: Line
    was_member: bool
    """It has been in a round before."""
    has_state: bool
    """It has taken steps: the outcome of training is not lost with others."""
    agreed: Round
    """The newest round in which it came to one state with all members."""


class Member(NamedTuple):
    """It trains in a round."""

    line: Line
    round: Round


class Leaving(NamedTuple):
    """It was told that its round is over and has a while to leave it."""

    line: Line
    round: Round


class Stuck(NamedTuple):
    """It did not leave in time, and gets longer because it may be the last process that has the state."""

    line: Line
    round: Round


class Finishing(NamedTuple):
    """It took the last step of its round. It stores a checkpoint, evaluates or ends, and is not made to leave."""

    round: Round


class Detached(NamedTuple):
    """It took the last step long ago and its script does something else: its siblings go on without it."""

    round: Round


class Failed(NamedTuple):
    """The process ended badly; another one is started in its place."""


class Dismissed(NamedTuple):
    """It is being killed because it is not needed any more; how it ends says nothing."""


class Ended(NamedTuple):
    """The process ended well, or was dismissed."""

    last_step_in: Round = NO_ROUND
    """The round in which it took the last step; NO_ROUND if it took none."""


InRound = Member | Leaving | Stuck | Finishing
"""Its peers may wait for it: it is in a round, or has not got away from the last one."""
State = Starting | Ready | InRound | Detached | Failed | Dismissed | Ended
S = TypeVar("S", bound=State)


class Event(enum.StrEnum):
    """What happens to a worker."""

    START = "start"
    READY = "ready"
    PLACED = "placed"
    ROUND_OVER = "round over"
    OVERDUE = "overdue"
    """It did not leave its round in time."""
    STATE_FOUND = "state found"
    """A sibling that has the state is ready: this process is not the last one that has it."""
    LAST_STEP = "last step"
    DETACHED = "detached"
    """It took its last step, and neither ended nor got ready within the time to leave a round."""
    FAILED = "failed"
    ENDED = "ended"
    DISMISSED = "dismissed"


_ENDS: dict[Event, type[State]] = {Event.FAILED: Failed, Event.ENDED: Ended}

TRANSITIONS: dict[type[State], dict[Event, type[State]]] = {
    Starting: {Event.READY: Ready, Event.DISMISSED: Dismissed, **_ENDS},
    Ready: {Event.READY: Ready, Event.PLACED: Member, Event.DISMISSED: Dismissed, **_ENDS},
    Member: {Event.READY: Ready, Event.ROUND_OVER: Leaving, Event.LAST_STEP: Finishing, **_ENDS},
    Leaving: {Event.READY: Ready, Event.OVERDUE: Stuck, Event.LAST_STEP: Finishing, **_ENDS},
    Stuck: {Event.READY: Ready, Event.STATE_FOUND: Leaving, Event.LAST_STEP: Finishing, **_ENDS},
    Finishing: {Event.READY: Ready, Event.LAST_STEP: Finishing, Event.DETACHED: Detached, **_ENDS},
    Detached: {Event.READY: Ready, **_ENDS},
    Failed: {Event.START: Starting, Event.DISMISSED: Ended},
    Dismissed: {Event.ENDED: Ended},
    Ended: {},
}


class IllegalTransition(Exception):
    """An event that cannot happen to a worker in this state, or does not lead to the state that was asked for."""

    def __init__(self, state: State, event: Event, to: type[State]) -> None:
        super().__init__(f"a worker that is {_name(type(state))} cannot become {_name(to)} by '{event}'")


def transition(state: State, event: Event, to: State) -> State:
    """The state after an event.

    Raises:
        IllegalTransition: the table does not list it.
    """
    if TRANSITIONS[type(state)].get(event) is not type(to):
        raise IllegalTransition(state, event, type(to))
    return to


def _name(kind: type[State]) -> str:
    return kind.__name__


class Worker:
    """One local rank, the state of the process that fills it now, and at most one deadline."""

    def __init__(self, local_rank: int, state: State) -> None:
        self.local_rank = local_rank
        self.state = state
        self.unplaced_failures = 0
        """Processes in a row that failed here before they were members of a round."""
        self._deadline: asyncio.TimerHandle | None = None

    def on(self, event: Event, to: State) -> None:
        """Pass into another state and cancel the deadline of the old one.

        Raises:
            IllegalTransition: the table does not list this transition; nothing has changed then.
        """
        self.state = transition(self.state, event, to)
        self.cancel_deadline()

    def set_deadline(self, seconds: float, then: Callable[[Worker], None]) -> None:
        """Call `then` after so many seconds, unless the worker passes into another state before."""
        self.cancel_deadline()
        self._deadline = asyncio.get_running_loop().call_later(seconds, then, self)

    @property
    def has_deadline(self) -> bool:
        return self._deadline is not None

    def cancel_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


class WorkerList(list[Worker]):
    """All workers of a node, by local rank."""

    def in_state(self, kind: type[S]) -> list[tuple[Worker, S]]:
        """Every worker in this state, with the state."""
        return [(worker, worker.state) for worker in self if isinstance(worker.state, kind)]

    def in_round(self) -> list[Worker]:
        return [worker for worker in self if isinstance(worker.state, InRound)]

    def last_in(self, round_: Round) -> list[Worker]:
        """The workers that are in this round, or detached after its last step."""
        return [
            worker for worker in self if isinstance(worker.state, InRound | Detached) and worker.state.round == round_
        ]

    def all_took_last_step(self, round_: Round) -> bool:
        """True if all workers that were in this round, and have not ended, took its last step. False if there are none.

        A newcomer waits then: it is dismissed when they end, or meets them in another loop of the script. In a round
        of its own it would have no state, and train all over again.
        """
        workers = self.last_in(round_)
        return bool(workers) and all(isinstance(worker.state, Finishing | Detached) for worker in workers)
