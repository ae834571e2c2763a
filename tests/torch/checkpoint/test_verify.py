"""A checkpoint in memory is compared with its checksums by whoever has time, each byte once."""

from __future__ import annotations

import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import pytest
import torch

from resile.checkpoint.buffer import Buffer, places
from resile.checkpoint.errors import NotReadable
from resile.torch._checkpoint import parallel_copy
from resile.torch._checkpoint.flatten import flatten
from resile.torch._checkpoint.memory_parts import Verification
from resile.torch._checkpoint.packing import Damaged, PackedState
from resile.torch._checkpoint.parallel_copy import copying_threads
from resile.torch._checkpoint.rank_layout import Saver, lay_out
from resile.torch._checkpoint.restore import Memory, Restore
from resile.torch._loop.collectives import Collectives
from resile.torch._support.numpy_values import sums_of_rows

PATIENCE = 30.0


def state_of(value: int) -> dict[str, torch.Tensor]:
    return {"values": torch.full((3_000_000,), value, dtype=torch.int64)}


@pytest.fixture
def buffer() -> Buffer:
    buffer = Buffer.make("test")
    write(buffer, 1)
    return buffer


def write(buffer: Buffer, step: int) -> None:
    leaves = flatten(state_of(step))
    layout = lay_out(leaves, Saver(0, 1, True, "1.0.1"))
    text = msgspec.json.encode(layout)
    buffer.resize(places(len(text), layout.length)[2])
    packing = PackedState(buffer.map(), buffer.begin(text, layout.length)[1], layout)
    packing.write_frames()
    packing.fill(leaves)
    buffer.seal(buffer.commit(step, step, text, layout.length), packing.sums())


def checking_of(buffer: Buffer) -> Verification:
    record = buffer.record()
    assert record is not None
    return Verification(buffer, record)


def checked_ahead(buffer: Buffer) -> Verification:
    checking = checking_of(buffer)
    with ThreadPoolExecutor(1) as background:
        checking.begin(background)
    return checking


def flip(buffer: Buffer, part: float) -> None:
    record = buffer.record()
    assert record is not None
    buffer.map()[record.data_at + int(record.length * part)] ^= 0x10


@pytest.mark.parametrize("part", [0.01, 0.5, 0.999])
@pytest.mark.parametrize("threads", [1, 3])
def test_a_flipped_bit_anywhere_is_found_by_whoever_comes_to_it(buffer: Buffer, part: float, threads: int) -> None:
    flip(buffer, part)
    with ThreadPoolExecutor(1) as background:
        checking = checking_of(buffer)
        checking.begin(background)
        with pytest.raises(Damaged, match=r"the checksum of bytes \d+ to \d+ is wrong, in values"):
            checking.finish(threads)


def test_what_another_thread_found_before_is_told_by_who_finishes(buffer: Buffer) -> None:
    flip(buffer, 0.1)
    with ThreadPoolExecutor(1) as background:
        checking = checking_of(buffer)
        checking.begin(background)
    with pytest.raises(Damaged):
        checking.finish(1)


def test_who_finishes_does_not_wait_for_a_thread_that_has_not_begun(buffer: Buffer) -> None:
    begins = threading.Event()
    with ThreadPoolExecutor(1) as background:
        background.submit(begins.wait, PATIENCE)
        checking = checking_of(buffer)
        checking.begin(background)
        checking.finish(1)
        assert not begins.is_set()
        begins.set()


def test_what_was_checked_ahead_is_not_checked_again(buffer: Buffer, monkeypatch: pytest.MonkeyPatch) -> None:
    checking = checked_ahead(buffer)
    monkeypatch.setattr(PackedState, "checks", lambda *_: pytest.fail("checked again"))
    state = state_of(0)
    assert Restore(Collectives(), Memory([buffer], [buffer], (), {buffer: checking}), None).run(state) == 1
    assert torch.equal(state["values"], state_of(1)["values"])


def test_what_was_written_since_it_was_checked_is_checked_again(buffer: Buffer) -> None:
    checking = checked_ahead(buffer)
    write(buffer, 2)
    flip(buffer, 0.5)
    state = state_of(0)
    assert Restore(Collectives(), Memory([buffer], [buffer], (), {buffer: checking}), None).run(state) is None
    assert torch.equal(state["values"], state_of(0)["values"])


class Away:
    """A storage that does not answer when it is asked for the first time, and is empty then."""

    def __init__(self) -> None:
        self.asked = 0

    def steps(self) -> list[int]:
        self.asked += 1
        if self.asked == 1:
            raise NotReadable("it is away")
        return []


class Hasty(Collectives):
    """Waits for nothing."""

    def pause(self, seconds: float) -> None:
        pass


@pytest.mark.parametrize("ahead", [False, True])
def test_damage_that_was_found_once_is_found_again(buffer: Buffer, ahead: bool) -> None:
    flip(buffer, 0.5)
    storage: Any = Away()
    begins = threading.Event()
    with ThreadPoolExecutor(1) as background:
        if not ahead:
            background.submit(begins.wait, PATIENCE)
        checking = checking_of(buffer)
        checking.begin(background)
        if ahead:
            background.shutdown()
        state = state_of(0)
        memory = Memory([buffer], [buffer], (), {buffer: checking})
        assert Restore(Hasty(), memory, storage).run(state) is None
        begins.set()
    assert storage.asked == 2, "the first time it was tried again"
    assert torch.equal(state["values"], state_of(0)["values"])


def test_sums_wrap_around_and_are_the_same_without_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = torch.tensor([[2**63 - 1, 1, 5], [-(2**63), -1, 0], [1, 2, 3]])
    with_numpy = sums_of_rows(rows)
    monkeypatch.setitem(sys.modules, "numpy", None)
    assert sums_of_rows(rows) == with_numpy == [-(2**63) + 5, 2**63 - 1, 6]


@pytest.mark.parametrize(("running", "here", "threads"), [(1, 1, 4), (3, 3, 4), (2, 1, 3), (9, 1, 1), (5, 4, 3)])
def test_only_what_others_run_keeps_a_copy_from_a_core(
    monkeypatch: pytest.MonkeyPatch, running: int, here: int, threads: int
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(4)))
    monkeypatch.setattr(parallel_copy, "_running", lambda: running)
    monkeypatch.setattr(parallel_copy, "_running_here", lambda: here)
    assert copying_threads(1 << 30) == threads
    assert copying_threads(1) == 1


def test_this_thread_is_seen_to_run() -> None:
    assert parallel_copy._running_here() >= 1
