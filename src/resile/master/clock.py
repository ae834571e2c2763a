"""The master's clock: it reads like the wall clock, but never jumps or goes back, not even across a restart."""

from __future__ import annotations

import time


class Clock:
    """The wall time at the start, at least `not_before` (the last time in the journal), plus monotonic time since."""

    def __init__(self, not_before: float = 0.0) -> None:
        self._offset = max(time.time(), not_before) - time.monotonic()

    def __call__(self) -> float:
        return self._offset + time.monotonic()
