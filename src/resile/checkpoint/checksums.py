"""Computes the checksums of a buffer's data without torch, for agents whose training process ended before it did so.

A checksum is the wrapping sum of a chunk's 64-bit words, equal to torch's `sum` of int64. Python adds the words by
halving one long integer, which takes 0.6 s for 1 GiB. Torch needs a tenth of that.
"""

from __future__ import annotations

import functools
from typing import Any

from resile.checkpoint.layout import CHUNK, Layout

_WORD, _LANE = 64, 128
_LANES = CHUNK // (_LANE // 8) + 1


def sums_of(memory: Any, data_at: int, layout: Layout) -> list[int]:
    """Compute the checksums of a buffer's data, one for each chunk.

    As in `PackedState.sums`, the checksums of the bytes that this rank stores come first, then those of other bytes.
    """
    view = memoryview(memory)[data_at : data_at + layout.length]
    spans = ((0, layout.stored), (layout.stored, layout.length))
    return [word_sum(view[at : min(at + CHUNK, end)]) for start, end in spans for at in range(start, end, CHUNK)]


@functools.cache
def _lower_words() -> int:
    """A mask for a long integer that is divided into lanes of 128 bits. It keeps the lower 64 bits of every lane.

    A lane is twice as wide as a word because it must hold the sum of all words of a chunk.
    """
    return int.from_bytes((b"\xff" * (_WORD // 8) + bytes((_LANE - _WORD) // 8)) * _LANES, "little")


def word_sum(data: bytes | memoryview) -> int:
    """The sum of the 64-bit words of `data`, as a signed 64-bit number. `data` must not be longer than a chunk."""
    words = int.from_bytes(data, "little")
    total = (words & _lower_words()) + (words >> _WORD & _lower_words())
    lanes = -(-len(data) // (_LANE // 8))
    while lanes > 1:
        lanes = -(-lanes // 2)
        total = (total & (1 << _LANE * lanes) - 1) + (total >> _LANE * lanes)
    total &= (1 << _WORD) - 1
    return total - (1 << _WORD) if total >> (_WORD - 1) else total
