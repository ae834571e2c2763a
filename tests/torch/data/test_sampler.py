"""The sampler's promise: exactly once per epoch, whatever happens to the world."""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from resile.common.permutation import ShuffledOrder
from resile.torch._data.shuffle import EpochOrder
from resile.torch.sampler import ElasticBatchSampler, ElasticSampler
from tests.torch.ranks import found_by

worlds = st.integers(1, 9)
sizes = st.integers(0, 300)
batch_sizes = st.integers(1, 20)
lives = st.lists(st.tuples(worlds, st.integers(0, 6)), max_size=8)
"""The generations of a job: a world size and the steps it takes before it is interrupted."""


def a_world(size: int, world: int, *, fixed_global: bool, batch: int) -> list[ElasticBatchSampler]:
    kind = "global_batch_size" if fixed_global else "batch_size"
    return [ElasticBatchSampler(size, rank=rank, world=world, **{kind: batch}) for rank in range(world)]


def take_steps(samplers: list[ElasticBatchSampler], limit: int | None, seen: Counter[int]) -> None:
    """Let a world go on until the end of the epoch or `limit` steps, checking every step on the way."""
    world = len(samplers)
    assert len({len(sampler) for sampler in samplers}) == 1
    steps_left = len(samplers[0])
    ways = [zip(sampler, sampler.shares(), strict=True) for sampler in samplers]
    steps = 0
    while limit is None or steps < limit:
        dealt = [next(way, None) for way in ways]
        if None in dealt:
            assert dealt == [None] * world, "some ranks take more steps than others"
            break
        total = dealt[0][1].total
        assert sum(share.count for _, share in dealt) == total
        assert sum(share.weight / world for _, share in dealt) == pytest.approx(1.0)
        counts = [share.count for _, share in dealt]
        assert max(counts) - min(counts) <= 1
        for sampler, (indices, share) in zip(samplers, dealt, strict=True):
            assert share.total == total
            assert share.weight == share.count * world / total
            assert len(indices) == max(share.count, 1)
            seen.update(indices[: share.count])
            sampler.advance(share.total)
        steps += 1
    assert steps == (steps_left if limit is None else min(limit, steps_left))


@given(size=sizes, batch=batch_sizes, fixed_global=st.booleans(), lives=lives, last_world=worlds)
@settings(deadline=None, max_examples=200)
def test_every_sample_of_an_epoch_counts_exactly_once_through_any_resizes(size, batch, fixed_global, lives, last_world):
    state = None
    seen: Counter[int] = Counter()
    for world, limit in [*lives, (last_world, None)]:
        samplers = a_world(size, world, fixed_global=fixed_global, batch=batch)
        for sampler in samplers:
            if state:
                sampler.load_state_dict(state)
        take_steps(samplers, limit, seen)
        states = [sampler.state_dict() for sampler in samplers]
        assert all(each == states[0] for each in states)
        state = states[0]
    assert seen == Counter(range(size))


@given(size=sizes, batch=batch_sizes, lives=lives)
@settings(deadline=None, max_examples=50)
def test_epochs_end_and_begin_across_resizes(size, batch, lives):
    state = {"epoch": 0, "completed": 0, "size": size, "seed": 0}
    for epoch in range(3):
        seen: Counter[int] = Counter()
        for world, limit in [*lives, (2, None)]:
            samplers = a_world(size, world, fixed_global=False, batch=batch)
            for sampler in samplers:
                sampler.load_state_dict(state)
                sampler.set_epoch(epoch)
            take_steps(samplers, limit, seen)
            state = samplers[0].state_dict()
        assert seen == Counter(range(size))


@given(size=st.integers(1, 200), batch=batch_sizes, before=worlds, after=worlds, steps=st.integers(0, 5))
@settings(deadline=None, max_examples=50)
def test_resizing_a_living_sampler_is_the_same_as_restoring_a_new_one(size, batch, before, after, steps):
    samplers = a_world(size, before, fixed_global=False, batch=batch)
    take_steps(samplers, steps, Counter())
    survivor = samplers[0]
    survivor.resize(after - 1, after)
    restored = ElasticBatchSampler(size, rank=after - 1, world=after, batch_size=batch)
    restored.load_state_dict(samplers[0].state_dict())
    assert list(survivor) == list(restored)
    assert list(survivor.shares()) == list(restored.shares())


@given(size=st.integers(1, 200), world=worlds)
@settings(deadline=None)
def test_with_a_fixed_global_batch_a_step_holds_the_same_samples_in_any_world(size, world):
    alone = list(ElasticBatchSampler(size, rank=0, world=1, global_batch_size=12))
    together = a_world(size, world, fixed_global=True, batch=12)
    for step, whole in enumerate(alone):
        parts = [list(sampler)[step][: list(sampler.shares())[step].count] for sampler in together]
        assert [index for part in parts for index in part] == whole


