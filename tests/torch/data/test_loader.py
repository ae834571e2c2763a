"""The loader's promise: exactly once per epoch, whatever happens to the world and however far ahead was read."""

from __future__ import annotations

import itertools
import math
import os
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import IterableDataset, TensorDataset, get_worker_info

from resile.torch._data.partition import passes
from resile.torch._data.sample_reader import ReadRequest
from resile.torch.elastic import Elastic
from resile.torch.loader import ElasticLoader
from tests.support.paths import ROOT

worlds = st.integers(1, 7)
lives = st.lists(st.tuples(worlds, st.integers(0, 5), st.booleans()), max_size=6)
"""The generations of a job: a world size, the steps it takes, and whether it crashes in the last of them."""


class Numbers:
    """A data set whose samples are their own numbers."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, number: int) -> int:
        return number


class Stream(IterableDataset):
    """The same numbers, to be read from the beginning; a stream that shares itself out among workers, as many do."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.begun_at: list[int] = []

    def __iter__(self) -> Iterator[int]:
        worker = get_worker_info()
        mine, of = (worker.id, worker.num_workers) if worker else (0, 1)
        return iter(range(mine, self.size, of))


class Seekable(Stream):
    def iter_from(self, place: int) -> Iterator[int]:
        self.begun_at.append(place)
        return iter(range(place, self.size))


def a_world(kind: type, size: int, world: int, **words: Any) -> list[ElasticLoader]:
    words.setdefault("shuffle_block", 16)
    return [ElasticLoader(kind(size), rank=rank, world=world, **words) for rank in range(world)]


def take_steps(loaders: list[ElasticLoader], limit: int | None) -> list[list[int]]:
    """The samples of each step that a world takes, until the end of the epoch or `limit`; checks them on the way."""
    world = len(loaders)
    ways = [loader.steps() for loader in loaders]
    taken: list[list[int]] = []
    while limit is None or len(taken) < limit:
        dealt = [next(way, None) for way in ways]
        if None in dealt:
            assert dealt == [None] * world, "some ranks take more steps than others"
            break
        total = dealt[0].total
        assert {step.total for step in dealt} == {total}
        assert len({len(step) for step in dealt}) == 1, "some ranks make more passes than others"
        of_ranks = [sum(share.count for share, _ in step) for step in dealt]
        assert max(of_ranks) - min(of_ranks) <= 1
        assert sum(share.weight / world for step in dealt for share, _ in step) == pytest.approx(1.0)
        for step in dealt:
            counts = [share.count for share, _ in step]
            assert max(counts) - min(counts) <= 1
            assert [share.last for share, _ in step] == [False] * (len(step) - 1) + [True]
            assert all(len(batch) == max(share.count, 1) for share, batch in step)
        taken.append([n for step in dealt for share, batch in step for n in batch[: share.count].tolist()])
        assert len(taken[-1]) == total
        for loader in loaders:
            loader.advance(total)
    return taken


@given(
    kind=st.sampled_from([Numbers, Stream, Seekable]),
    size=st.integers(0, 150),
    batch=st.integers(1, 20),
    kept=st.booleans(),
    largest=st.none() | st.integers(1, 5),
    shuffle=st.booleans(),
    lives=lives,
    last_world=worlds,
)
@settings(deadline=None, max_examples=100)
def test_every_sample_of_every_epoch_counts_once_through_any_resizes_and_crashes(
    kind, size, batch, kept, largest, shuffle, lives, last_world
):
    words = {"global_batch_size" if kept else "batch_size": batch, "micro_batch_size": largest, "shuffle": shuffle}
    state = a_world(kind, size, 1, **words)[0].state_dict()
    for epoch in range(2):
        seen: Counter[int] = Counter()
        for world, limit, torn in [*lives, (last_world, None, False)]:
            loaders = a_world(kind, size, world, **words)
            for loader in loaders:
                loader.load_state_dict(state)
                loader.set_epoch(epoch)
            before = loaders[0].state_dict()
            taken = take_steps(loaders, limit)
            state = {**before, "completed": before["completed"] + sum(map(len, taken))}
            assert all(loader.state_dict() == state for loader in loaders)
            if torn and taken:  # its last step was loaded and is in nobody's model: it comes again
                state["completed"] -= len(taken.pop())
            seen.update(itertools.chain(*taken))
        assert seen == Counter(range(size))


@given(size=st.integers(1, 150), world=worlds, largest=st.none() | st.integers(1, 5), stream=st.booleans())
@settings(deadline=None, max_examples=40)
def test_a_fixed_global_batch_holds_the_same_samples_in_any_world_and_any_number_of_passes(
    size, world, largest, stream
):
    kind = Stream if stream else Numbers
    alone = take_steps(a_world(kind, size, 1, global_batch_size=12), None)
    together = take_steps(a_world(kind, size, world, global_batch_size=12, micro_batch_size=largest), None)
    assert together == alone
    assert {len(step) for step in alone[:-1]} <= {12}


