"""The shuffled order of an epoch, computed for many positions at a time.

Python needs 3 to 6 microseconds for each position. Numpy needs about a quarter of that time for some hundred positions
at once, and a tenth or less for thousands. This module does not import torch, which would delay samplers.
"""

from __future__ import annotations

import sys
from typing import Any

from resile.common.permutation import MIX, ShuffledOrder

FEW = 16
"""Below this many positions, Python is faster than numpy."""


class EpochOrder(ShuffledOrder):
    """The same order as `ShuffledOrder`, computed faster for many positions if numpy is imported."""

    def between(self, start: int, stop: int) -> list[int]:
        numpy: Any = sys.modules.get("numpy")
        if numpy is None or stop - start < FEW or self._carries:
            return super().between(start, stop)
        places = self._pass(numpy.arange(start, stop, dtype=numpy.uint64), numpy.uint64)
        while (outside := numpy.flatnonzero(places >= self.size)).size >= FEW:
            places[outside] = self._pass(places[outside], numpy.uint64)
        found: list[int] = places.tolist()
        for index in outside.tolist():
            found[index] = self.at(found[index])
        return found

    @property
    def _carries(self) -> bool:
        """True if a sum in `_pass` may exceed 64 bits. Then numpy cannot be used, because it would drop the carry."""
        return max(map(max, self.keys)) + max(self.low_mask, self.high_mask) >= 1 << 64

    def _pass(self, places: Any, word: Any) -> Any:
        low_bits, low_mask, high_mask = word(self.low_bits), word(self.low_mask), word(self.high_mask)
        low, high = places & low_mask, places >> low_bits
        for low_key, high_key in self.keys:
            low ^= _mix(high + word(low_key), word) & low_mask
            high ^= _mix(low + word(high_key), word) & high_mask
        return high << low_bits | low


def _mix(words: Any, word: Any) -> Any:
    for shift, factor in MIX:
        words ^= words >> word(shift)
        words *= word(factor)
    return words >> word(32)
