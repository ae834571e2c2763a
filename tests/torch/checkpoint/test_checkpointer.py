"""Checkpoints in memory and in storage: what is restored is what was saved, whole, or it is not restored."""

from __future__ import annotations

import logging
import os
import pickle
import random
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from resile.agent.workers.ports import free_port
from resile.api.ids import Round
from resile.checkpoint.buffer import Buffer, places
from resile.checkpoint.errors import NeverReadable, NotReadable, NotWritable
from resile.checkpoint.memory_client import copied_within
from resile.checkpoint.memory_limits import LIMIT
from resile.checkpoint.storage import Storage
from resile.protocol.reports import ReplicaEndpoint
from resile.torch import Checkpointer, ElasticBatchSampler
from resile.torch._checkpoint import restore
from resile.torch._checkpoint.dcp_reader import read_metadata
from resile.torch._checkpoint.flatten import StateMismatch, flatten
from resile.torch._checkpoint.packing import PackedState
from resile.torch._checkpoint.rank_layout import Saver, lay_out
from resile.torch._checkpoint.restore import Memory, Restore
from resile.torch._loop import loop_checkpoints
from resile.torch._loop.collectives import Collectives
from resile.torch._loop.group import Group, GroupLost
from resile.torch._loop.loop_checkpoints import LoopCheckpoints
from resile.torch.checkpointer import COPY_PATIENCE
from tests.torch.checkpoint.checkpoint_servers import (
    PATIENCE,
    VaultThread,
    is_uniform,
    save_for_ever,
    spawning,
    uniform,
    vault_thread,
)
from tests.torch.ranks import placed

Open = Callable[..., Checkpointer]


@pytest.fixture
def opened() -> Iterator[Open]:
    """Makes checkpointers, and closes them at the end."""
    made: list[Checkpointer] = []

    def make(*words: Any, **more: Any) -> Checkpointer:
        made.append(Checkpointer(*words, **more))
        return made[-1]

    yield make
    for checkpointer in made:
        checkpointer.close()


@pytest.fixture
def vault() -> Iterator[VaultThread]:
    with vault_thread() as thread:
        yield thread


def model_and_optimizer(seed: int, steps: int) -> tuple[Any, Any]:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(40, 30), torch.nn.BatchNorm1d(30), torch.nn.Linear(30, 2))
    optimizer = torch.optim.AdamW([{"params": model[0].parameters(), "lr": 0.01}, {"params": model[1:].parameters()}])
    train(model, optimizer, steps)
    return model, optimizer


def train(model: Any, optimizer: Any, steps: int) -> None:
    for _ in range(steps):
        model(torch.randn(8, 40)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def full_state(seed: int, steps: int) -> dict[str, Any]:
    model, optimizer = model_and_optimizer(seed, steps)
    sampler = ElasticBatchSampler(1000, rank=0, world=1, batch_size=10)
    sampler.advance(10 * steps)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
    return {
        "model": model,
        "optimizer": optimizer,
        "scheduler": scheduler,
        "sampler": sampler,
        "epoch": steps,
        "user": {"rng": torch.get_rng_state(), 5: ("a", None), "list": [{"t": torch.arange(3)}, 2.5], "empty": {}},
    }


def same(left: Any, right: Any) -> bool:
    if isinstance(left, torch.Tensor):
        return left.dtype == right.dtype and torch.equal(left, right)
    if hasattr(left, "state_dict"):
        return same(left.state_dict(), right.state_dict())
    if isinstance(left, dict):
        return set(left) == set(right) and all(same(left[key], right[key]) for key in left)
    if isinstance(left, list):
        return len(left) == len(right) and all(map(same, left, right))
    return type(left) is type(right) and left == right


def test_a_state_dict_in_place_of_its_object_is_warned_of_once(
    opened: Open, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    checkpointer = opened(tmp_path)
    for step in (1, 2):
        checkpointer.save(step, {"model": model, "optimizer": optimizer.state_dict(), "rest": {"state": 1}}, store=True)
        checkpointer.wait()
    warned = [record.getMessage() for record in caplog.records if "state_dict()" in record.getMessage()]
    assert [words.partition(",")[0] for words in warned] == ["state: 'optimizer' is a state_dict()"]


def test_one_commit_brings_model_optimizer_sampler_and_values_back_from_memory(
    opened: Open, vault: VaultThread
) -> None:
    saved, other = full_state(0, 3), full_state(1, 0)
    checkpointer = opened()
    assert checkpointer.restore(other) is None
    assert checkpointer.save(3, saved)
    checkpointer.close()
    assert opened().restore(other) == 3
    for name in saved:
        assert same(saved[name], other[name]), name
    train(saved["model"], saved["optimizer"], 1)
    assert not same(saved["model"], other["model"]), "what was restored is a copy, not the memory itself"


def test_storage_brings_it_back_without_an_agent_and_dcp_reads_it_without_resile(opened: Open, tmp_path: Path) -> None:
    saved, other = full_state(0, 3), full_state(1, 0)
    checkpointer = opened(tmp_path, store_every=3)
    assert not checkpointer.in_memory
    assert not checkpointer.save(2, saved), "it is not due, and there is nowhere else to keep it"
    assert checkpointer.save(3, saved)
    checkpointer.wait(PATIENCE)
    assert opened(tmp_path).restore(other) == 3
    for name in saved:
        assert same(saved[name], other[name]), name
    model, optimizer = model_and_optimizer(2, 1)
    torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)  # which adds to the optimizer's groups
    plain = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer), "epoch": 0}
    with pytest.warns(UserWarning, match="single process"):  # that there is no process group
        dcp.load(plain, checkpoint_id=tmp_path / "step-3")
    assert plain["epoch"] == 3
    assert same(plain["model"], saved["model"].state_dict())
    assert same(plain["optimizer"], get_optimizer_state_dict(saved["model"], saved["optimizer"]))