@given(total=st.integers(1, 200), world=worlds, largest=st.integers(1, 9))
@settings(deadline=None)
def test_no_pass_is_larger_than_a_rank_can_hold(total, world, largest):
    for rank in range(world):
        dealt = passes(total, rank, world, largest)
        assert all(each.end - each.first <= largest for each in dealt)
        assert len(dealt) == math.ceil(math.ceil(total / world) / largest)


@pytest.mark.parametrize("kind", [Numbers, Stream])
def test_the_tail_is_dropped_if_that_is_asked_for(kind):
    loaders = a_world(kind, 50, 2, global_batch_size=8, drop_last=True)
    taken = take_steps(loaders, None)
    assert [len(step) for step in taken] == [8] * 6
    assert len(set(itertools.chain(*taken))) == 48


def test_the_order_is_that_of_seed_and_epoch():
    def order(kind: type, seed: int, epoch: int, shuffle: bool = True) -> list[int]:
        loader = ElasticLoader(kind(200), global_batch_size=200, seed=seed, shuffle=shuffle, shuffle_block=50)
        loader.set_epoch(epoch)
        return [n for step in loader for _, batch in step for n in batch.tolist()]

    for kind in (Numbers, Stream):
        assert order(kind, 1, 1) == order(kind, 1, 1)
        assert len({tuple(order(kind, seed, epoch)) for seed, epoch in ((1, 1), (1, 2), (2, 1))}) == 3
        assert order(kind, 1, 1, shuffle=False) == list(range(200))
    assert sorted(order(Stream, 3, 4)[50:100]) == list(range(50, 100)), "a stream is shuffled block by block"


def test_a_stream_that_can_be_entered_anywhere_is_not_read_from_its_beginning():
    (loader,) = a_world(Seekable, 1000, 1, global_batch_size=10)
    loader.advance(500)
    assert len(take_steps([loader], None)) == 50
    assert loader._loader.dataset._dataset.begun_at == [496]


def gradient(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([parameter.grad.reshape(-1).clone() for parameter in model.parameters()])


@pytest.mark.parametrize(("world", "largest"), [(1, 4), (2, None), (3, 5), (5, 2), (7, 1), (16, 3)])
def test_the_gradient_is_that_of_one_process_with_the_same_global_batch(world, largest):
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(59, 6).double(), torch.randn(59, 3).double())
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3)).double()

    def step_gradients(world: int, largest: int | None) -> list[torch.Tensor]:
        words = {"global_batch_size": 22, "micro_batch_size": largest, "world": world}
        ways = [ElasticLoader(data, rank=rank, **words).steps() for rank in range(world)]
        means = []
        for steps in zip(*ways, strict=True):
            of_ranks = []
            for step in steps:
                model.zero_grad()
                for share, (inputs, targets) in step:
                    (torch.nn.functional.mse_loss(model(inputs), targets) * share.weight).backward()
                of_ranks.append(gradient(model))
            means.append(torch.stack(of_ranks).mean(0))
        return means

    alone, together = step_gradients(1, None), step_gradients(world, largest)
    assert len(alone) == len(together) == 3
    for one, other in zip(alone, together, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-12, atol=1e-14)


class Slow(Numbers):
    """Each sample says which process read it."""

    def __getitem__(self, number: int) -> tuple[int, int]:
        time.sleep(0.002)
        return number, os.getpid()


@pytest.mark.parametrize("kind", [Slow, Stream])
def test_what_workers_have_read_ahead_comes_again_after_a_resize_and_the_workers_stay(kind):
    transform = None if kind is Slow else _with_pid
    loader = ElasticLoader(
        kind(90), global_batch_size=6, num_workers=2, prefetch_factor=4, transform=transform, shuffle_block=16
    )
    seen: Counter[int] = Counter()
    readers: set[int] = set()

    def take(world: int, limit: int) -> None:
        """Of all ranks of a world, one after the other; they take the same steps."""
        at = loader.completed
        for rank in range(world):
            loader.load_state_dict({**loader.state_dict(), "completed": at})
            loader.resize(rank, world)
            for step in itertools.islice(loader.steps(), limit):
                for share, (numbers, pids) in step:
                    seen.update(numbers[: share.count].tolist())
                    readers.update(pids.tolist())
                loader.advance(step.total)

    take(2, 4)
    take(3, 5)
    take(1, 100)
    assert seen == Counter(range(90))
    assert len(readers) == 2
    assert os.getpid() not in readers


def _with_pid(number: int) -> tuple[int, int]:
    return number, os.getpid()


def test_what_was_read_for_another_world_is_not_waited_for():
    loader = ElasticLoader(Numbers(10), global_batch_size=2)
    reader = loader._loader.dataset
    next(loader.steps())
    ask = ReadRequest(epoch=0, begin=0, total=2, rank=0, world=1, generation=loader._newest.value)
    assert reader[ask][0] == 2
    loader.resize(1, 2)
    next(loader.steps())
    assert reader[ask] == (0, []), "an old ask costs nothing, so a new iteration begins at once"


