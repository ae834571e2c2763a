"""The shuffled order of an epoch, computed index by index instead of being stored.

A stored permutation of a hundred million samples costs every rank most of a gigabyte, and many seconds at every
restart. Here a small cipher (a Feistel network, applied until the result lies within the data set) computes which
sample stands at a position, so a restart in mid-epoch goes on at once and stores nothing. The price is 3 to 6
microseconds for each index (with numpy, `torch/_data/shuffle.py` needs about a quarter of that for some hundred
positions at once, and a tenth or less for thousands), and an order that is well mixed but not drawn evenly from all
possible orders. The sampler orders samples by it, the ledger shards.
"""

from __future__ import annotations

import hashlib

_KEYS = 8
_WORD = (1 << 64) - 1
MIX = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))


class ShuffledOrder:
    """A permutation of `range(size)`. Only `seed` and `epoch` fix it, so all ranks, hosts and Python versions agree."""

    def __init__(self, size: int, seed: int, epoch: int) -> None:
        bits = max(2, (size - 1).bit_length())
        self.size = size
        self.low_bits = bits // 2
        self.low_mask = (1 << self.low_bits) - 1
        self.high_mask = (1 << (bits - self.low_bits)) - 1
        digest = hashlib.blake2b(f"resile order {seed} {epoch}".encode(), digest_size=8 * _KEYS).digest()
        words = [int.from_bytes(digest[at : at + 8], "little") for at in range(0, len(digest), 8)]
        self.keys = list(zip(words[::2], words[1::2], strict=True))

    def between(self, start: int, stop: int) -> list[int]:
        """The numbers at the positions from `start` to `stop` (not included) of the permutation."""
        return [self.at(place) for place in range(start, stop)]

    def at(self, place: int) -> int:
        """The number at position `place` of the permutation. The first position is 0, the last is `size` - 1."""
        # One pass permutes [0, 2**bits); walking on while outside [0, size) permutes [0, size). The range is less than
        # twice the size (but for sizes under 3), so the walk takes under two passes on average.
        low_bits, low_mask, high_mask = self.low_bits, self.low_mask, self.high_mask
        while True:
            low, high = place & low_mask, place >> low_bits
            for low_key, high_key in self.keys:
                low ^= _mix(high + low_key) & low_mask
                high ^= _mix(low + high_key) & high_mask
            place = high << low_bits | low
            if place < self.size:
                return place


def _mix(word: int) -> int:
    """Return 32 bits, each of which depends on all bits of `word` (the last steps of splitmix64)."""
    for shift, factor in MIX:
        word = (word ^ (word >> shift)) * factor & _WORD
    return word >> 32
