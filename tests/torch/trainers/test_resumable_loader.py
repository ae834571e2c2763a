"""A loader that begins in the middle of a pass gives exactly what was left of that pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torch.utils.data.distributed import DistributedSampler

from resile.torch._trainers.resumable_loader import ResumableLoader


class Numbers(Dataset[int]):
    """Knows what was asked for."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    def __len__(self) -> int:
        return 26

    def __getitem__(self, index: int) -> int:
        self.asked.append(index)
        return index


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(26))


class Backwards(DataLoader[int]):
    """A loader with an idea of its own of what a pass is."""

    def __iter__(self) -> Any:
        return iter(list(super().__iter__())[::-1])


LOADERS: dict[str, Callable[[], Any]] = {
    "in order": lambda: DataLoader(Numbers(), batch_size=4),
    "shuffled": lambda: DataLoader(Numbers(), batch_size=4, shuffle=True),
    "shuffled, with workers": lambda: DataLoader(Numbers(), batch_size=4, shuffle=True, num_workers=1),
    "shuffled, with workers that stay": lambda: DataLoader(
        Numbers(), batch_size=4, shuffle=True, num_workers=1, persistent_workers=True
    ),
    "a generator of its own": lambda: DataLoader(
        Numbers(), batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(torch.initial_seed() % 100)
    ),
    "one of two ranks": lambda: DataLoader(
        Numbers(), batch_size=4, sampler=DistributedSampler(Numbers(), num_replicas=2, rank=1)
    ),
    "without batches": lambda: DataLoader(Numbers(), batch_size=None, shuffle=True),
    "a stream": lambda: DataLoader(Stream(), batch_size=4),
    "a loader of one's own": lambda: Backwards(Numbers(), batch_size=4, shuffle=True),
    "no loader at all": lambda: [torch.tensor(number) for number in range(5)],
}


def values(batches: Any) -> list[Any]:
    return [batch.tolist() if isinstance(batch, torch.Tensor) else batch for batch in batches]


@pytest.mark.parametrize("passes", [0, 1])
@pytest.mark.parametrize("used", [0, 3])
@pytest.mark.parametrize("kind", LOADERS)
def test_the_rest_of_a_pass_and_the_next_one_are_the_same(kind: str, used: int, passes: int) -> None:
    torch.manual_seed(1)
    first = ResumableLoader(LOADERS[kind]())
    for _ in range(passes):
        values(first)
    batches = iter(first)
    given = values(next(batches) for _ in range(used + 1))
    state = first.state_dict(unused=1)
    rest = given[-1:] + values(batches)
    after = torch.get_rng_state()
    whole = values(first)
    assert state["batches"] == used

    torch.manual_seed(2)
    second = ResumableLoader(LOADERS[kind]())
    second.load_state_dict(state)
    assert values(second) == rest
    torch.set_rng_state(after)
    assert values(second) == whole


def test_what_was_used_already_is_not_loaded_again() -> None:
    loader = ResumableLoader(DataLoader(Numbers(), batch_size=4))
    loader.load_state_dict({"batches": 4, "random": {"torch": torch.get_rng_state(), "workers_stay": False}})
    assert values(loader)[0] == [16, 17, 18, 19]
    assert loader.dataset.asked == list(range(16, 26))


def test_batches_that_were_given_but_not_used_come_again() -> None:
    loader = ResumableLoader(DataLoader(Numbers(), batch_size=4))
    batches = iter(loader)
    for _ in range(5):
        next(batches)
    assert loader.state_dict(unused=2)["batches"] == 3
    assert loader.state_dict(unused=9)["batches"] == 0


def test_the_sampler_may_be_told_the_epoch_after_iter() -> None:
    loader = ResumableLoader(LOADERS["one of two ranks"]())
    batches = iter(loader)
    loader.sampler.set_epoch(3)
    again = ResumableLoader(LOADERS["one of two ranks"]())
    again.sampler.set_epoch(3)
    assert values(batches) == values(again)


def test_in_all_else_it_is_the_loader() -> None:
    inner = DataLoader(Numbers(), batch_size=4)
    loader = ResumableLoader(inner)
    loader.worker_init_fn = print
    assert inner.worker_init_fn is print
    assert len(loader) == 7
    assert loader.dataset is inner.dataset
    assert not hasattr(loader, "nonsense")
    with pytest.raises(TypeError):
        len(ResumableLoader(DataLoader(Stream(), batch_size=4)))