def test_what_plain_dcp_saved_can_be_restored(opened: Open, tmp_path: Path) -> None:
    model, optimizer = model_and_optimizer(0, 2)
    state = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer), "epoch": 7}
    with pytest.warns(UserWarning, match="single process"):
        dcp.save(state, checkpoint_id=tmp_path / "step-40")
    other, its_optimizer = model_and_optimizer(1, 0)
    restored = {"model": other, "optimizer": its_optimizer, "epoch": 0}
    assert opened(tmp_path).restore(restored) == 40
    assert same(model, other)
    assert same(optimizer, its_optimizer)
    assert restored["epoch"] == 7


def test_the_newest_of_memory_and_storage_wins(opened: Open, vault: VaultThread, tmp_path: Path) -> None:
    checkpointer = opened(tmp_path)
    checkpointer.save(4, uniform(4, 100), store=True)
    checkpointer.wait(PATIENCE)
    for step in (5, 6):
        checkpointer.save(step, uniform(step, 100))
    state = uniform(0, 100)
    assert opened(tmp_path).restore(state) == 6
    assert is_uniform(state, 6)
    for buffer in vault.vault._buffers[0]:
        buffer.void()
    assert opened(tmp_path).restore(state) == 4
    assert is_uniform(state, 4)


def test_a_flipped_bit_in_memory_is_found_named_and_passed_over(
    opened: Open, vault: VaultThread, caplog: pytest.LogCaptureFixture
) -> None:
    checkpointer = opened()
    for step in (1, 2):
        checkpointer.save(step, uniform(step, 100_000))
    checkpointer.close()  # sealed
    newest = max(vault.vault._buffers[0], key=lambda buffer: buffer.record().step)
    record = newest.record()
    item = next(item for item in newest.layout(record).items if item.key == "tensors.t5")
    newest.map()[record.data_at + item.data + 123_456] ^= 0x10
    state = uniform(0, 100_000)
    with caplog.at_level(logging.WARNING, "resile"):
        assert opened().restore(state) == 1
    assert is_uniform(state, 1)
    (words,) = [each.message for each in caplog.records]
    assert words.startswith("step 2 in memory is not used: the checksum of bytes ")
    assert "tensors.t5" in words


