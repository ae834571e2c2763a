"""Reads the samples of one rank's part of one step, in the training process or in a loader's worker.

A request has everything that a reader needs: epoch, position, rank, world. So workers that survive a resize need no
other news of it, and the same request gives the same samples in any process. Batches that were read ahead for another
world are thrown away.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import msgspec

from resile.torch._data.partition import Pass, passes
from resile.torch._data.shuffle import EpochOrder

Batches = tuple[int, list[Any]]
"""The world's number of samples in the step (0 at the end of a stream), and one batch for each pass of this rank."""

NOWHERE = -1
"""Stands for the epoch where a `StreamReader` has none."""


class ReadRequest(msgspec.Struct, frozen=True):
    """Asks a reader for the batches of one rank in one step."""

    epoch: int
    begin: int
    """Position of the step's first sample in the epoch's order."""
    total: int
    """Samples of the whole world in the step. A stream that ends earlier yields fewer."""
    rank: int
    world: int
    generation: int
    """The number of the loader's iteration that asks. Requests of older iterations get no samples."""


class Samples(msgspec.Struct, frozen=True):
    collate: Callable[[list[Any]], Any]
    largest: int | None
    """Most samples in one pass."""
    transform: Callable[[Any], Any] | None = None

    def batch(self, samples: Iterable[Any]) -> Any:
        return self.collate([self.transform(sample) for sample in samples] if self.transform else list(samples))

    def passes(self, ask: ReadRequest, total: int) -> list[Pass]:
        return passes(total, ask.rank, ask.world, self.largest)


class Reader:
    """Answers read requests with batches. Requests of older iterations of the loader get no batches."""

    def __init__(self, samples: Samples, newest: Any) -> None:
        """`newest.value`, in shared memory, is the number of the loader's newest iteration."""
        self._samples = samples
        self._newest = newest

    def __getitem__(self, ask: ReadRequest) -> Batches:
        if ask.generation != self._newest.value:
            return 0, []
        return self._read(ask)

    def _read(self, ask: ReadRequest) -> Batches:
        raise NotImplementedError


class MapReader(Reader):
    def __init__(self, dataset: Any, samples: Samples, newest: Any, *, size: int, seed: int, shuffle: bool) -> None:
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
    """Reads a data set that can only be read from its beginning to its end, the same way every time.

    Every reader goes through the whole stream and batches only its rank's samples. If the data set has a method
    `iter_from(position)`, reading begins at that position. Otherwise the samples before it are read and thrown away.
    """

    def __init__(self, dataset: Iterable[Any], samples: Samples, newest: Any, *, seed: int, block: int) -> None:
        """`block` is the number of samples that are shuffled together; 0 keeps the data's own order."""
        super().__init__(samples, newest)
        self._dataset = dataset
        self._seed = seed
        self._block = block
        self._epoch = NOWHERE
        self._at = 0
        self._rest: Iterator[Any] = iter(())
        self._end = (NOWHERE, 0)
        """The last epoch that ended, and where it ended. A loader that reads ahead asks for steps beyond that."""

    def _read(self, ask: ReadRequest) -> Batches:
        if ask.epoch == self._end[0] and ask.begin >= self._end[1]:
            return 0, []
        if ask.epoch != self._epoch or ask.begin < self._at:
            self._open(ask.epoch, ask.begin)
        self._epoch = NOWHERE  # stays so if an error leaves the stream's position unknown
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
    """Shuffle samples within blocks, so that reading can begin at any block.

    `samples` begin at position `start` of the epoch. A block must begin there. At most `block` samples are in memory.
    """
    for number in itertools.count(start // block):
        together: Sequence[Any] = list(itertools.islice(samples, block))
        if not together:
            return
        order = EpochOrder(len(together), seed, (epoch << 32) + number)
        yield from (together[place] for place in order.between(0, len(together)))
