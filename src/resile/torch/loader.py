"""Loads data for a world whose size may change at any step: every sample of an epoch enters the model exactly once.

    loader = ElasticLoader(dataset, global_batch_size=512, micro_batch_size=32, num_workers=2)
    elastic = Elastic(model, optimizer, sampler=loader)
    for step in elastic.epochs(3, loader):
        with elastic.step():
            for share, (inputs, targets) in step:
                loss = criterion(model(inputs), targets)  # the mean over these samples
                (loss * share.weight).backward()

A step has the same 512 samples whatever the size of the world. Each rank takes its part of them in as many passes as it
needs to hold no more than 32 at a time. The weights make the sum of all passes the mean over the 512. The position
moves when a step is in the model and not when its samples are loaded. So the ranks of a new world read again what the
worker processes of the old world have read ahead.

Data sets are those of torch: with `__len__` and `__getitem__`, or iterable. An iterable data set must give the same
samples in the same order every time on every rank (after `set_epoch(epoch)`, if it has that method). Each reader goes
through all of it and keeps its part, so expensive work belongs into `transform`. Its length need not be known.
"""

from __future__ import annotations

import inspect
import multiprocessing
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import msgspec
import torch
from torch.utils.data import DataLoader, IterableDataset, _utils, default_collate

from resile.torch._data.partition import Share, passes, spans
from resile.torch._data.sample_reader import Batches, MapReader, Reader, ReadRequest, Samples, StreamReader
from resile.torch._support.arguments import check_known, whole
from resile.torch.sampler import ElasticBatchSampler, Position, StepSampler

__all__ = ["ElasticLoader", "Step"]

OURS = ("batch_size", "sampler", "batch_sampler", "collate_fn", "drop_last", "shuffle", "generator", "worker_init_fn")
"""Arguments of torch's `DataLoader` that `ElasticLoader` refuses, because it sets them itself."""


class Step(msgspec.Struct, frozen=True):
    """What one rank takes of one step. Iterating over it yields the rank's passes, each as a share and a batch."""

    total: int
    """Samples of the whole world in this step."""
    passes: list[tuple[Share, Any]]

    def __iter__(self) -> Iterator[tuple[Share, Any]]:
        return iter(self.passes)

    def __len__(self) -> int:
        return len(self.passes)


