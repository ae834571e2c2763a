"""torchdata's protocol with the real library: it can hold our samplers, and our loader can stand in for its own."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset
from torchdata.stateful_dataloader import Stateful, StatefulDataLoader

from resile.torch import ElasticBatchSampler, ElasticLoader, ElasticSampler

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")  # torchdata 0.11 calls it

DATA = TensorDataset(torch.arange(94))


def with_batch_sampler(rank: int, world: int, workers: int) -> StatefulDataLoader:
    sampler = ElasticBatchSampler(len(DATA), rank=rank, world=world, global_batch_size=12, seed=3)
    sampler.set_epoch(1)
    return StatefulDataLoader(DATA, batch_sampler=sampler, num_workers=workers)


def with_sampler(rank: int, world: int, workers: int) -> StatefulDataLoader:
    sampler = ElasticSampler(len(DATA), rank=rank, world=world, seed=3)
    sampler.set_epoch(1)
    return StatefulDataLoader(DATA, batch_size=12 // world, sampler=sampler, num_workers=workers)


def by_itself(rank: int, world: int, workers: int) -> ElasticLoader:
    loader = ElasticLoader(DATA, rank=rank, world=world, global_batch_size=12, seed=3, num_workers=workers)
    loader.set_epoch(1)
    return loader


def numbers(given: Any) -> list[int]:
    """The samples of one batch, or of one step."""
    if isinstance(given, list):
        return given[0].tolist()
    return [number for share, (batch,) in given for number in batch[: share.count].tolist()]


@pytest.mark.parametrize("make", [with_batch_sampler, with_sampler, by_itself])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_world_of_two_is_saved_in_mid_epoch_and_a_world_of_three_goes_on(
    make: Callable[[int, int, int], Any], workers: int
):
    seen: Counter[int] = Counter()
    states = []
    for rank in range(2):
        loader = make(rank, 2, workers)
        assert isinstance(loader, Stateful)
        for given in itertools.islice(loader, 3):
            seen.update(numbers(given))
        states.append(loader.state_dict())
    assert seen.total() == 36
    for rank in range(3):
        loader = make(rank, 3, workers)
        loader.load_state_dict(states[rank % 2])  # whoever saved it
        for given in loader:
            seen.update(numbers(given))
    assert seen == Counter(range(94))


def test_an_epoch_after_the_restored_one_is_whole():
    loader = with_batch_sampler(0, 1, 0)
    list(itertools.islice(loader, 3))
    restored = with_batch_sampler(0, 1, 0)
    restored.load_state_dict(loader.state_dict())
    assert sum(len(numbers(given)) for given in restored) == 94 - 36
    restored.batch_sampler.set_epoch(2)
    assert sum(len(numbers(given)) for given in restored) == 94


def test_a_place_that_is_none_is_refused():
    batches = iter(ElasticBatchSampler(10, batch_size=2))
    for wrong in ({}, {"completed": 11}, {"completed": "3"}):
        with pytest.raises(ValueError, match="needs a place `completed`"):
            batches.load_state_dict(wrong)
