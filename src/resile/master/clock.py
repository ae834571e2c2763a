"""The master's clock: reads like the wall clock, never jumps, never goes back, not even across a restart."""

from __future__ import annotations

import time


class Clock:
    """Wall time at the start plus monotonic time since; at least `not_before`, the last time in the journal."""

    def __init__(self, not_before: float = 0.0) -> None:
        self._offset = max(time.time(), not_before) - time.monotonic()

    def __call__(self) -> float:
        """The moment."""
        return self._offset + time.monotonic()
