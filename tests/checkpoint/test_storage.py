"""A step is in storage as a whole or not at all, and no longer than retention says."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest

from resile.checkpoint.checksums import sums_of
from resile.checkpoint.errors import NotWritable, StorageError
from resile.checkpoint.layout import Part
from resile.checkpoint.storage import Storage, open_storage
from resile.checkpoint.store_retries import store_all, store_committed
from resile.common.atomic_files import new_file
from tests.checkpoint.buffers import filled, layout_of


def test_a_step_is_there_only_when_every_rank_has_stored_its_part(tmp_path: Path) -> None:
    storage = Storage(tmp_path)
    for rank in (2, 0):
        assert not storage.store(*filled(layout_of(tmp_path, rank=rank, world=3), step=10))
        assert storage.steps() == []
    assert storage.store(*filled(layout_of(tmp_path, rank=1, world=3), step=10))
    assert storage.steps() == [10]
    names = sorted(os.listdir(storage.path(10)))
    assert names == [".metadata", *(f"__{rank}{rest}" for rank in range(3) for rest in (".resile.json", "_0.distcp"))]
    assert (storage.path(10) / "__1_0.distcp").read_bytes() == bytes([10]) * layout_of().length


@pytest.mark.parametrize("scheme", ["", "file://"])
def test_a_commit_reads_every_part_once_however_many_ranks_there_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scheme: str
) -> None:
    world, read = 20, []
    decode = Part.decode
    monkeypatch.setattr(Part, "decode", lambda data: read.append(data) or decode(data))
    storage = open_storage(f"{scheme}{tmp_path}")
    layouts = [msgspec.structs.replace(layout_of(rank=rank, world=world), stored=0) for rank in range(world)]
    assert [storage.store(*filled(layout, step=5)) for layout in layouts] == [False] * (world - 1) + [True]
    assert len(read) == world


def test_parts_of_different_attempts_never_make_a_step(tmp_path: Path) -> None:
    storage = Storage(tmp_path)
    storage.store(*filled(layout_of(tmp_path, rank=0, world=2, attempt="first"), step=5))
    storage.store(*filled(layout_of(tmp_path, rank=1, world=2, attempt="second"), step=5))
    assert storage.steps() == []
    assert storage.store(*filled(layout_of(tmp_path, rank=0, world=2, attempt="second"), step=5))
    assert storage.steps() == [5]


@pytest.mark.parametrize("scheme", ["", "file://"])
def test_two_that_write_a_step_which_both_have_all_of_do_not_mix_their_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scheme: str
) -> None:
    storage = open_storage(f"{scheme}{tmp_path}")
    first, second = (filled(layout_of(tmp_path, rank=rank, world=3, whole=True), step=5) for rank in (0, 2))
    buffer, record = second
    buffer.map()[record.data_at] = 77  # a value that is not the same on all ranks
    encode, others = Part.encode, iter([second])

    def meanwhile(part: Part) -> bytes:
        for other in others:  # once: all of it between the data of the first and its description
            storage.store(*other)
        return encode(part)

    monkeypatch.setattr(Part, "encode", meanwhile)
    storage.store(*first)
    (part,) = storage.parts(5)
    with storage.data(5, part) as file:
        data = file.read()
    assert (part.rank, part.world) == (0, 1)
    assert part.sums[0] == sums_of(data, 0, layout_of(whole=True))[0]
    assert sorted(os.listdir(tmp_path)) == ["step-5"]


def test_what_all_ranks_have_is_stored_by_rank_0_and_by_another_only_if_nobody_is_seen_to(tmp_path: Path) -> None:
    storage, slept = Storage(tmp_path), []
    data = storage.draft(5, "a-0") / "data"

    def pause(seconds: float) -> None:
        slept.append(seconds)
        if sum(slept) < 30:  # somebody is writing it, and is lost then
            data.write_bytes(bytes(len(slept)))

    buffer, record = filled(layout_of(tmp_path, rank=1, world=2, whole=True), step=5)
    assert store_committed(buffer, record.sequence) == ""
    assert (storage.steps(), slept, buffer.stored) == ([], [], 0), "rank 0 does"
    assert store_all([(buffer, record.sequence)], (), pause, last=True) == [""]
    assert storage.steps() == [5]
    assert 30 <= sum(slept) <= 33
    slept.clear()
    buffer, record = filled(layout_of(tmp_path, rank=1, world=2, whole=True), step=5)
    assert store_all([(buffer, record.sequence)], (), pause, last=True) == [""]
    assert (slept, buffer.stored) == ([], record.sequence), "it is there already"


def test_a_step_that_is_there_is_left_alone(tmp_path: Path) -> None:
    storage = Storage(tmp_path)
    storage.store(*filled(layout_of(tmp_path), step=5))
    before = (storage.path(5) / ".metadata").stat()
    assert not storage.store(*filled(layout_of(tmp_path, attempt="later"), step=5))
    assert (storage.path(5) / ".metadata").stat() == before


def test_retention_keeps_the_last_ones_and_every_nth(tmp_path: Path) -> None:
    storage = Storage(tmp_path, keep_last=2, keep_every=100)
    for step in (50, 100, 150, 200, 250, 260, 270):
        storage.store(*filled(layout_of(tmp_path), step=step))
    assert storage.steps() == [100, 200, 260, 270]
    assert sorted(os.listdir(tmp_path)) == ["step-100", "step-200", "step-260", "step-270"]


def test_without_retention_everything_is_kept(tmp_path: Path) -> None:
    for step in range(1, 6):
        Storage(tmp_path).store(*filled(layout_of(tmp_path), step=step))
    assert Storage(tmp_path).steps() == [1, 2, 3, 4, 5]


def test_drafts_that_a_newer_step_has_overtaken_are_swept(tmp_path: Path) -> None:
    storage = Storage(tmp_path)
    storage.store(*filled(layout_of(tmp_path, rank=0, world=2), step=5))
    assert [name for name in os.listdir(tmp_path) if name.startswith(".step-5.")]
    storage.store(*filled(layout_of(tmp_path), step=6))
    assert os.listdir(tmp_path) == ["step-6"]


def test_writers_with_the_same_process_number_do_not_meet(tmp_path: Path) -> None:
    with new_file(tmp_path / "data") as one, new_file(tmp_path / "data") as other:  # as on two nodes, or in two pods
        os.write(one, b"all of it")
        os.write(other, b"all")
        os.write(other, b" of it")
    assert (tmp_path / "data").read_bytes() == b"all of it"
    assert os.listdir(tmp_path) == ["data"]


@pytest.mark.parametrize(
    "change", [{"world": 1 << 40}, {"rank": 3}, {"length": 1000}, {"length": -1}, {"items": {"offset": -8}}]
)
def test_a_part_whose_numbers_are_not_possible_is_not_used(change: dict[str, Any]) -> None:
    part = Part.of(layout_of(), 5, (1, 2))
    assert Part.decode(part.encode()).items == part.items
    if "items" in change:
        change = {"items": (msgspec.structs.replace(part.items[0], **change["items"]),)}
    with pytest.raises(ValueError, match=r"bytes to store|is outside of it"):
        Part.decode(msgspec.structs.replace(part, **change).encode())


def test_a_draft_that_is_being_swept_is_never_committed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = Storage(tmp_path)
    storage.store(*filled(layout_of(tmp_path, rank=0, world=2), step=5))

    def cut_short(path: Path, **_: object) -> None:
        (path / "__0_0.distcp").unlink(missing_ok=True)

    monkeypatch.setattr(shutil, "rmtree", cut_short)
    storage.store(*filled(layout_of(tmp_path), step=6))
    assert not storage.store(*filled(layout_of(tmp_path, rank=1, world=2), step=5))
    assert storage.steps() == [6]


def test_a_buffer_that_was_overwritten_is_not_stored(tmp_path: Path) -> None:
    buffer, old = filled(layout_of(tmp_path), step=5)
    buffer.want(old.sequence)
    filled(layout_of(tmp_path), step=6, buffer=buffer)
    assert "a newer step took its place" in store_committed(buffer, old.sequence)
    assert not buffer.wanted, "whatever came of it, the buffer may be overwritten again"
    with pytest.raises(StorageError, match="a newer step took its place"):
        Storage(tmp_path).store(buffer, old)
    assert Storage(tmp_path).steps() == []


def test_a_place_that_cannot_be_written_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    buffer, record = filled(layout_of(tmp_path / "file" / "here"), step=5)
    pauses: list[float] = []
    said = store_committed(buffer, record.sequence, (1.0, 2.0), pauses.append)
    assert said == f"checkpoints cannot be stored in {tmp_path}/file/here: Not a directory"
    assert pauses == [], "which does not heal by waiting"


@pytest.mark.parametrize("scheme", ["", "file://"])
@pytest.mark.parametrize(
    ("place", "why"),
    [
        ("file", "it is no directory"),
        ("file/here", "Not a directory"),
        ("/sys/kernel/nobody-writes/here", "Operation not permitted|Permission denied|Read-only file system"),
    ],
)
def test_a_place_that_will_never_be_written_is_found_out_without_a_step(
    tmp_path: Path, scheme: str, place: str, why: str
) -> None:
    (tmp_path / "file").touch()
    where = f"{scheme}{tmp_path / place}"
    with pytest.raises(NotWritable, match=f"^checkpoints cannot be stored in {where}: ({why})$"):
        open_storage(where).check_writable()


def test_a_place_below_what_takes_no_directory_is_found_out_too() -> None:
    with pytest.raises(NotWritable, match=r"^checkpoints cannot be stored in /proc/resile/here: No such file"):
        Storage("/proc/resile/here").check_writable()


@pytest.mark.parametrize(("number", "tries"), [(errno.EROFS, 1), (errno.EACCES, 2)])
def test_a_place_that_can_be_read_but_not_written_is_found_out_and_rights_alone_are_waited_for_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, tries: int
) -> None:
    def refuse(*_: object, **__: object) -> int:
        raise OSError(number, os.strerror(number))

    buffer, record = filled(layout_of(tmp_path), step=5)
    pauses: list[float] = []
    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(NotWritable, match=os.strerror(number)):
        Storage(tmp_path).check_writable()
    assert os.strerror(number) in store_committed(buffer, record.sequence, (1.0,), pauses.append)
    assert len(pauses) == tries - 1, "credentials may be renewed"


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.ESTALE])
def test_what_may_pass_is_not_said_to_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    def refuse(*_: object, **__: object) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "open", refuse)
    Storage(tmp_path).check_writable()


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.EACCES])
def test_storage_that_does_not_say_whether_it_has_a_step_is_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def refuse(*_: object, **__: object) -> bool:
        raise OSError(number, os.strerror(number))

    held = [filled(layout_of(tmp_path, rank=rank, world=2), step=5) for rank in range(2)]
    monkeypatch.setattr(Path, "exists", refuse)
    said = store_all([(buffer, record.sequence) for buffer, record in held], (1.0,), lambda _: monkeypatch.undo())
    assert said == ["", ""], "both ranks are tried again"
    assert Storage(tmp_path).steps() == [5]


def test_finding_out_leaves_nothing_behind_but_the_directory(tmp_path: Path) -> None:
    for scheme in ("", "file://"):
        open_storage(f"{scheme}{tmp_path / 'new' / 'here'}").check_writable()
        assert os.listdir(tmp_path / "new" / "here") == []


def test_a_full_disk_costs_the_step_and_leaves_no_half_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    buffer, record = filled(layout_of(tmp_path), step=5)
    monkeypatch.setattr(os, "sendfile", full)
    assert store_committed(buffer, record.sequence).endswith("No space left on device")
    assert Storage(tmp_path).steps() == []
    monkeypatch.undo()
    assert store_committed(buffer, record.sequence) == "", "it is tried again from memory"
    assert Storage(tmp_path).steps() == [5]
    assert [file for file in tmp_path.rglob(".__*")] == []
