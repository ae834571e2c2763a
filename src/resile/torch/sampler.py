"""Divides the samples of an epoch among a world whose size may change at any step, each sample exactly once.

The position in an epoch counts the samples that the whole world has consumed, not the batches of one rank. So a
position means the same to any number of ranks, and after a resize the rest of the epoch is divided again from there.
Nothing is padded and, unless `drop_last` asks for it, nothing is dropped. In return, ranks may have different numbers
of samples in the last step of an epoch (and in every step, if the global batch is not divisible by the world), so the
loss must be scaled:

    sampler = ElasticBatchSampler(len(dataset), batch_size=32)
    loader = DataLoader(dataset, batch_sampler=sampler)
    for epoch in range(sampler.epoch, epochs):
        sampler.set_epoch(epoch)
        for share, (inputs, labels) in zip(sampler.shares(), loader, strict=True):
            loss = criterion(model(inputs), labels)  # the mean over this rank's samples
            (loss * share.weight).backward()         # DDP's average is now the mean over the global batch
            optimizer.step()
            sampler.advance(share.total)             # belongs to the step: save state_dict() with the model

`ElasticLoader` does all of this by itself. `tests/torch/data/test_sampler.py` holds the guarantee: with a state that is
saved and restored together with the model, through any sequence of resizes, every sample of an epoch enters the model
exactly once, all ranks take the same number of steps, and the gradient of a step is the mean over its samples.

This module does not import torch: a `DataLoader` takes any iterable of indices or of index lists.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, TypeVar

from resile.torch._data.partition import Share, passes, spans
from resile.torch._data.shuffle import EpochOrder
from resile.torch._support.arguments import whole
from resile.torch._support.log_setup import show_info_logs

__all__ = ["ElasticBatchSampler", "ElasticSampler", "Iteration", "Position", "Share"]

log = logging.getLogger(__name__)

T = TypeVar("T")


class Position:
    """A world's position in its data: the epoch, and how many samples of it are consumed.

    Unless rank and world are given or set by `Elastic`, they are looked up whenever they are needed: in the process
    group if there is one, otherwise in `RANK` and `WORLD_SIZE`. So a sampler may be made before the group.
    """

    def __init__(
        self, size: int | None, *, rank: int | None, world: int | None, seed: int, shuffled_together: int
    ) -> None:
        """Start at the beginning of epoch 0. `size` is None for a stream, whose length is unknown before its end.

        `shuffled_together` is how many samples are shuffled among each other; 0 keeps the data's own order.
        """
        if size is not None and size < 0:
            raise ValueError(f"size must be at least 0, not {size}")
        self.size = size
        self.epoch = 0
        self.completed = 0
        """Samples of this epoch that the world has consumed."""
        self._seed = seed
        self._shuffled_together = shuffled_together
        self._place: tuple[int, int] | None = None
        """Rank and world; None to look them up."""
        self._announces_loads = True
        """True if this rank logs the position that it loads. In an elastic loop only rank 0 does."""
        if rank is not None and world is not None:
            self._place = _checked(rank, world)
        elif rank is not None or world is not None:
            raise ValueError("give both rank and world, or neither: then they are those of the process group")

    @property
    def rank(self) -> int:
        return (self._place or _found_place())[0]

    @property
    def world(self) -> int:
        return (self._place or _found_place())[1]

    def resize(self, rank: int, world: int) -> None:
        """Set this process's rank and the size of the world. The rest of the epoch is divided again."""
        self._place = _checked(rank, world)
        self._announces_loads = rank == 0

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes for pickling, with the current rank and world.

        The other process, such as a loader's worker, has no group in which it could look them up.
        """
        return {**self.__dict__, "_place": self._place or _place_in_group()}

    def set_epoch(self, epoch: int) -> None:
        """Begin `epoch`. Does nothing if that epoch has begun, so a position restored from a checkpoint stays."""
        if epoch != self.epoch:
            self.epoch = epoch
            self.completed = 0

    def advance(self, samples: int) -> None:
        """Count `samples` of the whole world as consumed. Call it once the step's update is in the model."""
        if samples < 0 or (self.size is not None and samples > self.size - self.completed):
            of = "a stream" if self.size is None else self.size
            raise ValueError(f"cannot advance by {samples} samples: {self.completed} of {of} are completed")
        self.completed += samples

    def state_dict(self) -> dict[str, int]:
        """The position: plain numbers, the same on every rank, valid in any world."""
        return {"epoch": self.epoch, "completed": self.completed, **self._identity}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go to a saved position.

        Raises:
            ValueError: the state is no position in this data set and order; this sampler has not moved.
        """
        here = self._identity
        state = {"shuffled": here["shuffled"], **state}  # states of older releases lack it
        for field in ("epoch", "completed", *here):
            if type(state.get(field)) is not int:
                raise ValueError(f"a sampler state needs a whole number `{field}`, not {state.get(field)!r}")
        for field, value in here.items():
            if state[field] != value:
                raise ValueError(
                    f"the sampler state is of other data: its {field} is {state[field]}, here it is {value}"
                )
        if state["epoch"] < 0 or not self.has(state["completed"]):
            raise ValueError(
                f"the sampler state is at sample {state['completed']} of {here['size']}, epoch {state['epoch']}"
            )
        self.epoch = state["epoch"]
        self.completed = state["completed"]
        if self._announces_loads:
            self.announce(self.completed)

    @property
    def _identity(self) -> dict[str, int]:
        """A saved position means the same sample only if these values are equal. The size of a stream is -1."""
        size = -1 if self.size is None else self.size
        return {"size": size, "seed": self._seed, "shuffled": self._shuffled_together}

    def has(self, completed: int) -> bool:
        """True if `completed` is a possible number of consumed samples of an epoch."""
        return completed >= 0 and (self.size is None or completed <= self.size)

    def _order(self) -> Callable[[int, int], list[int]]:
        if self.size is not None and self._shuffled_together:
            return EpochOrder(self.size, self._seed, self.epoch).between
        return lambda start, stop: list(range(start, stop))

    def announce(self, completed: int) -> None:
        """Log the loaded position `completed` and the samples left for each rank. The log names the caller's line."""
        left = "unknown" if self.size is None else str(-(-(self.size - completed) // self.world))
        show_info_logs()
        line = "Load epoch = %d, completed num = %d, num_samples = %s"
        log.info(line, self.epoch, completed, left, stacklevel=2)


class StepSampler(Position):
    """A position in data that the world consumes in steps, with a fixed number of samples per rank or in total.

    The `__init__` of a subclass calls `_set_steps`.
    """

    def _set_steps(self, batch_size: int | None, global_batch_size: int | None, drop_last: bool) -> None:
        if (batch_size is None) == (global_batch_size is None):
            raise ValueError("give either batch_size or global_batch_size, not both and not neither")
        self._of_a_rank = None if batch_size is None else whole("batch_size", batch_size, least=1)
        self._of_all = None if global_batch_size is None else whole("global_batch_size", global_batch_size, least=1)
        self._drop_last = drop_last

    @property
    def step_size(self) -> int:
        """Samples that the world takes in a full step."""
        return self._of_all or (self._of_a_rank or 0) * self.world

    @property
    def steps_per_epoch(self) -> int:
        """Steps of a whole epoch in this world. Raises TypeError for a stream of unknown length."""
        return self._steps_in_rest(0)

    def __len__(self) -> int:
        """Steps left in this epoch, the same number on every rank."""
        return self._steps_in_rest(self.completed)

    def _steps_in_rest(self, completed: int) -> int:
        if self.size is None:
            raise TypeError("a stream has no length before its end")
        left = self.size - completed
        return left // self.step_size if self._drop_last else -(-left // self.step_size)


class Iteration(Iterator[T]):
    """An iteration over the rest of an epoch, whose position can be saved and restored.

    The iteration runs ahead of the sampler's position by the samples that a loader prefetches. Torchdata's
    `StatefulDataLoader`, which counts them, uses `state_dict` and `load_state_dict` to save the position of the last
    batch that it yielded.
    """

    def __init__(self, position: Position, deal: Callable[[int], Iterator[tuple[int, T]]]) -> None:
        """Begin at `position`.

        `deal(at)` yields the items after the first `at` samples of the epoch, each as a pair: the position after the
        item, and the item.
        """
        self._position = position
        self._deal = deal
        self._at = position.completed
        self._rest = deal(self._at)

    def __next__(self) -> T:
        self._at, dealt = next(self._rest)
        return dealt

    def state_dict(self) -> dict[str, int]:
        """The position: how many samples of the epoch the iterations of all ranks have yielded together."""
        return {"completed": self._at}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go to a saved position. Raises ValueError if there is no such position."""
        at = state.get("completed")
        if type(at) is not int or not self._position.has(at):
            raise ValueError(f"an iteration needs a place `completed` in its data, not {at!r}")
        self._at = at
        self._rest = self._deal(at)
        self._position.announce(at)


class ElasticBatchSampler(StepSampler):
    """The batches of one rank for the rest of an epoch, for use as the `batch_sampler` of a `DataLoader`.

    Iterating does not move the position, so a loader may prefetch as far as it likes. Only `advance` moves it. An
    iteration uses the world, epoch and position of the moment it began: begin a new one after `resize` or
    `load_state_dict`.

    A rank without samples in a step repeats one sample with weight 0. Layers that look across the batch (batch
    normalization) see that sample; gradients do not.
    """

    size: int

    def __init__(
        self,
        size: int,
        *,
        rank: int | None = None,
        world: int | None = None,
        batch_size: int | None = None,
        global_batch_size: int | None = None,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = False,
    ) -> None:
        """Start at the beginning of epoch 0.

        Args:
            size: samples in the data set.
            rank: this process's rank; None: that of the process group, the environment or `Elastic`.
            world: number of processes; None: as with `rank`.
            batch_size: samples of one rank in a step; the global batch grows and shrinks with the world.
            global_batch_size: instead of `batch_size`: samples of the whole world in a step, whatever its size. The
                mathematics of training then do not depend on the world.
            seed: together with the epoch, determines the order.
            shuffle: False keeps the data set's own order.
            drop_last: skip the last step of an epoch if there are too few samples for a whole one.
        """
        self._set_steps(batch_size, global_batch_size, drop_last)
        super().__init__(size, rank=rank, world=world, seed=seed, shuffled_together=size if shuffle else 0)

    def __iter__(self) -> Iteration[list[int]]:
        """Iterate over the indices of this rank's samples: one list for each step, never empty."""
        rank, world, step_size, order = self.rank, self.world, self.step_size, self._order()

        def deal(start: int) -> Iterator[tuple[int, list[int]]]:
            for begin, total in spans(start, self.size, step_size, self._drop_last):
                (own,) = passes(total, rank, world)
                yield begin + total, order(begin + own.first, begin + own.end)

        return Iteration(self, deal)

    def shares(self) -> Iterator[Share]:
        """This rank's share of each step left in the epoch, one for each list of `__iter__`."""
        rank, world = self.rank, self.world
        steps = spans(self.completed, self.size, self.step_size, self._drop_last)
        return (passes(total, rank, world)[0].share for _, total in steps)


class ElasticSampler(Position):
    """The samples of one rank for the rest of an epoch, one by one: the `sampler` of a `DataLoader` with a batch size.

    It replaces torch's `DistributedSampler` where a library makes the batches. Ranks take turns: when every rank has
    taken n samples, the position is n times the number of ranks. Iterating does not move the position. Call `advance`,
    or let torchdata's `StatefulDataLoader` save the position of the samples that it yielded.
    """

    size: int

    def __init__(
        self,
        size: int,
        *,
        rank: int | None = None,
        world: int | None = None,
        seed: int = 0,
        shuffle: bool = True,
        tail: Literal["uneven", "drop", "repeat"] = "uneven",
    ) -> None:
        """Start at the beginning of epoch 0.

        Args:
            size: samples in the data set.
            rank: this process's rank; None: that of the process group or the environment.
            world: number of processes; None: as with `rank`.
            seed: together with the epoch, determines the order.
            shuffle: False keeps the data set's own order.
            tail: what happens to the last samples of an epoch if they are fewer than ranks. "uneven": some ranks have
                one sample more than others, and every sample comes exactly once. "drop": the last samples are left out.
                "repeat": first samples of the epoch come a second time, as in torch's `DistributedSampler`. Ranks that
                take steps together need "drop" or "repeat", or `ElasticLoader`.
        """
        if tail not in ("uneven", "drop", "repeat"):
            raise ValueError(f"tail must be uneven, drop or repeat, not {tail!r}")
        super().__init__(size, rank=rank, world=world, seed=seed, shuffled_together=size if shuffle else 0)
        self._tail = tail

    def __len__(self) -> int:
        """Samples left for this rank."""
        turns, odd = divmod(self.size - self.completed, self.world)
        if self._tail == "uneven":
            return turns + (self.rank < odd)
        return turns + (self._tail == "repeat" and odd > 0)

    def __iter__(self) -> Iteration[int]:
        rank, world, size, order, tail = self.rank, self.world, self.size, self._order(), self._tail

        def deal(start: int) -> Iterator[tuple[int, int]]:
            for begin in range(start, size, world):
                place = begin + rank
                if place >= size:
                    if tail != "repeat":
                        return
                    place %= size
                elif tail == "drop" and begin + world > size:
                    return
                yield min(begin + world, size), order(place, place + 1)[0]

        return Iteration(self, deal)


def _checked(rank: int, world: int) -> tuple[int, int]:
    if not 0 <= rank < world:
        raise ValueError(f"rank {rank} is not in a world of {world}")
    return rank, world


def _place_in_group() -> tuple[int, int] | None:
    dist = sys.modules.get("torch.distributed")  # a process with a group has imported it
    if dist is None or not (dist.is_available() and dist.is_initialized()):
        return None
    return int(dist.get_rank()), int(dist.get_world_size())


def _found_place() -> tuple[int, int]:
    return _place_in_group() or _checked(int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1")))
