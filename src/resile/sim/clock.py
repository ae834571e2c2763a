"""Virtual time: a queue of calls, each at its moment. An hour costs only what happens in it."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from itertools import count

Call = Callable[[], object]


class Timer:
    """A planned call. A cancelled timer stays in the clock's queue, which skips it when its moment comes.

    `Timer()` is a timer that was never planned.
    """

    __slots__ = ("call",)

    def __init__(self, call: Call | None = None) -> None:
        self.call = call

    def cancel(self) -> None:
        self.call = None


class Clock:
    """The only clock of a simulation. Calls at the same moment happen in the order in which they were queued."""

    def __init__(self) -> None:
        self.now = 0.0
        self._queue: list[tuple[float, int, Timer]] = []
        self._order = count()

    def at(self, when: float, call: Call) -> Timer:
        timer = Timer(call)
        heapq.heappush(self._queue, (max(when, self.now), next(self._order), timer))
        return timer

    def after(self, delay: float, call: Call) -> Timer:
        return self.at(self.now + delay, call)

    def step(self) -> bool:
        """Advance time to the next planned call and make the call; False if none is left."""
        while self._queue:
            when, _, timer = heapq.heappop(self._queue)
            call, timer.call = timer.call, None
            if call is not None:
                self.now = when
                call()
                return True
        return False
