"""Reads the samples of one rank's part of one step, wherever it runs: in the training process or in a loader's worker.

A reader is asked for a step by its place, and the ask says everything: epoch, place, rank, world. So workers that live
on through a resize need not be told of it, what was read ahead for another world is thrown away, and the same ask
gives the same samples in any process.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

import msgspec

from resile.torch._data.partition import Pass, passes, spans
from resile.torch._data.shuffle import EpochOrder

Batches = tuple[int, list[Any]]
"""Samples of the whole world in the step, 0 if the stream is over; and one batch for each pass of this rank."""

NOWHERE = -1
"""The epoch of a stream that is not open."""


class ReadRequest(msgspec.Struct, frozen=True):
    """One rank's part of one step."""

    epoch: int
    begin: int
    """Place of the step's first sample in the epoch's order."""
    total: int
    """Samples of the whole world in the step; of a stream, as many as there are up to that."""
    rank: int
    world: int
    generation: int
    """Which of the loader's iterations asks; older ones do not want an answer any more."""


def asks(first: ReadRequest, size: int | None, drop_last: bool) -> Iterator[ReadRequest]:
    """This and the following steps of the epoch: all of them, or without end if nobody knows its size."""
    if size is None:
        for begin in itertools.count(first.begin, first.total):
            yield msgspec.structs.replace(first, begin=begin)
    else:
        for span in spans(first.begin, size, first.total, drop_last):
            yield msgspec.structs.replace(first, begin=span.begin, total=span.total)


class Samples(msgspec.Struct, frozen=True):
    """What becomes of samples."""

    collate: Callable[[list[Any]], Any]
    largest: int | None
    """Samples in one pass, at most."""
    transform: Callable[[Any], Any] | None = None

    def batch(self, samples: Iterable[Any]) -> Any:
        """One batch of samples of this rank."""
        return self.collate([self.transform(sample) for sample in samples] if self.transform else list(samples))

    def passes(self, ask: ReadRequest, total: int) -> list[Pass]:
        """The passes of the rank that asks, in a step of `total` samples."""
        return passes(total, ask.rank, ask.world, self.largest)


class Newest(Protocol):
    """The generation that still wants answers, in memory that processes share."""

    value: int


class Reader:
    """Answers asks, unless they are of an iteration that was given up."""

    def __init__(self, samples: Samples, newest: Newest) -> None:
        self._samples = samples
        self._newest = newest

    def __getitem__(self, ask: ReadRequest) -> Batches:
        if ask.generation != self._newest.value:
            return 0, []
        return self._read(ask)

    def _read(self, ask: ReadRequest) -> Batches:
        raise NotImplementedError


class MapReader(Reader):
    """Of a data set whose samples have numbers."""

    def __init__(self, dataset: Any, samples: Samples, newest: Newest, *, size: int, seed: int, shuffle: bool) -> None:
        super().__init__(samples, newest)
        self._dataset = dataset
        self._size = size
        self._seed = seed
        self._shuffle = shuffle

    def _read(self, ask: ReadRequest) -> Batches:
        order = EpochOrder(self._size, self._seed, ask.epoch) if self._shuffle else None
        batches = []
        for each in self._samples.passes(ask, ask.total):
            first, end = ask.begin + each.first, ask.begin + each.end
            numbers = order.between(first, end) if order else list(range(first, end))
            batches.append(self._samples.batch(self._fetch(numbers)))
        return ask.total, batches

    def _fetch(self, numbers: list[int]) -> Iterable[Any]:
        if hasattr(self._dataset, "__getitems__"):  # torch's protocol for data sets that fetch many at once
            found: Iterable[Any] = self._dataset.__getitems__(numbers)
            return found
        return (self._dataset[number] for number in numbers)


class StreamReader(Reader):
    """Of a data set that can only be read from its beginning to its end, the same way every time.

    Every reader goes through the whole stream and makes batches of its own part alone. A data set with a method
    `iter_from(place)` is asked for the rest from there; of any other, what comes before is read and thrown away.
    """

    def __init__(self, dataset: Iterable[Any], samples: Samples, newest: Newest, *, seed: int, block: int) -> None:
        """`block`: samples that are shuffled together; 0: none."""
        super().__init__(samples, newest)
        self._dataset = dataset
        self._seed = seed
        self._block = block
        self._epoch = NOWHERE
        self._at = 0
        self._rest: Iterator[Any] = iter(())
        self._end = (NOWHERE, 0)
        """An epoch, and a place in it from which on there is nothing: whoever reads ahead asks for that, too."""

    def _read(self, ask: ReadRequest) -> Batches:
        if ask.epoch == self._end[0] and ask.begin >= self._end[1]:
            return 0, []
        if ask.epoch != self._epoch or ask.begin < self._at:
            self._open(ask.epoch, ask.begin)
        self._epoch = NOWHERE  # as long as nobody knows how far the stream was read
        step = list(itertools.islice(self._rest, ask.begin - self._at, ask.begin - self._at + ask.total))
        if len(step) < ask.total:
            self._end = (ask.epoch, ask.begin + len(step))
        if not step:
            return 0, []
        self._epoch, self._at = ask.epoch, ask.begin + len(step)
        dealt = self._samples.passes(ask, len(step))
        return len(step), [self._samples.batch(step[each.first : each.end]) for each in dealt]

    def _open(self, epoch: int, begin: int) -> None:
        if hasattr(self._dataset, "set_epoch"):
            self._dataset.set_epoch(epoch)
        start = begin - begin % self._block if self._block else begin
        if hasattr(self._dataset, "iter_from"):
            rest = iter(self._dataset.iter_from(start))
        else:
            rest = itertools.islice(iter(self._dataset), start, None)
        self._rest = shuffled_by_blocks(rest, self._block, self._seed, epoch, start) if self._block else rest
        self._at = start


def shuffled_by_blocks(samples: Iterator[Any], block: int, seed: int, epoch: int, start: int) -> Iterator[Any]:
    """Samples in another order, in which each stays within its block: so it can be entered at any block.

    Args:
        samples: from place `start` on.
        block: samples of a block; that many are held in memory.
        seed: fixes the order.
        epoch: changes it.
        start: where a block begins.
    """
    for number in itertools.count(start // block):
        together: Sequence[Any] = list(itertools.islice(samples, block))
        if not together:
            return
        order = EpochOrder(len(together), seed, (epoch << 32) + number)
        yield from (together[place] for place in order.between(0, len(together)))
