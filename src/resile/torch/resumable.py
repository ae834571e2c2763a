"""A data loader that can begin in the middle of a pass, at the very sample that would have come next.

The order of a pass follows from the random numbers with which it began, and from what the sampler was told about the
epoch. So those numbers and a count of batches are all that has to be saved. Batches that were used already are skipped
by their indices, without loading them, where the loader is torch's own.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset


class ResumableLoader:
    """Wraps a loader; in all else it is that loader.

    A pass begins when its first batch is asked for, not when `iter` is called, so that a sampler can be told the epoch
    in between.
    """

    __slots__ = ("_batches", "_began_with", "_loader", "_resume")

    def __init__(self, loader: Any) -> None:
        object.__setattr__(self, "_loader", loader)
        self._batches = 0
        """Batches that this pass has given, those before a restart included."""
        self._began_with: dict[str, Any] = {}
        self._resume: tuple[int, dict[str, Any]] | None = None

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
        skip, random = resume or (0, {})
        if random:
            torch.set_rng_state(random["torch"])
            if "generator" in random:
                self._loader.generator.set_state(random["generator"])
        self._began_with, self._batches = self._random(), skip
        for batch in _from(self._loader, skip) if skip else self._loader:
            self._batches += 1
            yield batch

    @property
    def batches(self) -> int:
        """How many batches this pass has given."""
        return self._batches

    def state_dict(self, unused: int = 0) -> dict[str, Any]:
        """Where it stands; the last `unused` batches count as not given."""
        return {"batches": max(self._batches - unused, 0), "random": self._began_with}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Let the next pass begin there."""
        self._resume = (state["batches"], state["random"])

    def _random(self) -> dict[str, Any]:
        generator = getattr(self._loader, "generator", None)
        return {"torch": torch.get_rng_state()} | ({"generator": generator.get_state()} if generator else {})


class _From:
    """The batches of a sampler without the first ones."""

    def __init__(self, sampler: Iterable[Any], skip: int) -> None:
        self._sampler, self._skip = sampler, skip

    def __iter__(self) -> Iterator[Any]:
        return itertools.islice(iter(self._sampler), self._skip, None)


def _from(loader: Any, skip: int) -> Iterable[Any]:
    """The rest of a pass."""
    plain = isinstance(loader, DataLoader) and type(loader).__iter__ is DataLoader.__iter__
    if not plain or loader.batch_sampler is None or isinstance(loader.dataset, IterableDataset):
        return itertools.islice(iter(loader), skip, None)
    rest: Iterable[Any] = DataLoader(
        loader.dataset,
        batch_sampler=_From(loader.batch_sampler, skip),
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
        generator=loader.generator,
        prefetch_factor=loader.prefetch_factor,
    )
    return rest