def test_a_rank_without_samples_takes_part_with_weight_zero():
    sampler = ElasticBatchSampler(9, rank=0, world=4, batch_size=2, shuffle=False)
    assert list(sampler) == [[0, 1], [8]]
    assert [share.weight for share in sampler.shares()] == [1.0, 0.0]
    sampler.resize(3, 4)
    assert list(sampler) == [[6, 7], [8]]
    assert [share.weight for share in sampler.shares()] == [1.0, 4.0]


def test_prefetching_does_not_move_the_position():
    sampler = ElasticBatchSampler(100, rank=0, world=2, batch_size=10)
    list(sampler)
    assert sampler.state_dict()["completed"] == 0
    assert len(sampler) == 5


def test_an_iteration_is_not_disturbed_by_advancing_before_its_first_batch():
    sampler = ElasticBatchSampler(100, rank=0, world=1, batch_size=10, shuffle=False)
    batches, shares = iter(sampler), sampler.shares()
    sampler.advance(50)
    assert next(batches)[0] == 0
    assert len([*shares]) == 10


@given(size=st.integers(0, 3000), seed=st.integers(), epoch=st.integers(0, 1000))
@settings(deadline=None, max_examples=60)
def test_the_shuffled_order_is_a_permutation(size, seed, epoch):
    assert sorted(ShuffledOrder(size, seed, epoch).between(0, size)) == list(range(size))


def test_the_order_differs_from_epoch_to_epoch_and_never_between_releases():
    first, second = (ShuffledOrder(1000, 0, epoch).between(0, 1000) for epoch in (0, 1))
    assert sum(one == other for one, other in zip(first, second, strict=True)) < 10
    assert first[:6] == FIRST_OF_1000


FIRST_OF_1000 = [540, 620, 550, 622, 929, 258]
"""A restart under another release must go on in the same order, so the order is part of the format."""


def test_the_order_is_well_mixed():
    """Over many seeds each sample comes to each place about equally often (chi-square)."""
    size, orders = 100, 4000
    times = [[0] * size for _ in range(size)]
    for seed in range(orders):
        for place, sample in enumerate(ShuffledOrder(size, seed, 0).between(0, size)):
            times[place][sample] += 1
    expected = orders / size
    chi_square = sum((count - expected) ** 2 / expected for row in times for count in row)
    freedom = (size - 1) ** 2
    assert abs(chi_square - freedom) < 5 * (2 * freedom) ** 0.5


def test_a_hundred_million_samples_start_at_once():
    sampler = ElasticBatchSampler(10**8, rank=3, world=1000, batch_size=32)
    sampler.load_state_dict({"epoch": 7, "completed": 5 * 10**7, "size": 10**8, "seed": 0})
    assert len(next(iter(sampler))) == 32


def test_restoring_says_what_was_restored(caplog):
    sampler = ElasticBatchSampler(60000, rank=1, world=6, batch_size=64)
    with caplog.at_level("INFO"):
        sampler.load_state_dict({"epoch": 0, "completed": 51200, "size": 60000, "seed": 0})
    assert caplog.messages == ["Load epoch = 0, completed num = 51200, num_samples = 1467"]


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"size": 99}, "its size is 99, here it is 100"),
        ({"seed": 5}, "its seed is 5, here it is 0"),
        ({"completed": 101}, "at sample 101 of 100"),
        ({"epoch": -1}, "epoch -1"),
        ({"epoch": "0"}, "whole number `epoch`"),
    ],
)
def test_a_state_that_does_not_fit_is_refused_and_nothing_moves(change, sentence):
    sampler = ElasticBatchSampler(100, rank=0, world=1, batch_size=1)
    before = sampler.state_dict()
    with pytest.raises(ValueError, match=sentence):
        sampler.load_state_dict({**before, "completed": 40, **change})
    assert sampler.state_dict() == before


@pytest.mark.parametrize(
    "wrong",
    [
        {"batch_size": 1, "global_batch_size": 1},
        {},
        {"batch_size": 0},
        {"batch_size": 1, "rank": 2},
        {"batch_size": 1, "size": -1},
    ],
)
def test_impossible_arguments_are_refused(wrong):
    arguments = {"size": 10, "rank": 0, "world": 2, **wrong}
    with pytest.raises(ValueError, match=r"must|give|not in a world"):
        ElasticBatchSampler(arguments.pop("size"), **arguments)


def test_advancing_past_the_end_is_refused():
    sampler = ElasticBatchSampler(10, rank=0, world=1, batch_size=4)
    sampler.advance(8)
    with pytest.raises(ValueError, match="cannot advance by 4"):
        sampler.advance(4)


def test_importing_the_package_does_not_import_torch():
    check = "import sys, resile.torch; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0


