"""How many restarts a node has used up, as far as the node itself can tell.

The master counts, and has the last word: it measures the window in seconds of training, which pass no faster than
those of the clock. So a budget that is spent by this count is spent by the master's, too, unless the master's memory
begins later. That is enough to announce nothing that the master will not allow, and too little to refuse anything.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from resile.api.ids import NO_ROUND, Round, Seconds


class RestartCount:
    """Failures of this node's own processes. All that fail in one round count as one, as they do for the master."""

    def __init__(self, allowed: int, window: Seconds, clock: Callable[[], float] = time.monotonic) -> None:
        """None was used yet.

        Args:
            allowed: `--max-restarts`.
            window: seconds after which a failure counts no longer.
            clock: tells the time, in seconds.
        """
        self._allowed = allowed
        self._window = window
        self._clock = clock
        self._failures: list[float] = []
        self._last_round: Round = NO_ROUND

    def count(self, placed: Round) -> None:
        """A process failed; `placed` is the round in which it had a place, or NO_ROUND."""
        if placed == NO_ROUND or placed != self._last_round:
            self._failures.append(self._clock())
        self._last_round = placed or self._last_round

    @property
    def is_spent(self) -> bool:
        """Whether the master will not have this node start again after the last failure."""
        since = self._clock() - self._window
        return sum(at > since for at in self._failures) > self._allowed

    def __str__(self) -> str:
        used = len(self._failures)
        if used > self._allowed:  # the master forgives what is long ago
            return f"of {self._allowed} restarts some older ones do not count any more"
        return f"{used} of {self._allowed} restarts used"
