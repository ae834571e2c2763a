"""Deals the samples of an epoch to a world whose size may change at any step, each sample exactly once.

The position in an epoch is counted in samples that the whole world has consumed, not in batches of one rank, so it
means the same to any number of ranks: after a resize the rest of the epoch is dealt again from there. Nothing is
padded and nothing is dropped. What this asks in return is that the last step of an epoch (and every step, if the global
batch does not divide by the world) may give ranks different numbers of samples, so the loss must be scaled:

    sampler = ElasticBatchSampler(len(dataset), batch_size=32, rank=rank, world=world)
    loader = DataLoader(dataset, batch_sampler=sampler)
    for epoch in range(sampler.epoch, epochs):
        sampler.set_epoch(epoch)
        for share, (inputs, labels) in zip(sampler.shares(), loader, strict=True):
            loss = criterion(model(inputs), labels)  # the mean over this rank's samples
            (loss * share.weight).backward()         # DDP's average is now the mean over the global batch
            optimizer.step()
            sampler.advance(share.total)             # belongs to the step: save state_dict() with the model

The guarantee, held by `tests/torch/test_sampler.py`: with a state that is saved and restored together with the model,
through any sequence of resizes, every sample of an epoch enters the model exactly once, all ranks take the same
number of steps, and the gradient of a step is the mean over the samples of that step.

This module does not import torch: a `DataLoader` takes any iterable of index lists as its `batch_sampler`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping

import msgspec

from resile.api.permutation import ShuffledOrder

log = logging.getLogger(__name__)


class Share(msgspec.Struct, frozen=True):
    """What one rank has of one step."""

    count: int
    """Samples of this rank that count. With 0 the rank is given one sample to repeat, so that it takes part in the
    collectives of the step; it counts for nothing because `weight` is 0."""
    total: int
    """Samples of the whole world in this step: what to `advance` by once the step is done."""
    weight: float
    """count * world / total: multiply the mean loss of this rank by it, and DDP's average over the ranks becomes the
    mean over all samples of the step. 1.0 wherever all ranks have the same number of samples."""


class ElasticBatchSampler:
    """The batches of one rank for the rest of an epoch; use it as the `batch_sampler` of a `DataLoader`.

    Iterating does not move the position, so a loader may prefetch as far as it likes; only `advance` moves it. An
    iteration deals for the world, epoch and position of the moment it began: begin a new one after `resize` or
    `load_state_dict`.

    A rank without samples in a step repeats one sample with weight 0. Layers that look across the batch (batch
    normalization) see that sample; gradients do not.
    """

    def __init__(
        self,
        size: int,
        *,
        rank: int = 0,
        world: int = 1,
        batch_size: int | None = None,
        global_batch_size: int | None = None,
        seed: int = 0,
        shuffle: bool = True,
    ) -> None:
        """Start at the beginning of epoch 0.

        Args:
            size: Samples in the data set.
            rank: This process's place in the world; `Elastic` sets it.
            world: Number of processes; `Elastic` sets it.
            batch_size: Samples of one rank in a step; the global batch grows and shrinks with the world.
            global_batch_size: Instead of `batch_size`: samples of the whole world in a step, whatever its size. The
                mathematics of training then do not depend on the world.
            seed: Together with the epoch, fixes the order.
            shuffle: False keeps the data set's own order.
        """
        given = [each for each in (batch_size, global_batch_size) if each is not None]
        if len(given) != 1:
            raise ValueError("give either batch_size or global_batch_size, not both and not neither")
        if size < 0 or given[0] < 1:
            raise ValueError(f"size must be at least 0 and the batch at least 1, not {size} and {given[0]}")
        self.size = size
        self.epoch = 0
        self.completed = 0
        """Samples of this epoch that the world has consumed."""
        self._batch_size = batch_size
        self._global_batch_size = global_batch_size
        self._seed = seed
        self._shuffle = shuffle
        self.resize(rank, world)

    def resize(self, rank: int, world: int) -> None:
        """Take place `rank` in a world of `world`; the rest of the epoch is dealt anew."""
        if not 0 <= rank < world:
            raise ValueError(f"rank {rank} is not in a world of {world}")
        self.rank = rank
        self.world = world

    @property
    def step_size(self) -> int:
        """Samples that the world takes in a full step."""
        return self._global_batch_size or (self._batch_size or 0) * self.world

    @property
    def steps_per_epoch(self) -> int:
        """Steps of a whole epoch in this world."""
        return -(-self.size // self.step_size)

    def __len__(self) -> int:
        """Steps left in this epoch: the same number on every rank."""
        return -(-(self.size - self.completed) // self.step_size)

    def __iter__(self) -> Iterator[list[int]]:
        """The samples of this rank, one list per step, never empty."""
        return self._batches(self.completed, self.rank, self.world, self.step_size, self.epoch)

    def shares(self) -> Iterator[Share]:
        """How much this rank has of each step, in step with `__iter__`; costs no look at the samples."""
        return self._shares(self.completed, self.rank, self.world, self.step_size)

    def set_epoch(self, epoch: int) -> None:
        """Begin `epoch`; a no-op for the epoch this sampler is in, so the position restored from a checkpoint stays."""
        if epoch != self.epoch:
            self.epoch = epoch
            self.completed = 0

    def advance(self, samples: int) -> None:
        """Count `samples` of the whole world as consumed. Call it once the step's update is in the model."""
        if not 0 <= samples <= self.size - self.completed:
            raise ValueError(f"cannot advance by {samples} samples: {self.completed} of {self.size} are completed")
        self.completed += samples

    def state_dict(self) -> dict[str, int]:
        """The position: plain numbers, the same on every rank, meaningful to any world."""
        return {"epoch": self.epoch, "completed": self.completed, "size": self.size, "seed": self._seed}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go to a saved position.

        Raises:
            ValueError: The state is not a position in this data set and order; this sampler has not moved.
        """
        for field in ("epoch", "completed", "size", "seed"):
            if type(state.get(field)) is not int:
                raise ValueError(f"a sampler state needs a whole number `{field}`, not {state.get(field)!r}")
        for field, here in (("size", self.size), ("seed", self._seed)):
            if state[field] != here:
                raise ValueError(
                    f"the sampler state is of other data: its {field} is {state[field]}, here it is {here}"
                )
        if state["epoch"] < 0 or not 0 <= state["completed"] <= self.size:
            raise ValueError(
                f"the sampler state is at sample {state['completed']} of {self.size}, epoch {state['epoch']}"
            )
        self.epoch = state["epoch"]
        self.completed = state["completed"]
        left_per_rank = -(-(self.size - self.completed) // self.world)
        log.info("Load epoch = %d, completed num = %d, num_samples = %d", self.epoch, self.completed, left_per_rank)

    def _shares(self, start: int, rank: int, world: int, step_size: int) -> Iterator[Share]:
        for begin in range(start, self.size, step_size):
            total = min(step_size, self.size - begin)
            first, end = _part(total, rank, world)
            yield Share(count=end - first, total=total, weight=(end - first) * world / total)

    def _batches(self, start: int, rank: int, world: int, step_size: int, epoch: int) -> Iterator[list[int]]:
        order = ShuffledOrder(self.size, self._seed, epoch) if self._shuffle else None
        for begin in range(start, self.size, step_size):
            first, end = _part(min(step_size, self.size - begin), rank, world)
            if first == end:  # nothing left for this rank: the step's first sample, with weight 0
                first, end = 0, 1
            yield order.between(begin + first, begin + end) if order else list(range(begin + first, begin + end))


def _part(total: int, rank: int, world: int) -> tuple[int, int]:
    """Where the part of `rank` begins and ends when `total` samples are split as evenly as possible."""
    return total * rank // world, total * (rank + 1) // world
