"""Who gets which samples of a step, in how many passes, and what they weigh: arithmetic alone, the same on every rank.

A step takes the samples at places [begin, begin + total) of the epoch's order. They are split as evenly as possible:
two ranks differ by one sample at most, and so do two passes of a rank. All ranks make the same number of passes,
because a sharded model meets its peers in each of them; a pass for which a rank has no sample repeats one that counts
for nothing.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec


class Share(msgspec.Struct, frozen=True):
    """What one rank has of one step, or of one pass of it."""

    count: int
    """Samples of this rank that count. With 0 the rank is given one sample to repeat, so that it takes part in the
    collectives of the step; it counts for nothing because `weight` is 0."""
    total: int
    """Samples of the whole world in this step: what to `advance` by once the step is done."""
    weight: float
    """count * world / total: multiply the mean loss of these samples by it, and the average over the ranks of what the
    passes add up to is the mean over all samples of the step. 1.0 wherever all have the same number of samples and make
    one pass."""
    last: bool = True
    """Whether this is the rank's last pass of the step: gradients are complete after it."""


class Pass(msgspec.Struct, frozen=True):
    """One forward and backward pass of a rank: the samples at places [first, end) of its step."""

    first: int
    end: int
    share: Share


class Span(msgspec.Struct, frozen=True):
    """The samples of one step: `total` of them, from place `begin` of the epoch's order on."""

    begin: int
    total: int


def part(total: int, rank: int, world: int) -> tuple[int, int]:
    """Where the part of `rank` begins and ends when `total` samples are split as evenly as possible."""
    return total * rank // world, total * (rank + 1) // world


def passes(total: int, rank: int, world: int, largest: int | None = None) -> list[Pass]:
    """The passes of one rank in a step of `total` samples, at least one.

    Args:
        total: samples of the step, at least 1.
        rank: whose passes.
        world: how many share the step.
        largest: samples that a rank can hold in one pass; None: any number, and there is one pass.
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


def spans(start: int, size: int, step_size: int, drop_last: bool) -> Iterator[Span]:
    """The steps left of an epoch of `size` samples, from place `start` on."""
    for begin in range(start, size, step_size):
        total = min(step_size, size - begin)
        if total == step_size or not drop_last:
            yield Span(begin, total)


def steps_in(samples: int, step_size: int, drop_last: bool) -> int:
    """How many steps `samples` samples make."""
    return samples // step_size if drop_last else -(-samples // step_size)
