"""Exponential backoff: how long to wait before a failed action is tried again.

A first retry is cheap and often succeeds; a hundredth seldom does and costs the other side work. So pauses grow by a
factor up to a limit. There is no jitter: callers are few, or do not fail at the same moment.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import NamedTuple


class Backoff(NamedTuple):
    """How long to pause between tries: each pause is `factor` times the one before it, up to a limit.

    A `Backoff` does not count failures. Callers of `after` count them; others call `pauses` again after a success.
    """

    first: float
    """Seconds after the first failure."""
    limit: float
    """Seconds that no pause exceeds."""
    factor: float = 2.0

    def after(self, failures: int) -> float:
        """Seconds to wait after so many failures in a row; 0 after none."""
        if failures <= 0:
            return 0.0
        try:
            return min(self.limit, self.first * self.factor ** (failures - 1))
        except OverflowError:
            return self.limit

    def pauses(self) -> Iterator[float]:
        """The seconds to wait after the first, second, third … failure, without end."""
        return (self.after(failures) for failures in itertools.count(1))
