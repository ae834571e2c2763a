"""Exponential backoff: how long to wait before what failed is tried again.

A first retry is cheap and often enough; a hundredth helps nobody and costs the other side work. So pauses grow by a
factor up to a limit. There is no jitter: the callers are few, or their failures are not at the same moment.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple


class Backoff(NamedTuple):
    """A rule, not a counter: the caller counts failures, or takes `pauses()` and drops it after a success."""

    first: float
    """Seconds after the first failure."""
    limit: float
    """Seconds that no pause exceeds."""
    factor: float = 2.0

    def after(self, failures: int) -> float:
        """Seconds to wait after so many failures in a row; nothing after none."""
        if failures <= 0:
            return 0.0
        try:
            return min(self.limit, self.first * self.factor ** (failures - 1))
        except OverflowError:
            return self.limit

    def pauses(self) -> Iterator[float]:
        """The pauses from the first on, without end."""
        pause = min(self.limit, self.first)
        while True:
            yield pause
            pause = min(self.limit, pause * self.factor)
