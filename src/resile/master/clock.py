"""The master's clock: it reads like the wall clock, but never jumps or goes back, not even across a restart."""

from __future__ import annotations

import time


class Clock:
    """Gives the wall time at the start of this process plus the monotonic time since then.

    `not_before` is the last time in the journal. If the wall time at the start is earlier, the clock begins at
    `not_before`.
    """

    def __init__(self, not_before: float = 0.0) -> None:
        self._offset = max(time.time(), not_before) - time.monotonic()

    def __call__(self) -> float:
        return self._offset + time.monotonic()