@given(size=sizes, lives=lives, last_world=worlds)
@settings(deadline=None, max_examples=50)
def test_samples_that_are_dealt_one_by_one_count_exactly_once_too(size, lives, last_world):
    state = None
    seen: Counter[int] = Counter()
    for world, limit in [*lives, (last_world, None)]:
        samplers = [ElasticSampler(size, rank=rank, world=world) for rank in range(world)]
        for sampler in samplers:
            if state:
                sampler.load_state_dict(state)
        turns = max(map(len, samplers)) if limit is None else min(limit, min(map(len, samplers)))
        for sampler in samplers:
            dealt = list(sampler)
            assert len(dealt) == len(sampler)
            seen.update(dealt[:turns])
        samplers[0].advance(min(turns * world, size - samplers[0].completed))
        state = samplers[0].state_dict()
    assert seen == Counter(range(size))


@pytest.mark.parametrize(("tail", "dealt"), [("uneven", [3, 3, 2, 2]), ("drop", [2] * 4), ("repeat", [3] * 4)])
def test_ranks_that_step_together_get_equally_many_samples_if_they_ask_for_it(tail, dealt):
    samplers = [ElasticSampler(10, rank=rank, world=4, tail=tail) for rank in range(4)]
    assert [len(list(sampler)) for sampler in samplers] == [len(sampler) for sampler in samplers] == dealt
    assert len({sample for sampler in samplers for sample in sampler}) == (8 if tail == "drop" else 10)
    with pytest.raises(ValueError, match="tail must be"):
        ElasticSampler(10, tail="cut")


def test_the_last_step_is_left_out_if_that_is_asked_for():
    sampler = ElasticBatchSampler(10, rank=0, world=2, batch_size=2, drop_last=True, shuffle=False)
    assert list(sampler) == [[0, 1], [4, 5]]
    assert len(sampler) == len([*sampler.shares()]) == sampler.steps_per_epoch == 2


@pytest.mark.parametrize("size", [1, 2, 3, 5, 100, 1000, 4097, 100_000, 2**40 + 1])
def test_many_places_at_once_are_those_that_python_finds_one_by_one(size: int) -> None:
    for seed in range(5):
        for start, stop in [(0, min(size, 300)), (size // 3, min(size, size // 3 + 50)), (max(0, size - 40), size)]:
            expected = [ShuffledOrder(size, seed, 7).at(place) for place in range(start, stop)]
            assert EpochOrder(size, seed, 7).between(start, stop) == expected


def test_an_order_whose_keys_carry_is_the_same_too() -> None:
    plain, fast = ShuffledOrder(1000, 0, 0), EpochOrder(1000, 0, 0)
    plain.keys = fast.keys = [((1 << 64) - 1, (1 << 64) - 5)] * 4
    assert fast.between(0, 1000) == plain.between(0, 1000)


def test_without_numpy_the_order_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = EpochOrder(1000, 3, 1).between(0, 1000)
    monkeypatch.setitem(sys.modules, "numpy", None)
    assert EpochOrder(1000, 3, 1).between(0, 1000) == expected


def test_the_place_is_that_of_the_environment_whenever_it_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    batches, samples = ElasticBatchSampler(8, batch_size=2, shuffle=False), ElasticSampler(8, shuffle=False)
    assert (len(batches), len(samples)) == (4, 8), "alone"
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert (len(batches), len(samples)) == (2, 4)
    assert list(batches) == [[2, 3], [6, 7]]
    assert [share.total for share in batches.shares()] == [4, 4]
    assert list(samples) == [1, 3, 5, 7]
    assert list(pickle.loads(pickle.dumps(samples))) == [1, 3, 5, 7]
    samples.resize(0, 4)  # as `Elastic` does
    assert list(samples) == [0, 4]
    monkeypatch.setenv("RANK", "2")
    with pytest.raises(ValueError, match="rank 2 is not in a world of 2"):
        len(batches)


@pytest.mark.parametrize("half", [{"rank": 0}, {"world": 2}])
def test_half_a_place_is_refused(half: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="give both rank and world, or neither"):
        ElasticSampler(10, **half)


def dealt_in_a_group(rank: int) -> list[Any]:
    from torch.utils.data import DataLoader

    samplers: list[Any] = [ElasticSampler(10, tail="drop"), ElasticBatchSampler(10, batch_size=2)]
    loaders = [
        DataLoader(range(10), sampler=samplers[0], batch_size=2),
        DataLoader(range(10), batch_sampler=samplers[1]),
    ]
    elsewhere = pickle.dumps(samplers[0])
    return [*([batch.tolist() for batch in loader] for loader in loaders), list(samplers[0]), elsewhere]


def test_ranks_of_a_group_share_the_samples_without_being_told_their_places(tmp_path: Path) -> None:
    both = found_by(dealt_in_a_group, 2, tmp_path)
    for way in (0, 1):
        assert sorted(sample for found in both for batch in found[way] for sample in batch) == list(range(10))
    for found in both:
        assert list(pickle.loads(found[3])) == found[2], "in a process that has no group"
