"""Counts how many restarts a node has used, as far as the node itself can tell.

The master's own count decides. It measures `budget_window` in training time, which never passes faster than the clock.
So if the budget is spent by this count, it is spent by the master's too, unless a new master has forgotten failures.
The agent therefore uses this count for its log and its pauses only, and refuses nothing because of it.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from resile.api.ids import NO_ROUND, Round, Seconds


class RestartCount:
    """Counts failures of this node's processes as the master does: all failures of one round count as one."""

    def __init__(self, allowed: int, window: Seconds, clock: Callable[[], float] = time.monotonic) -> None:
        """Allow `allowed` failures (`--max-restarts`) in any `window` seconds."""
        self._allowed = allowed
        self._window = window
        self._clock = clock
        self._failures: list[float] = []
        self._last_round: Round = NO_ROUND

    def count(self, placed: Round) -> None:
        """Count a failure of a process; `placed` is its round, or NO_ROUND if it was in none."""
        if placed == NO_ROUND or placed != self._last_round:
            self._failures.append(self._clock())
        self._last_round = placed or self._last_round

    @property
    def is_spent(self) -> bool:
        """True if the window holds more failures than are allowed. The master will then end the job."""
        since = self._clock() - self._window
        return sum(at > since for at in self._failures) > self._allowed

    def __str__(self) -> str:
        used = len(self._failures)
        if used > self._allowed:  # older failures left the window
            return f"of {self._allowed} restarts some older ones do not count any more"
        return f"{used} of {self._allowed} restarts used"