class ElasticLoader(StepSampler):
    """Yields one rank's steps for the rest of an epoch, and keeps the world's position in that epoch.

    There are two ways to use it. `Elastic.epochs(count, loader)` counts a step once the model was updated with it.
    `for step in loader` counts a step when it is yielded, as torchdata's `StatefulDataLoader` does: save `state_dict()`
    after the step's update. After the end of an epoch, `set_epoch` begins the next one.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        batch_size: int | None = None,
        global_batch_size: int | None = None,
        micro_batch_size: int | None = None,
        rank: int | None = None,
        world: int | None = None,
        seed: int = 0,
        shuffle: bool = True,
        shuffle_block: int = 1000,
        drop_last: bool = False,
        transform: Callable[[Any], Any] | None = None,
        collate_fn: Callable[[list[Any]], Any] = default_collate,
        worker_init_fn: Callable[[int], object] | None = None,
        **loading: Any,
    ) -> None:
        """Start at the beginning of epoch 0; nothing is read yet.

        Args:
            dataset: the data.
            batch_size: samples of one rank in a step; the global batch grows and shrinks with the world.
            global_batch_size: instead of `batch_size`: samples of the whole world in a step, whatever its size.
            micro_batch_size: samples that a rank can hold in one pass; None for any number.
            rank: this process's rank; None: that of the process group, the environment or `Elastic`.
            world: number of processes; None: as with `rank`.
            seed: together with the epoch, determines the order.
            shuffle: False keeps the data's own order.
            shuffle_block: how many samples of an iterable data set are held and shuffled at a time.
            drop_last: skip the last step of an epoch if there are too few samples for a whole one.
            transform: applied to each sample of this rank, in a worker process if there are some.
            collate_fn: makes a batch of a list of samples.
            worker_init_fn: called with its number by each worker process.
            loading: for torch's `DataLoader`: `num_workers`, `prefetch_factor` (in steps), `pin_memory`, ...

        Raises:
            TypeError: an argument has the wrong type, or is unknown.
            ValueError: an argument or a combination is invalid.
        """
        for name in OURS:
            if name in loading:
                raise ValueError(f"{name} of DataLoader is not for ElasticLoader to take")
        ours, torchs = (inspect.signature(each.__init__).parameters for each in (ElasticLoader, DataLoader))
        check_known(loading, {**ours, **torchs}, "ElasticLoader")
        if not (hasattr(dataset, "__getitem__") or hasattr(dataset, "__iter__")):
            raise TypeError(f"dataset: must be a data set or something to iterate over, not a {type(dataset).__name__}")
        micro_batch_size = None if micro_batch_size is None else whole("micro_batch_size", micro_batch_size, least=1)
        shuffle_block = whole("shuffle_block", shuffle_block, least=1)
        stream = isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__")
        size = None if stream else len(dataset)
        together = (shuffle_block if stream else size) if shuffle else 0
        super().__init__(size, rank=rank, world=world, seed=seed, shuffled_together=together or 0)
        self._set_steps(batch_size, global_batch_size, drop_last)
        self._largest = micro_batch_size
        self._asks = _Asks()
        self._newest = multiprocessing.RawValue("q", 0)
        samples = Samples(collate_fn, micro_batch_size, transform)
        reader: Reader
        if size is None:
            reader = StreamReader(dataset, samples, self._newest, seed=seed, block=together or 0)
        else:
            reader = MapReader(dataset, samples, self._newest, size=size, seed=seed, shuffle=shuffle)
        if loading.get("num_workers"):
            loading.setdefault("persistent_workers", True)
        self._loader = DataLoader(
            reader,
            batch_size=None,
            sampler=self._asks,
            collate_fn=_as_it_is,
            worker_init_fn=_HideWorker(worker_init_fn) if stream else worker_init_fn,
            generator=torch.Generator().manual_seed(seed),  # iterating must not change the script's own generator
            **loading,
        )

    def __iter__(self) -> Iterator[Step]:
        """Yield the remaining steps of this epoch. A step counts as consumed when it is yielded."""
        for step in self.steps():
            self.advance(step.total)
            yield step

    def steps(self) -> Iterator[Step]:
        """Yield the remaining steps of this epoch. Only `advance` moves the position, once a step was taken.

        An iteration uses the world, epoch and position of the moment at which it begins, so begin another one after
        `resize` or `load_state_dict`. Batches that an earlier iteration has read ahead are then dropped.
        """
        epoch, rank, world, step_size = self.epoch, self.rank, self.world, self.step_size
        self._newest.value += 1
        generation = self._newest.value
        ahead = spans(self.completed, self.size, step_size, self._drop_last)
        self._asks.now = (ReadRequest(epoch, begin, total, rank, world, generation) for begin, total in ahead)
        for total, own in self._loader:
            if not total or (total < step_size and self._drop_last):
                return
            dealt = passes(total, rank, world, self._largest)
            yield Step(total, [(each.share, batch) for each, batch in zip(dealt, own, strict=True)])
            if total < step_size:
                return


def dealt(sampler: Position, loader: Iterable[Any]) -> Iterator[tuple[int, Any]]:
    """Yield, for each remaining step of an epoch, how many samples the whole world takes, and the data for the script.

    The data are a `Step` if `loader` is an `ElasticLoader`, otherwise the pair (share, batch).

    Raises:
        ValueError: the sampler and the loader do not belong together.
    """
    if isinstance(loader, ElasticLoader):
        if loader is not sampler:
            raise ValueError("an ElasticLoader deals its samples itself: give it to Elastic as its sampler, too")
        return ((step.total, step) for step in loader.steps())
    if not isinstance(sampler, ElasticBatchSampler):
        raise ValueError(f"epochs() has an ElasticLoader as its sampler and was given a {type(loader).__name__}")
    return ((share.total, (share, batch)) for share, batch in zip(sampler.shares(), loader, strict=True))


class _Asks:
    def __init__(self) -> None:
        self.now: Iterator[ReadRequest] = iter(())

    def __iter__(self) -> Iterator[ReadRequest]:
        return self.now


class _HideWorker:
    """A `worker_init_fn` that makes a worker process look like the main process to the stream that it reads.

    Many streams yield only some of their samples in a worker process. `then` is the script's own `worker_init_fn`.
    """

    def __init__(self, then: Callable[[int], object] | None) -> None:
        self._then = then

    def __call__(self, number: int) -> None:
        if self._then is not None:
            self._then(number)
        _utils.worker._worker_info = None


def _as_it_is(batches: Batches) -> Batches:
    """Return the batches unchanged, because the reader has collated them."""
    return batches
