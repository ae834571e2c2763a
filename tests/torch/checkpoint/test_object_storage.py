"""Checkpoints in an object store: a step is there when the last object of it is, and nothing is ever renamed."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
import torch.distributed.checkpoint as dcp
from fsspec.implementations.memory import MemoryFileSystem
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader

from resile.checkpoint.errors import NotReadable, StorageError
from resile.checkpoint.object_storage import ObjectStorage
from resile.checkpoint.storage import open_storage
from resile.checkpoint.store_retries import store_committed
from resile.torch import Checkpointer
from resile.torch._checkpoint import restore
from tests.checkpoint.buffers import filled, layout_of
from tests.torch.checkpoint.checkpoint_servers import PATIENCE, is_uniform, uniform, vault_thread


@pytest.fixture(params=["memory", "file"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    place = f"memory://{uuid.uuid4().hex}" if request.param == "memory" else f"file://{tmp_path}/store"
    yield place
    fs, root = fsspec.core.url_to_fs(place)
    if fs.exists(root):
        fs.rm(root, recursive=True)


def save(url: str, *steps: int, **more: Any) -> None:
    checkpointer = Checkpointer(url, store_every=1, **more)
    for step in steps:
        assert checkpointer.save(step, uniform(step, 100_000))
        checkpointer.wait(PATIENCE)
    checkpointer.close()


def restored(url: str) -> int | None:
    state = uniform(0, 100_000)
    checkpointer = Checkpointer(url)
    step = checkpointer.restore(state)
    checkpointer.close()
    assert is_uniform(state, step or 0)
    return step


def test_it_brings_a_step_back_with_and_without_an_agent_and_dcp_reads_it(url: str) -> None:
    save(url, 3)
    with vault_thread():
        save(url, 4)
    assert restored(url) == 4
    state = {"tensors": {"t5": torch.zeros(100_000)}}
    with pytest.warns(UserWarning, match="single process"):
        dcp.load(state, storage_reader=FsspecReader(f"{url}/step-3"))
    assert bool((state["tensors"]["t5"] == 3).all())


@pytest.mark.parametrize("damage", ["data", "part", "metadata", "half"])
def test_damage_is_found_named_set_aside_and_passed_over(
    url: str, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    save(url, 1, 2)
    fs, root = fsspec.core.url_to_fs(url)
    files = {str(file).rpartition("/")[2]: str(file) for file in fs.ls(f"{root}/step-2", detail=False)}
    if damage == "half":
        fs.rm_file(files[".metadata"])
    else:
        end = {"data": ".distcp", "part": ".resile.json", "metadata": ".metadata"}[damage]
        (file,) = [path for name, path in files.items() if name.endswith(end)]
        content = bytearray(fs.cat_file(file))
        content[len(content) // 2] ^= 1
        fs.pipe_file(file, bytes(content))
    with caplog.at_level(logging.WARNING, "resile"):
        assert restored(url) == 1
    said = {
        "data": "__0_0.distcp: the checksum of bytes",
        "part": "resile.json is not what was written",
        "metadata": ".metadata is not what was written",
        "half": "",
    }
    assert said[damage] in caplog.text
    assert (f"step 2 in {url} was set aside as step-2/damaged.metadata\n" in caplog.text) == (damage != "half")
    assert ObjectStorage(url).steps() == [1]
    save(url, 2)
    assert restored(url) == 2, "a sound one takes its place"


@pytest.mark.parametrize("call", ["ls", "info", "cat_file", "open"])
def test_a_store_that_refuses_to_answer_costs_no_checkpoint(
    url: str, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(restore, "PAUSES", (0.01,))
    save(url, 1, 2)
    fs, _ = fsspec.core.url_to_fs(url)

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "the credentials have expired")

    monkeypatch.setattr(fs, call, refuse)
    with pytest.raises(NotReadable):
        restored(url)
    monkeypatch.undo()
    assert ObjectStorage(url).steps() == [1, 2]
    assert restored(url) == 2


def test_a_step_is_there_only_when_all_parts_of_one_attempt_are(url: str) -> None:
    storage = ObjectStorage(url)
    assert not storage.store(*filled(layout_of(url, rank=0, world=2, attempt="first"), step=5))
    assert not storage.store(*filled(layout_of(url, rank=1, world=2, attempt="second"), step=5))
    assert storage.steps() == []
    assert storage.store(*filled(layout_of(url, rank=0, world=2, attempt="second"), step=5))
    assert storage.steps() == [5]
    assert [part.rank for part in storage.parts(5)] == [0, 1]
    assert not storage.store(*filled(layout_of(url, rank=1, world=2, attempt="first"), step=5)), "it is left alone"


def test_retention_keeps_the_last_ones_and_every_nth_and_drafts_are_swept(url: str) -> None:
    storage = ObjectStorage(url, keep_last=2, keep_every=100)
    storage.store(*filled(layout_of(url, rank=0, world=2), step=40))
    for step in (50, 100, 150, 200, 250):
        storage.store(*filled(layout_of(url), step=step))
    assert storage.steps() == [100, 200, 250]
    fs, root = fsspec.core.url_to_fs(url)
    assert sorted(str(name).rpartition("/")[2] for name in fs.ls(root, detail=False)) == [
        "step-100",
        "step-200",
        "step-250",
    ]


class _Remembering(MemoryFileSystem):
    """Answers from what it has listed before, as the filesystems of real stores do, until it is told to forget it."""

    protocol = "remembering"
    store = MemoryFileSystem.store
    pseudo_dirs = MemoryFileSystem.pseudo_dirs

    @classmethod
    def _strip_protocol(cls, path: Any) -> str:
        return MemoryFileSystem._strip_protocol(str(path).removeprefix("remembering://"))

    def ls(self, path: str, detail: bool = True, **more: Any) -> Any:
        path = self._strip_protocol(path)
        if path not in self.dircache:
            self.dircache[path] = super().ls(path, detail=True)
        return self.dircache[path] if detail else [each["name"] for each in self.dircache[path]]

    def info(self, path: str, **more: Any) -> Any:
        path = self._strip_protocol(path)
        if (listed := self.dircache.get(self._parent(path))) is None:
            return super().info(path)
        for each in listed:
            if each["name"] == path:
                return each
        raise FileNotFoundError(path)

    def invalidate_cache(self, path: str | None = None) -> None:
        """Of a path and what is above it, as s3fs has it."""
        if path is None:
            self.dircache.clear()
        while path:
            self.dircache.pop(self._strip_protocol(path), None)
            path = self._parent(path).strip("/")


@pytest.fixture
def remembering() -> Iterator[tuple[str, str]]:
    """The URL of a store as it is seen by a node that remembers, and by another one."""
    fsspec.register_implementation("remembering", _Remembering, clobber=True)
    name = uuid.uuid4().hex
    yield f"remembering://{name}", f"memory://{name}"
    fsspec.filesystem("memory").rm(f"/{name}", recursive=True)


def test_a_step_that_another_node_has_committed_is_never_swept_as_a_draft(remembering: tuple[str, str]) -> None:
    here, there = remembering
    storage = ObjectStorage(here)
    assert not storage.store(*filled(layout_of(rank=0, world=2), step=5)), "it has listed the step now"
    assert ObjectStorage(there).store(*filled(layout_of(rank=1, world=2), step=5))
    assert storage.store(*filled(layout_of(), step=6))
    assert ObjectStorage(there).steps() == [5, 6]
    assert storage.steps() == [5, 6]


def test_a_step_that_another_node_has_set_aside_does_not_count_as_one_of_those_to_keep(
    remembering: tuple[str, str],
) -> None:
    here, there = remembering
    storage = ObjectStorage(here, keep_last=2)
    for step in (5, 6):
        storage.store(*filled(layout_of(), step=step))
    assert [part.rank for part in storage.parts(6)] == [0], "it has listed the step now"
    ObjectStorage(there).set_aside(6)
    storage.store(*filled(layout_of(), step=7))
    assert ObjectStorage(there).steps() == [5, 7]


def test_a_step_that_is_committed_while_others_are_swept_stays(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = ObjectStorage(url)
    storage.store(*filled(layout_of(rank=0, world=2), step=5))
    steps = ObjectStorage.steps

    def just_before(self: ObjectStorage) -> list[int]:
        found = steps(self)
        monkeypatch.undo()
        ObjectStorage(url).store(*filled(layout_of(rank=1, world=2), step=5))
        return found

    monkeypatch.setattr(ObjectStorage, "steps", just_before)
    storage.store(*filled(layout_of(), step=6))
    assert storage.steps() == [5, 6]
    assert len(storage.parts(5)) == 2


def test_a_store_that_cannot_be_used_is_one_sentence() -> None:
    with pytest.raises(StorageError, match="nosuch://there cannot be used"):
        open_storage("nosuch://there")
    buffer, record = filled(layout_of("nosuch://there"), step=5)
    assert "nosuch://there cannot be used" in store_committed(buffer, record.sequence)