def test_a_flipped_bit_in_a_copy_of_another_nodes_part_is_found_named_and_passed_over(
    caplog: pytest.LogCaptureFixture,
) -> None:
    copies = [_copy_of(step) for step in (1, 2)]
    record = copies[1].record()
    assert record is not None
    copies[1].map()[record.data_at + record.length // 2] ^= 0x10
    state = uniform(0, 100_000)
    with caplog.at_level(logging.WARNING, "resile"):
        assert Restore(Collectives(), Memory([], [], copies, {}), None).run(state) == 1
    assert is_uniform(state, 1)
    assert "step 2 in memory is not used: the checksum of bytes " in caplog.text


def _copy_of(step: int) -> Buffer:
    leaves = flatten(uniform(step, 100_000))
    layout = msgspec.structs.replace(lay_out(leaves, Saver(0, 1, True, "1.0.1")), replicated=False)
    text = msgspec.json.encode(layout)
    buffer = Buffer.make("test")
    buffer.resize(places(len(text), layout.length)[2])
    image = PackedState(buffer.map(), buffer.begin(text, layout.length)[1], layout)
    image.write_frames()
    image.fill(leaves)
    buffer.seal(buffer.commit(step, step, text, layout.length), image.sums())
    return buffer


@pytest.mark.parametrize("damage", ["flip", "truncate", "part", "place", "remove", "metadata", "bit", "hole", "code"])
def test_damaged_storage_is_found_named_set_aside_and_passed_over(
    opened: Open, tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    checkpointer = opened(tmp_path, store_every=1)
    for step in (1, 2):
        checkpointer.save(step, uniform(step, 100_000))
        checkpointer.wait(PATIENCE)
    data, part, metadata = (tmp_path / "step-2" / name for name in ("__0_0.distcp", "__0.resile.json", ".metadata"))
    why = {
        "flip": "__0_0.distcp: the checksum of bytes",
        "truncate": "__0_0.distcp has 1000 bytes instead of",
        "part": "__0.resile.json is not what was written",
        "place": "__0.resile.json is not what was written: its checksum is wrong",
        "remove": "__0_0.distcp is not there",
        "metadata": ".metadata is not what was written",
        "bit": ".metadata is not what was written",
        "hole": "it does not hold all of tensors.t1",
        "code": "posix.mkdir does not belong in a checkpoint's metadata",
    }[damage]
    match damage:
        case "flip":
            content = bytearray(data.read_bytes())
            content[len(content) // 2] ^= 1
            data.write_bytes(content)
        case "truncate":
            os.truncate(data, 1000)
        case "part":
            part.write_bytes(part.read_bytes()[:-20])
        case "place":
            part.write_bytes(part.read_bytes().replace(b'"key":"tensors.t1"', b'"key":"tensors.t2"'))
        case "bit":
            content = bytearray(metadata.read_bytes())
            content[len(content) // 2] ^= 1
            metadata.write_bytes(content)
        case "remove":
            data.unlink()
        case "metadata":
            metadata.write_bytes(metadata.read_bytes()[:-20])
        case "hole":
            contents = read_metadata(Storage(tmp_path), 2)
            contents.state_dict_metadata["tensors.t1"].chunks.clear()
            part.unlink()  # what this writes itself is compared with its checksum
            metadata.write_bytes(pickle.dumps(contents))
        case "code":
            part.unlink()  # as if plain DCP had written it: ours would be found out before anything is unpickled
            metadata.write_bytes(pickle.dumps(_Mischief(str(tmp_path / "done"))))
    state = uniform(0, 100_000)
    with caplog.at_level(logging.WARNING):
        assert opened(tmp_path).restore(state) == 1
    assert is_uniform(state, 1)
    assert f"step 2 in {tmp_path} is not used: " in caplog.text
    assert why in caplog.text
    assert f"step 2 in {tmp_path} was set aside as damaged-step-2\n" in caplog.text
    assert "begins anew" not in caplog.text
    assert not (tmp_path / "done").exists()
    assert sorted(os.listdir(tmp_path)) == ["damaged-step-2", "step-1"]


@pytest.mark.parametrize(
    ("tried", "sentence"), [(3, "no sound step is left in"), (2, "no sound one is among the newest 2 of")]
)
def test_a_storage_without_any_sound_step_is_told_of_and_training_begins_anew(
    opened: Open,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    tried: int,
    sentence: str,
) -> None:
    monkeypatch.setattr(restore, "STORED_STEPS", tried)
    assert opened(tmp_path).restore(uniform(0, 10)) is None
    assert "anew" not in caplog.text, "a first run has nothing to tell of"
    checkpointer = opened(tmp_path, store_every=1)
    for step in (1, 2):
        checkpointer.save(step, uniform(step, 10))
        checkpointer.wait(PATIENCE)
        (tmp_path / f"step-{step}" / "__0_0.distcp").write_bytes(b"")
    with caplog.at_level(logging.WARNING, "resile"):
        assert opened(tmp_path).restore(state := uniform(0, 10)) is None
    assert is_uniform(state, 0)
    assert caplog.messages[-1] == f"{sentence} {tmp_path}: training begins anew"
    assert sorted(os.listdir(tmp_path)) == ["damaged-step-1", "damaged-step-2"]


def test_of_many_tensors_in_damaged_bytes_a_few_are_named_and_the_others_counted(
    opened: Open, vault: VaultThread, caplog: pytest.LogCaptureFixture
) -> None:
    checkpointer = opened()
    checkpointer.save(1, {f"t{number}": torch.zeros(1) for number in range(5)})
    checkpointer.close()
    (kept,) = [buffer for buffer in vault.vault._buffers[0] if buffer.record() is not None]
    kept.map()[kept.record().data_at] ^= 1
    with caplog.at_level(logging.WARNING, "resile"):
        assert opened().restore({f"t{number}": torch.zeros(1) for number in range(5)}) is None
    assert re.search(r"is wrong, in t0, t1, t2 and 2 more$", caplog.messages[0]), caplog.messages


@pytest.mark.parametrize("what", ["step-2/__0_0.distcp", "step-2/__0.resile.json", "step-2/.metadata", "."])
def test_what_cannot_be_read_is_left_as_it_is_and_training_does_not_begin_anew(
    opened: Open, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    monkeypatch.setattr(restore, "PAUSES", (0.01,))
    directory = tmp_path / "storage"
    checkpointer = opened(directory, store_every=1)
    for step in (1, 2):
        checkpointer.save(step, uniform(step, 100_000))
        checkpointer.wait(PATIENCE)
    unreadable, away = directory / what, tmp_path / "away"
    unreadable.rename(away)
    unreadable.symlink_to(unreadable if what == "." else "/proc/self/mem")  # ELOOP; EIO
    state = uniform(0, 100_000)
    with caplog.at_level(logging.WARNING), pytest.raises(NotReadable, match="storage cannot be read"):
        opened(directory).restore(state)
    assert is_uniform(state, 0)
    assert "cannot be read: " in caplog.text
    unreadable.unlink()
    away.rename(unreadable)
    assert sorted(os.listdir(directory)) == ["step-1", "step-2"]
    assert opened(directory).restore(state) == 2


def test_storage_that_cannot_be_read_does_not_keep_memory_from_bringing_a_step_back(
    opened: Open, vault: VaultThread, tmp_path: Path
) -> None:
    directory = tmp_path / "storage"
    saved = opened(directory)
    saved.save(7, uniform(7, 1000))
    directory.rmdir()
    directory.symlink_to(directory)
    state = uniform(0, 1000)
    again = opened(directory, store_every=1)
    assert again.restore(state) == 7
    assert is_uniform(state, 7)
    assert again.save(8, uniform(8, 1000)), "who goes on from memory goes on in it"


NOWHERE = "/proc/resile/checkpoints"
"""Takes nothing, and is read as empty: as a read-only file system for its first run."""


@pytest.fixture
def no_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wait is a failure: what does not heal is not waited for."""

    def never(ranks: Collectives, seconds: float) -> None:
        raise AssertionError(f"{seconds:g} s are waited for what does not heal")

    monkeypatch.setattr(Collectives, "pause", never)


@pytest.mark.usefixtures("no_wait")
def test_a_training_does_not_begin_whose_steps_can_never_be_stored(opened: Open) -> None:
    why = f"checkpoints cannot be stored in {NOWHERE}: No such file or directory"
    with pytest.raises(NotWritable, match=f"^{why}$"):
        opened(NOWHERE, store_every=1).restore(uniform(0, 10))
    with vault_thread(), pytest.raises(NotWritable, match=f"^{why}$"):
        opened(NOWHERE).save(1, uniform(1, 10))
    with pytest.raises(NotWritable, match=f"^{why}$"):
        LoopCheckpoints(kept := opened(NOWHERE), every=1).restore(uniform(0, 10))
    kept.close()
    assert opened(NOWHERE).restore(uniform(0, 10)) is None, "who only reads need not write"


@pytest.mark.usefixtures("no_wait")
@pytest.mark.parametrize("scheme", ["", "file://"])
@pytest.mark.parametrize("place", ["file", "file/below"])
def test_a_storage_that_is_a_file_is_one_sentence_at_once(
    opened: Open, tmp_path: Path, scheme: str, place: str
) -> None:
    (tmp_path / "file").touch()
    for store_every in (1,) if (scheme, place) == ("file://", "file") else (0, 1):  # fsspec lists a file as one in it
        with pytest.raises((NeverReadable, NotWritable), match=f"{tmp_path / place}.*: (Not a|it is no) directory$"):
            opened(f"{scheme}{tmp_path / place}", store_every=store_every).restore(uniform(0, 10))


def test_who_joins_a_training_that_goes_on_does_not_end_it_for_want_of_storage(opened: Open, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with vault_thread():
        joined = opened(tmp_path / "file", store_every=1)
        checkpoints = LoopCheckpoints(joined, every=1)
        checkpoints.enter(uniform(7, 10))
        checkpoints.save(8, uniform(8, 10))
        checkpoints.wait_stored()
        for _ in range(2):
            with pytest.raises(OSError, match=f"checkpoints cannot be stored in {tmp_path / 'file'}: Not a directory"):
                joined.wait(PATIENCE)
        assert opened(tmp_path / "file").restore(state := uniform(0, 10)) == 8
        assert is_uniform(state, 8)


@pytest.mark.usefixtures("no_wait")
def test_who_goes_on_from_memory_is_not_ended_by_its_first_save(opened: Open, tmp_path: Path) -> None:
    with vault_thread():
        opened(tmp_path / "place").save(1, uniform(1, 10))
        (tmp_path / "place").rmdir()
        (tmp_path / "place").touch()
        successor = opened(tmp_path / "place")
        assert successor.restore(uniform(0, 10)) == 1
        assert successor.save(2, uniform(2, 10), store=True)
        with pytest.raises(OSError, match="Not a directory"):
            successor.wait(PATIENCE)


def test_who_waits_with_the_last_step_for_a_storage_that_is_behind_hears_that_the_round_is_over(
    opened: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop_checkpoints, "PAUSES", (20.0,))
    held = opened(tmp_path)
    checkpoints = LoopCheckpoints(held, every=1)
    checkpoints.enter(uniform(4, 10))
    for step in (5, 6):
        checkpoints.save(step, uniform(step, 10), store=True)
        held.wait(PATIENCE)
    assert held._memory is not None
    for buffer in held._memory.buffers:
        buffer.want(1)
    group = Group(placed(0, 1, port=1), "gloo", 20.0)
    held.collectives.group = group
    threading.Timer(0.2, group.abort).start()
    begun = time.monotonic()
    with pytest.raises(GroupLost):
        checkpoints.finish(7, uniform(7, 10))
    assert time.monotonic() - begun < 10.0


def test_what_was_due_while_storage_was_busy_follows_though_storage_refused_the_one_before(
    opened: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, refuses, store = threading.Event(), threading.Event(), Storage.store

    def refuse_once(*words: Any) -> bool:
        if asked.is_set():
            return store(*words)
        asked.set()
        refuses.wait(PATIENCE)
        raise NotWritable("it is full")

    monkeypatch.setattr(Storage, "store", refuse_once)
    with vault_thread():
        checkpointer = opened(tmp_path)
        checkpointer.save(1, uniform(1, 10), store=True)
        assert asked.wait(PATIENCE)
        checkpointer.save(2, uniform(2, 10), store=True)
        refuses.set()
        checkpointer.wait(PATIENCE)
    assert Storage(tmp_path).steps() == [2]


@pytest.mark.parametrize("damage", ["remove", "truncate"])
def test_damage_of_what_plain_dcp_saved_is_found_too(opened: Open, tmp_path: Path, damage: str) -> None:
    for step in (2, 3):
        with pytest.warns(UserWarning, match="single process"):
            dcp.save({"a": torch.ones(5)}, checkpoint_id=tmp_path / f"step-{step}")
    (data,) = (tmp_path / "step-3").glob("*.distcp")
    data.unlink() if damage == "remove" else os.truncate(data, 10)
    assert opened(tmp_path).restore({"a": torch.zeros(5)}) == 2
    assert sorted(os.listdir(tmp_path)) == ["damaged-step-3", "step-2"]


def test_a_copy_that_the_agent_never_answers_for_does_not_stop_saves_for_ever(
    opened: Open, vault: VaultThread, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    over = threading.Event()
    monkeypatch.setattr(vault.vault.replica_client, "copy", lambda *_: str(over.wait(PATIENCE)))
    vault.do(lambda: vault.vault.enter(Round(1), ReplicaEndpoint(address="127.0.0.1", port=1)))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        shard = distribute_tensor(torch.ones(10), init_device_mesh("cpu", (1,)), [Shard(0)])
        checkpointer = opened()
        assert checkpointer.save(1, {"shard": shard})
        assert not checkpointer.save(2, {"shard": shard}), "the copy of the first is under way"
        passed = time.monotonic() + copied_within(0, 1) + 1
        monkeypatch.setattr(time, "monotonic", lambda: passed)
        assert checkpointer.save(3, {"shard": shard})
        assert "not copied to other nodes any more: the agent does not say" in caplog.text
    finally:
        monkeypatch.undo()
        over.set()
        dist.destroy_process_group()


class _Mischief:
    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (self.path,)


def test_metadata_says_the_same_as_dcps_own(opened: Open, tmp_path: Path) -> None:
    model, optimizer = model_and_optimizer(0, 1)
    checkpointer = opened(tmp_path / "ours")
    checkpointer.save(1, {"model": model, "optimizer": optimizer}, store=True)
    checkpointer.wait(PATIENCE)
    state = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}
    with pytest.warns(UserWarning, match="single process"):
        dcp.save(state, checkpoint_id=tmp_path / "dcp" / "step-1")
    ours, theirs = read_metadata(Storage(tmp_path / "ours"), 1), read_metadata(Storage(tmp_path / "dcp"), 1)
    assert ours.state_dict_metadata == theirs.state_dict_metadata
    assert ours.planner_data == theirs.planner_data
    assert ours.storage_data.keys() == theirs.storage_data.keys()
    with (tmp_path / "ours" / "step-1" / ".metadata").open("rb") as file:
        assert pickle.load(file) == ours, "and an ordinary unpickler reads it too"


def test_an_overlapped_save_holds_the_state_of_its_moment(opened: Open, vault: VaultThread) -> None:
    model, optimizer = model_and_optimizer(0, 2)
    state = {"model": model, "optimizer": optimizer}
    checkpointer = opened()
    checkpointer.guard(optimizer)
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    moments = optimizer.state[model[0].weight]["exp_avg"].clone()
    assert checkpointer.save(2, state, overlap=True)
    train(model, optimizer, 1)  # changes running averages in forward, parameters in the guarded step
    checkpointer.close()
    other, its_optimizer = model_and_optimizer(1, 0)
    assert opened().restore({"model": other, "optimizer": its_optimizer}) == 2
    assert same(other.state_dict(), expected)
    assert torch.equal(its_optimizer.state[other[0].weight]["exp_avg"], moments)


def test_a_checkpointer_whose_last_copy_failed_is_closed_all_the_same(
    opened: Open, vault: VaultThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = model_and_optimizer(0, 2)
    checkpointer = opened()
    assert checkpointer.save(1, {"model": model, "optimizer": optimizer})
    fill = PackedState.fill

    def fail_behind(packed: PackedState, leaves: Any, *threads: Any) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise MemoryError("no room to copy")
        fill(packed, leaves, *threads)

    monkeypatch.setattr(PackedState, "fill", fail_behind)
    assert checkpointer.save(2, {"model": model, "optimizer": optimizer}, overlap=True)
    with pytest.raises(MemoryError, match="no room to copy"):
        checkpointer.close()
    assert checkpointer._memory.buffers == []
    assert checkpointer._writer.sealer._shutdown
    checkpointer.close()


def test_no_replica_is_awaited_of_a_save_that_was_not_committed(
    opened: Open, vault: VaultThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, _ = model_and_optimizer(0, 0)
    leaves = flatten({"model": model})
    layout = msgspec.structs.replace(
        lay_out(leaves, Saver(0, 1, True, "a"), directory="", keep_last=0, keep_every=0), replicated=False
    )
    checkpointer = opened()
    group = checkpointer._save_group
    group.meet()
    group.partnered, group.sequence = True, group.sequence + 1
    checkpointer._layout = (layout, msgspec.json.encode(layout))
    monkeypatch.setattr("resile.torch.checkpointer.still_fits", lambda *_: True)
    may_copy, fill = threading.Event(), PackedState.fill

    def fail_behind(packed: PackedState, leaves: Any, *threads: Any) -> None:
        if threading.current_thread() is not threading.main_thread():
            may_copy.wait(PATIENCE)
            raise MemoryError("no room to copy")
        fill(packed, leaves, *threads)

    with monkeypatch.context() as patch:
        patch.setattr(PackedState, "fill", fail_behind)
        assert checkpointer._save(1, leaves, None, False, True)
        assert group._sent == 0, "it is still being copied"
        may_copy.set()
        with pytest.raises(MemoryError):
            checkpointer.before_update()
    assert group._sent == 0
    assert checkpointer._save(2, leaves, None, False, True)
    checkpointer.before_update()
    assert group._sent == group.sequence


def test_without_room_in_memory_one_sentence_is_said_and_storage_is_used(
    opened: Open, vault: VaultThread, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(LIMIT, "64Mi")
    size = 3_000_000  # eight such tensors are 92 MiB
    checkpointer = opened(tmp_path, store_every=2)
    with caplog.at_level(logging.WARNING):
        assert checkpointer.restore(uniform(0, size)) is None
        said = caplog.text
        assert not checkpointer.save(1, uniform(1, size))
        assert checkpointer.save(2, uniform(2, size))
    assert "checkpoints go to storage alone" in said, "at start, not at the first save"
    assert f"{LIMIT} allows 64 MiB" in said
    assert len(caplog.records) == 1
    state = uniform(0, size)
    assert opened(tmp_path).restore(state) == 2
    assert is_uniform(state, 2)


def test_values_that_outgrow_their_place_are_laid_out_anew(opened: Open, vault: VaultThread) -> None:
    checkpointer = opened()
    for step, length in ((1, 10), (2, 10), (3, 5000), (4, 5000)):
        assert checkpointer.save(step, {"words": "x" * length, "t": torch.full((10,), float(step))})
    state: dict[str, Any] = {"words": "", "t": torch.zeros(10)}
    assert opened().restore(state) == 4
    assert state["words"] == "x" * 5000
    assert float(state["t"].sum()) == 40.0


def test_a_save_that_is_laid_out_anew_and_finds_no_room_leaves_nothing_to_wait_for(
    opened: Open, vault: VaultThread, tmp_path: Path
) -> None:
    checkpointer = opened(tmp_path)
    assert checkpointer.save(1, {"words": "x"})
    assert checkpointer._memory is not None
    checkpointer._memory.make_room = lambda size: (
        "" if size <= checkpointer._memory.buffers[0].size else "there is none"
    )  # type: ignore[union-attr,method-assign]
    assert checkpointer.save(2, {"words": "x" * 50_000}, store=True), "the file itself is filled"
    checkpointer.wait(0.5)
    assert Storage(tmp_path).steps() == [2]


def test_a_checkpoint_of_another_model_is_one_sentence(opened: Open, vault: VaultThread) -> None:
    opened().save(1, {"model": torch.nn.Linear(4, 3)})
    with pytest.raises(StateMismatch, match=r"model.weight has the shape \(3, 4\) in the checkpoint and \(5, 4\) here"):
        opened().restore({"model": torch.nn.Linear(4, 5)})
    with pytest.raises(StateMismatch, match="the checkpoint has no 'epoch'"):
        opened().restore({"model": torch.nn.Linear(4, 3), "epoch": 1})


def test_a_rank_whose_node_keeps_everything_elsewhere_has_an_empty_part() -> None:
    leaves = flatten({"model": torch.nn.Linear(3, 3)})
    layout = lay_out(leaves, Saver(rank=1, world=2, leads=False, attempt="a"))
    assert (layout.length, layout.items) == (0, ())
    image = PackedState(bytearray(10), 5, layout)
    image.write_frames()
    image.fill(leaves)
    image.check(image.sums())


def test_what_is_on_its_way_to_storage_is_not_overwritten_and_saving_goes_on(
    opened: Open, vault: VaultThread, tmp_path: Path
) -> None:
    checkpointer = opened(tmp_path)
    for step in range(1, 20):
        checkpointer.save(step, uniform(step, 50_000), store=step == 10)
    checkpointer.wait(PATIENCE)
    state = uniform(0, 50_000)
    assert Storage(tmp_path).steps() == [10]
    assert opened(tmp_path).restore(state) == 19
    assert is_uniform(state, 19)


@pytest.fixture
def storage_goes_on(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Storage hangs until this is set."""
    goes_on, store = threading.Event(), Storage.store

    def hang(*words: Any) -> bool:
        goes_on.wait(PATIENCE)
        return store(*words)

    monkeypatch.setattr(Storage, "store", hang)
    yield goes_on
    goes_on.set()


def test_a_storage_that_hangs_does_not_keep_steps_from_memory(
    opened: Open,
    vault: VaultThread,
    tmp_path: Path,
    storage_goes_on: threading.Event,
    caplog: pytest.LogCaptureFixture,
) -> None:
    checkpointer = opened(tmp_path, store_every=10)
    assert all(checkpointer.save(step, uniform(step, 100)) for step in (8, 9, 10, 11, 12, 19, 20, 21, 30))
    assert caplog.text.count("storage still writes an earlier step") == 1
    checkpointer.close()
    vault.do(vault.vault.flush)
    successor = opened(tmp_path)
    state = uniform(0, 100)
    assert successor.restore(state) == 30
    assert all(successor.save(step, uniform(step, 100)) for step in (31, 32, 33))
    storage_goes_on.set()
    vault.flush()
    assert 10 in Storage(tmp_path).steps()


def test_a_step_that_is_due_while_storage_is_busy_follows_at_the_next_save_or_when_it_is_waited_for(
    opened: Open, vault: VaultThread, tmp_path: Path, storage_goes_on: threading.Event
) -> None:
    checkpointer = opened(tmp_path, store_every=10, keep_last=0)
    for step in (10, 20):
        assert checkpointer.save(step, uniform(step, 100))
    storage_goes_on.set()
    assert checkpointer._memory is not None
    assert checkpointer._memory.wait(1, PATIENCE) == ""
    assert checkpointer.save(21, uniform(21, 100))
    checkpointer.wait(PATIENCE)
    assert Storage(tmp_path).steps() == [10, 20]
    storage_goes_on.clear()
    for step in (30, 40):
        assert checkpointer.save(step, uniform(step, 100))
    storage_goes_on.set()
    checkpointer.wait(PATIENCE)
    assert Storage(tmp_path).steps() == [10, 20, 30, 40]


def test_a_process_killed_at_any_moment_of_a_save_costs_at_most_that_save(
    opened: Open, vault: VaultThread, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dice = random.Random(7)
    size, last = 1_000_000, 0
    for _ in range(10):
        hear, say = spawning.Pipe(duplex=False)
        process = spawning.Process(
            target=save_for_ever, args=(str(tmp_path), vault.environment, size, last + 1, say), daemon=True
        )
        process.start()
        say.close()
        said = [hear.recv() for _ in range(2) if hear.poll(PATIENCE)]
        time.sleep(dice.uniform(0.0, 0.05))  # the moment to die
        process.kill()
        process.join(PATIENCE)
        while hear.poll():
            try:
                said.append(hear.recv())
            except EOFError:
                break
        state = uniform(0, size)
        checkpointer = opened()
        last = checkpointer.restore(state) or 0
        checkpointer.close()
        assert last - said[-1] in (0, 1), f"the last save that returned was {said[-1]}, restored was {last}"
        assert is_uniform(state, last)
    vault.flush()
    state = uniform(0, size)
    assert Storage(tmp_path).steps() == [last], "what was left in memory reached storage"
    monkeypatch.delenv("RESILE_AGENT_SOCKET")
    assert opened(tmp_path).restore(state) == last
    assert is_uniform(state, last)


def test_a_process_killed_at_any_moment_of_a_commit_to_storage_leaves_only_whole_steps(
    opened: Open, tmp_path: Path
) -> None:
    dice = random.Random(7)
    size, last = 100_000, 0
    for _ in range(8):
        hear, say = spawning.Pipe(duplex=False)
        process = spawning.Process(target=save_for_ever, args=(str(tmp_path), {}, size, last + 1, say), daemon=True)
        process.start()
        say.close()
        assert hear.poll(PATIENCE)
        said = hear.recv()
        time.sleep(dice.uniform(0.0, 0.1))  # the moment to die
        process.kill()
        process.join(PATIENCE)
        state = uniform(0, size)
        last = opened(tmp_path).restore(state) or 0
        assert last >= said
        assert is_uniform(state, last)
    assert not [name for name in os.listdir(tmp_path) if name.startswith("damaged")]


def test_a_clock_that_was_set_back_makes_no_newer_save_look_older(
    opened: Open, vault: VaultThread, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpointer = opened(tmp_path)
    for step in (1, 2):
        checkpointer.save(step, uniform(step, 100), store=step == 2)
    checkpointer.wait(PATIENCE)
    checkpointer.close()
    monkeypatch.setattr(time, "time_ns", lambda: 1_000_000_000)  # 1970
    checkpointer = opened(tmp_path)
    assert checkpointer.restore(uniform(0, 100)) == 2
    assert checkpointer.save(3, uniform(3, 100))
    steps = {buffer.record().step for buffer in vault.vault._buffers[0]}
    assert steps == {2, 3}, "step 1 was overwritten, not the newest one"
    checkpointer.close()
    vault.flush()
    assert Storage(tmp_path).steps() == [2, 3], "what was left in memory is newer than what is in storage"


def test_a_save_that_waits_for_a_copy_hears_that_its_round_is_over(
    opened: Open, vault: VaultThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    over, asked = threading.Event(), threading.Event()

    def copy(*_: Any) -> str:
        asked.set()
        return str(over.wait(PATIENCE))

    monkeypatch.setattr(vault.vault.replica_client, "copy", copy)
    vault.do(lambda: vault.vault.enter(Round(1), ReplicaEndpoint(address="127.0.0.1", port=1)))
    group = Group(placed(0, 1, free_port()), "gloo", 20.0)
    group.form()
    try:
        shard = distribute_tensor(torch.ones(10), init_device_mesh("cpu", (1,)), [Shard(0)])
        checkpointer = opened()
        checkpointer.collectives.group = group
        assert checkpointer.save(1, {"shard": shard})
        assert asked.wait(PATIENCE)
        threading.Timer(0.1, group.abort).start()
        begun = time.monotonic()
        with pytest.raises(GroupLost):
            checkpointer._save_group.copied(COPY_PATIENCE)
        assert time.monotonic() - begun < COPY_PATIENCE / 2
    finally:
        over.set()
        group.destroy()


def test_what_is_in_storage_can_be_restored_after_the_buffers_were_given_back(opened: Open, tmp_path: Path) -> None:
    checkpointer = opened(tmp_path)
    checkpointer.save(1, {"a": torch.ones(2)}, store=True)
    checkpointer.wait(PATIENCE)
    checkpointer.close()
    state = {"a": torch.zeros(2)}
    assert checkpointer.restore(state) == 1
    assert state["a"].tolist() == [1.0, 1.0]


PLAIN = """
import sys, torch
from resile.torch import Checkpointer, Elastic
numbers = torch.ones(4)
checkpointer = Checkpointer(sys.argv[1], store_every=1)
checkpointer.save(1, {"numbers": numbers})
checkpointer.wait()
numbers.zero_()
assert checkpointer.restore({"numbers": numbers}) == 1 and numbers.sum() == 4
print([name for name in sys.modules if name.startswith(("torch.distributed.tensor", "torch.distributed.checkpoint"))])
"""


def test_a_plain_state_is_saved_and_restored_from_memory_without_dtensor(tmp_path: Path, vault: VaultThread) -> None:
    environment = os.environ | vault.environment
    words = [sys.executable, "-c", PLAIN, str(tmp_path / "stored")]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert (done.stdout, done.returncode) == ("[]\n", 0), done.stderr
