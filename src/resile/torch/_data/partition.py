"""Computes which rank gets which samples of a step, in how many passes, and with which weight. No I/O.

A step takes the samples at positions [begin, begin + total) of the epoch's order. They are split as evenly as possible:
two ranks differ by at most one sample, and so do two passes of a rank. All ranks make the same number of passes,
because each pass of a sharded model involves all ranks. A rank that has no sample for a pass repeats one with weight 0.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import msgspec


class Share(msgspec.Struct, frozen=True):
    """The samples that a rank takes of a step or of one of its passes: their number, and their weight in the loss."""

    count: int
    """Samples of this rank that count. If 0, the rank gets one sample to repeat with `weight` 0, so that it takes part
    in the collectives of the step."""
    total: int
    """Samples of the whole world in this step, for `advance` once the step is done."""
    weight: float
    """count * world / total. Multiply the mean loss of these samples by this weight. The gradient, summed over passes
    and averaged over ranks, is then the mean over all samples of the step. The weight is 1.0 if all ranks have the same
    number of samples and one pass."""
    last: bool = True
    """True for the rank's last pass of the step. Its gradients are then complete."""


class Pass(msgspec.Struct, frozen=True):
    """One forward and backward pass of a rank. `first` and `end` count from the first sample of the step."""

    first: int
    end: int
    share: Share


def part(total: int, rank: int, world: int) -> tuple[int, int]:
    """Begin and end of the samples of `rank` if `total` samples are split as evenly as possible over `world` ranks."""
    return total * rank // world, total * (rank + 1) // world


def passes(total: int, rank: int, world: int, largest: int | None = None) -> list[Pass]:
    """The passes of one rank in a step of `total` samples (at least 1). There is at least one pass.

    `largest` is the number of samples that a rank can hold in one pass. If it is None, there is one pass.
    """
    begin, end = part(total, rank, world)
    most = -(-total // world)
    number = -(-most // largest) if largest else 1
    dealt = []
    for each in range(number):
        first, stop = part(end - begin, each, number)
        count = stop - first
        share = Share(count=count, total=total, weight=count * world / total, last=each == number - 1)
        dealt.append(Pass(begin + first, begin + stop, share) if count else Pass(0, 1, share))
    return dealt


def spans(start: int, size: int | None, step_size: int, drop_last: bool) -> Iterator[tuple[int, int]]:
    """Yield the steps of an epoch from position `start` on: the position of the first sample, and how many there are.

    The epoch has `size` samples; endless if `size` is None. With `drop_last`, only full steps are yielded.
    """
    for begin in itertools.count(start, step_size) if size is None else range(start, size, step_size):
        total = step_size if size is None else min(step_size, size - begin)
        if total == step_size or not drop_last:
            yield begin, total
