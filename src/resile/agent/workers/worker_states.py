"""The life of one worker that stays from round to round: its states, its events, and which may follow which.

A process that survives rounds is started, gets ready, joins a round, is asked to leave it, hangs, takes its last step
or ends, in many orders, some of which only happen when the node or the network is in trouble. Each state here is a type
that holds only what is known in that state, and `TRANSITIONS` lists every order that can happen. An event that is
not listed for a state is a defect of the agent. It raises an error at once that names both; without the table, some
round would never form. The price is one small type for every situation.
"""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Callable
from typing import NamedTuple, TypeVar

from resile.agent.workers.base import Line
from resile.api.ids import NO_ROUND, Round


class Starting(NamedTuple):
    """The process was started, or will be when a standby is free. It has not yet told the agent that it is ready."""

    expected_in: Round = NO_ROUND
    """The round that the process was started for; NO_ROUND if it was started before there was a round."""


class Ready(NamedTuple):
    """The process is in no round and waits for an assignment."""

    line: Line
    was_member: bool
    has_state: bool
    """True if the process has taken steps, so that it has the state of the training."""
    holds: Round
    """The newest round whose members, this process among them, all agreed on one state."""


class Member(NamedTuple):
    """The process trains in a round."""

    line: Line
    round: Round


class Completing(NamedTuple):
    """The process took the last step of its round. It waits to hear if the master noted this before the round ended."""

    line: Line
    round: Round


class Leaving(NamedTuple):
    """The process was told that its round is over. It must leave the round before a deadline."""

    line: Line
    round: Round


class Stuck(NamedTuple):
    """The process did not leave its round in time. It gets more time because it may be the only one with the state."""

    line: Line
    round: Round


class Finishing(NamedTuple):
    """The process took the last step, and its round is complete. It stores, evaluates or ends, and is not killed."""

    round: Round


class Detached(NamedTuple):
    """The process took the last step long ago, but neither ended nor got ready. Other processes go on without it."""

    round: Round


class Failed(NamedTuple):
    """The process ended badly; another one will be started for its local rank."""


class Dismissed(NamedTuple):
    """The process is being killed because it is not needed any more. Its end does not count as a failure."""


class Ended(NamedTuple):
    """The process ended well, or was dismissed."""

    last_step_in: Round = NO_ROUND
    """The round in which the process took the last step; NO_ROUND if it took none."""


InRound = Member | Completing | Leaving | Stuck | Finishing
"""States of a process that is in a round or has not left the last one, so that peers may wait for it."""
State = Starting | Ready | InRound | Detached | Failed | Dismissed | Ended
S = TypeVar("S", bound=State)


class Event(enum.StrEnum):
    START = "start"
    READY = "ready"
    PLACED = "placed"
    ROUND_OVER = "round over"
    OVERDUE = "overdue"
    STATE_FOUND = "state found"
    """A sibling that has the state is ready, so this process is not the only one with it."""
    LAST_STEP = "last step"
    COMPLETE = "round complete"
    CLOSED = "closed"
    """The process closed its connection to the agent: it has left its loop, and may come back for another one."""
    DETACHED = "detached"
    FAILED = "failed"
    ENDED = "ended"
    DISMISSED = "dismissed"


_ENDS: dict[Event, type[State]] = {Event.FAILED: Failed, Event.ENDED: Ended}

TRANSITIONS: dict[type[State], dict[Event, type[State]]] = {
    Starting: {Event.READY: Ready, Event.DISMISSED: Dismissed, **_ENDS},
    Ready: {Event.READY: Ready, Event.PLACED: Member, Event.DISMISSED: Dismissed, **_ENDS},
    Member: {
        Event.READY: Ready,
        Event.ROUND_OVER: Leaving,
        Event.LAST_STEP: Completing,
        Event.CLOSED: Finishing,
        **_ENDS,
    },
    Completing: {
        Event.READY: Ready,
        Event.ROUND_OVER: Leaving,
        Event.COMPLETE: Finishing,
        Event.CLOSED: Finishing,
        **_ENDS,
    },
    Leaving: {Event.READY: Ready, Event.OVERDUE: Stuck, Event.CLOSED: Finishing, **_ENDS},
    Stuck: {Event.READY: Ready, Event.STATE_FOUND: Leaving, Event.CLOSED: Finishing, **_ENDS},
    Finishing: {Event.READY: Ready, Event.CLOSED: Finishing, Event.DETACHED: Detached, **_ENDS},
    Detached: {Event.READY: Ready, **_ENDS},
    Failed: {Event.START: Starting, Event.DISMISSED: Ended},
    Dismissed: {Event.ENDED: Ended},
    Ended: {},
}


class IllegalTransition(Exception):
    """The event cannot happen to a worker in this state, or does not lead to the requested state."""

    def __init__(self, state: State, event: Event, to: type[State]) -> None:
        super().__init__(f"a worker that is {type(state).__name__} cannot become {to.__name__} by '{event}'")


def transition(state: State, event: Event, to: State) -> State:
    if TRANSITIONS[type(state)].get(event) is not type(to):
        raise IllegalTransition(state, event, type(to))
    return to


class Worker:
    """One local rank, the state of the process that fills it now, and at most one deadline."""

    def __init__(self, local_rank: int, state: State) -> None:
        self.local_rank = local_rank
        self.state = state
        self.unplaced_failures = 0
        """How many processes of this local rank failed in a row before they were members of a round."""
        self._deadline: asyncio.TimerHandle | None = None

    def on(self, event: Event, to: State) -> None:
        """Go to the state `to` by `event`, and cancel the deadline. If IllegalTransition is raised, nothing changes."""
        self.state = transition(self.state, event, to)
        self.cancel_deadline()

    def set_deadline(self, seconds: float, then: Callable[[Worker], None]) -> None:
        """Call `then` with this worker after `seconds`, unless the worker passes into another state before."""
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
        return [(worker, worker.state) for worker in self if isinstance(worker.state, kind)]

    def in_round(self) -> list[Worker]:
        return [worker for worker in self if isinstance(worker.state, InRound)]

    def last_in(self, round_: Round) -> list[Worker]:
        """The workers in this round, and those that are `Detached` since its last step."""
        return [
            worker for worker in self if isinstance(worker.state, InRound | Detached) and worker.state.round == round_
        ]

    def all_took_last_step(self, round_: Round) -> bool:
        """True if all workers of `last_in(round_)` took the last step of the round. False if there are no such workers.

        While this is True, a newcomer must wait. In a new round without these workers, it would have no state and
        would train from the beginning.
        """
        workers = self.last_in(round_)
        return bool(workers) and all(isinstance(worker.state, Finishing | Detached) for worker in workers)
