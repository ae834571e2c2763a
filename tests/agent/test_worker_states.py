"""The table of what may happen to a worker: all of it, and nothing else."""

from __future__ import annotations

import asyncio
from typing import get_args

import pytest

from resile.agent.workers.worker_states import (
    TRANSITIONS,
    Completing,
    Detached,
    Dismissed,
    Ended,
    Event,
    Failed,
    Finishing,
    IllegalTransition,
    Leaving,
    Member,
    Ready,
    Starting,
    State,
    Stuck,
    Worker,
    transition,
)
from resile.api.ids import Round
from resile.protocol.message import Message


class Line:
    def send(self, message: Message, /) -> None: ...

    def close(self, because: str = "", /) -> None: ...


LINE = Line()
EXAMPLES: dict[type[State], State] = {
    Starting: Starting(Round(1)),
    Ready: Ready(LINE, was_member=True, has_state=True, holds=Round(1)),
    Member: Member(LINE, Round(1)),
    Completing: Completing(LINE, Round(1)),
    Leaving: Leaving(LINE, Round(1)),
    Stuck: Stuck(LINE, Round(1)),
    Finishing: Finishing(Round(1)),
    Detached: Detached(Round(1)),
    Failed: Failed(),
    Dismissed: Dismissed(),
    Ended: Ended(Round(1)),
}

LISTED = {
    (Starting, Event.READY, Ready),
    (Starting, Event.FAILED, Failed),
    (Starting, Event.ENDED, Ended),
    (Starting, Event.DISMISSED, Dismissed),
    (Ready, Event.READY, Ready),
    (Ready, Event.PLACED, Member),
    (Ready, Event.FAILED, Failed),
    (Ready, Event.ENDED, Ended),
    (Ready, Event.DISMISSED, Dismissed),
    (Member, Event.READY, Ready),
    (Member, Event.ROUND_OVER, Leaving),
    (Member, Event.LAST_STEP, Completing),
    (Member, Event.CLOSED, Finishing),
    (Member, Event.FAILED, Failed),
    (Member, Event.ENDED, Ended),
    (Completing, Event.READY, Ready),
    (Completing, Event.ROUND_OVER, Leaving),
    (Completing, Event.COMPLETE, Finishing),
    (Completing, Event.CLOSED, Finishing),
    (Completing, Event.FAILED, Failed),
    (Completing, Event.ENDED, Ended),
    (Leaving, Event.READY, Ready),
    (Leaving, Event.OVERDUE, Stuck),
    (Leaving, Event.CLOSED, Finishing),
    (Leaving, Event.FAILED, Failed),
    (Leaving, Event.ENDED, Ended),
    (Stuck, Event.READY, Ready),
    (Stuck, Event.STATE_FOUND, Leaving),
    (Stuck, Event.CLOSED, Finishing),
    (Stuck, Event.FAILED, Failed),
    (Stuck, Event.ENDED, Ended),
    (Finishing, Event.READY, Ready),
    (Finishing, Event.CLOSED, Finishing),
    (Finishing, Event.DETACHED, Detached),
    (Finishing, Event.FAILED, Failed),
    (Finishing, Event.ENDED, Ended),
    (Detached, Event.READY, Ready),
    (Detached, Event.FAILED, Failed),
    (Detached, Event.ENDED, Ended),
    (Failed, Event.START, Starting),
    (Failed, Event.DISMISSED, Ended),
    (Dismissed, Event.ENDED, Ended),
}


def test_every_state_is_in_the_table() -> None:
    assert set(TRANSITIONS) == set(EXAMPLES) == set(get_args(State))


@pytest.mark.parametrize("event", Event)
@pytest.mark.parametrize("before", EXAMPLES)
def test_what_is_listed_is_allowed_and_all_else_is_refused(before: type[State], event: Event) -> None:
    for after, state in EXAMPLES.items():
        if (before, event, after) in LISTED:
            assert transition(EXAMPLES[before], event, state) is state
        else:
            words = f"^a worker that is {before.__name__} cannot become {after.__name__} by '{event}'$"
            with pytest.raises(IllegalTransition, match=words):
                transition(EXAMPLES[before], event, state)


async def test_a_refused_transition_changes_nothing() -> None:
    worker = Worker(0, Ended())
    worker.set_deadline(1000.0, lambda _: None)
    with pytest.raises(IllegalTransition):
        worker.on(Event.START, Starting())
    assert worker.state == Ended()
    assert worker.has_deadline
    worker.cancel_deadline()


async def test_a_deadline_ends_with_the_state_that_it_was_set_for() -> None:
    worker, passed = Worker(0, Member(LINE, Round(1))), asyncio.Event()
    worker.set_deadline(0.0, lambda _: passed.set())
    worker.on(Event.ROUND_OVER, Leaving(LINE, Round(1)))
    assert not worker.has_deadline
    await asyncio.sleep(0.01)
    assert not passed.is_set()