def test_a_stream_that_was_asked_for_more_than_it_has_is_entered_again():
    reader = ElasticLoader(Stream(10), global_batch_size=4, shuffle=False)._loader.dataset
    first = ReadRequest(epoch=0, begin=0, total=4, rank=0, world=1, generation=0)
    assert reader[msgspec.structs.replace(first, begin=20)] == (0, [])
    total, (batch,) = reader[msgspec.structs.replace(first, begin=4)]
    assert (total, batch.tolist()) == (4, [4, 5, 6, 7])


@pytest.mark.parametrize("size", [12, 10])
@pytest.mark.parametrize("shuffle", [False, True])
def test_a_stream_is_read_once_an_epoch_however_often_somebody_asks_beyond_its_end(size, shuffle):
    class Counted(Stream):
        opened = 0

        def __iter__(self) -> Iterator[int]:
            self.opened += 1
            return super().__iter__()

    stream = Counted(size)
    reader = ElasticLoader(stream, global_batch_size=4, shuffle=shuffle, shuffle_block=5)._loader.dataset
    ask = ReadRequest(epoch=0, begin=0, total=4, rank=0, world=1, generation=0)
    for epoch in range(2):
        totals = [reader[msgspec.structs.replace(ask, epoch=epoch, begin=begin)][0] for begin in range(0, 32, 4)]
        assert totals == [4, 4, size - 8, 0, 0, 0, 0, 0]
        assert stream.opened == epoch + 1
    after_a_resize = msgspec.structs.replace(ask, epoch=1, begin=size, total=6, world=3)
    assert reader[after_a_resize] == (0, [])
    assert stream.opened == 2


def test_elastic_refuses_a_loader_whose_position_it_does_not_keep():
    model = torch.nn.Linear(1, 1)
    loader, other = (ElasticLoader(Numbers(10), batch_size=1) for _ in range(2))
    elastic = Elastic(model, torch.optim.SGD(model.parameters()), sampler=loader)
    for wrong in (other, [1, 2]):
        with pytest.raises(ValueError, match=r"give it to Elastic|was given a list"):
            next(elastic.epochs(1, wrong))
    elastic.close()


def test_iterating_leaves_the_generator_of_the_script_alone():
    loader = ElasticLoader(Numbers(10), global_batch_size=2)
    before = torch.get_rng_state()
    list(loader)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({}, "either batch_size or global_batch_size"),
        ({"batch_size": 0}, "batch_size: must be a whole number of 1 or more, not 0"),
        ({"batch_size": 1, "micro_batch_size": 0}, "micro_batch_size: must be a whole number of 1 or more"),
        ({"batch_size": 1, "shuffle_block": 0}, "shuffle_block: must be a whole number of 1 or more"),
        ({"batch_size": 1, "batch_sampler": []}, "batch_sampler of DataLoader is not for ElasticLoader"),
    ],
)
def test_impossible_arguments_are_refused(wrong, sentence):
    with pytest.raises(ValueError, match=sentence):
        ElasticLoader(Numbers(10), **wrong)


def test_a_state_of_another_order_is_refused():
    state = ElasticLoader(Stream(10), batch_size=1, shuffle_block=5).state_dict()
    with pytest.raises(ValueError, match="its shuffled is 5, here it is 6"):
        ElasticLoader(Stream(10), batch_size=1, shuffle_block=6).load_state_dict(state)
    with pytest.raises(ValueError, match="its size is -1, here it is 10"):
        ElasticLoader(Numbers(10), batch_size=1).load_state_dict(state)


def test_a_stream_has_no_length_and_the_rest_of_other_data_has():
    with pytest.raises(TypeError, match="no length"):
        len(ElasticLoader(Stream(10), batch_size=2))
    loader = ElasticLoader(Numbers(10), batch_size=2, rank=0, world=2)
    loader.advance(4)
    assert (len(loader), loader.steps_per_epoch) == (2, 3)


def test_restoring_says_what_was_restored(caplog):
    loader = ElasticLoader(Numbers(60000), rank=1, world=6, batch_size=64)
    with caplog.at_level("INFO"):
        loader.load_state_dict({"epoch": 0, "completed": 51200, "size": 60000, "seed": 0})
    assert caplog.messages == ["Load epoch = 0, completed num = 51200, num_samples = 1467"]
    assert caplog.records[0].funcName == "load_state_dict"


def test_steps_are_dealt_to_the_place_that_the_environment_names(monkeypatch):
    loader = ElasticLoader(Numbers(8), global_batch_size=4, shuffle=False)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert [batch.tolist() for step in loader for _, batch in step] == [[2, 3], [6, 7]]


def test_the_script_of_the_page_about_data_runs(tmp_path):
    page = (ROOT / "docs" / "training.md").read_text()
    script = tmp_path / "page.py"
    script.write_text("\n".join(re.findall(r"^```python\n(.*?)^```", page, re.S | re.M)))
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
