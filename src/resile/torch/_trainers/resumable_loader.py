"""A data loader that can begin in the middle of an epoch, at the exact sample that would have come next.

The order of an epoch follows from the random numbers with which it began and from the number given to the sampler's
`set_epoch`. So these random numbers and a count of batches are all that has to be saved. If the loader is torch's own,
batches that were used already are skipped by their indices, without loading them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset


class ResumableLoader:
    """Wraps a data loader so that an epoch can begin in its middle. Behaves like that loader otherwise.

    An epoch begins when its first batch is requested, not when `iter` is called, so that the caller can call the
    sampler's `set_epoch` in between.
    """

    __slots__ = ("_began_with", "_loader", "_resume", "_workers_stay", "batches")

    def __init__(self, loader: Any) -> None:
        object.__setattr__(self, "_loader", loader)
        self.batches = 0
        """Batches that this epoch has yielded, including those before a restart."""
        self._began_with: dict[str, Any] = {}
        """The states of the random number generators when this epoch began."""
        self._resume: tuple[int, dict[str, Any]] | None = None
        """The values of the two attributes above for the next epoch; None if it begins at its first batch."""
        self._workers_stay = False
        """True if the worker processes of an earlier epoch are still there."""

    def __getattr__(self, name: str) -> Any:
        return getattr(object.__getattribute__(self, "_loader"), name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ResumableLoader.__slots__:
            object.__setattr__(self, name, value)
        else:
            setattr(self._loader, name, value)

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        resume, self._resume = self._resume, None
        self.batches, self._began_with = resume or (0, self._random() | {"workers_stay": self._workers_stay})
        batches = iter(self._loader) if resume is None else self._rest()
        self._workers_stay = bool(getattr(self._loader, "persistent_workers", False))
        for batch in batches:
            self.batches += 1
            yield batch

    def state_dict(self, unused: int = 0) -> dict[str, Any]:
        """The position in the epoch, as if the last `unused` batches had not been yielded."""
        return {"batches": max(self.batches - unused, 0), "random": self._began_with}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._resume = (state["batches"], state["random"])

    def _rest(self) -> Iterator[Any]:
        """Return an iterator over the batches that are left of the interrupted epoch, in the same order as before.

        For that, the random number generators are first set to the states that they had when the epoch began.
        """
        self._set_random(self._began_with)
        loader = self._loader
        plain = isinstance(loader, DataLoader) and type(loader).__iter__ is DataLoader.__iter__
        if not plain or loader.batch_sampler is None or isinstance(loader.dataset, IterableDataset):
            return itertools.islice(iter(loader), self.batches, None)
        if not self._began_with["workers_stay"]:  # the loader drew a number for its workers first
            torch.empty((), dtype=torch.int64).random_(generator=loader.generator)
        indices = iter(loader.batch_sampler)
        first = list(itertools.islice(indices, self.batches, self.batches + 1))  # draws the order
        random = self._random()
        if loader.persistent_workers:
            iter(loader)  # starts workers for the next pass, as before the restart
        rest = DataLoader(
            loader.dataset,
            batch_sampler=itertools.chain(first, indices),
            num_workers=loader.num_workers,
            collate_fn=loader.collate_fn,
            pin_memory=loader.pin_memory,
            timeout=loader.timeout,
            worker_init_fn=loader.worker_init_fn,
            multiprocessing_context=loader.multiprocessing_context,
            generator=loader.generator,
            prefetch_factor=loader.prefetch_factor,
        )
        batches: Iterator[Any] = iter(rest)
        self._set_random(random)
        return batches

    def _random(self) -> dict[str, Any]:
        generator = getattr(self._loader, "generator", None)
        return {"torch": torch.get_rng_state()} | ({"generator": generator.get_state()} if generator else {})

    def _set_random(self, random: dict[str, Any]) -> None:
        torch.set_rng_state(random["torch"])
        if "generator" in random:
            self._loader.generator.set_state(random["generator"])
