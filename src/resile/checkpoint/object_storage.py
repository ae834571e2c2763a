"""Checkpoints in an object store, by fsspec URL (`s3://…`, `gs://…`). They appear whole or not at all, without renames.

    URL/step-100/   .metadata                       written last: without it there is no checkpoint
                    __0_0.ATTEMPT.distcp …          data, named in .metadata
                    __0.ATTEMPT.resile.json …       our checksums

Parts of different attempts lie side by side under different names. A writer that finds all parts of an attempt writes
`.metadata`, which names exactly those parts. A store writes one object whole or not at all. If two writers find the
parts complete, both write the same bytes. A replicated step is a single part, and each of its writers is an attempt.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Sequence
from typing import IO, Any

from resile.checkpoint.buffer import Buffer, IncompleteBuffer, Record
from resile.checkpoint.dcp_metadata import data_file, metadata
from resile.checkpoint.errors import (
    NotReadable,
    NotWritable,
    is_hopeless,
    not_read,
    not_stored,
    probe_name,
    unwritable,
)
from resile.checkpoint.layout import Layout, Part, chunks
from resile.checkpoint.storage import METADATA, StepStorage, attempt_word, decode_parts, part_file, sealed

_PART = re.compile(r"__\d{1,9}\.(?P<attempt>.+)\.resile\.json")
_BLOCK = 16 << 20
DAMAGED = "damaged.metadata"


class ObjectStorage(StepStorage):
    def __init__(self, url: str, *, keep_last: int = 0, keep_every: int = 0) -> None:
        """Connect to the store. Raises NotWritable if fsspec is not installed or cannot use the URL."""
        super().__init__(keep_last=keep_last, keep_every=keep_every)
        try:
            from fsspec.core import url_to_fs
        except ImportError:
            raise NotWritable(f"{url} needs fsspec: pip install 'resile[storage]'") from None
        try:
            self._fs, root = url_to_fs(url)
        except ImportError as error:  # fsspec names the package that the store needs
            raise NotWritable(f"{url} needs a package that is not installed: {error}") from None
        except Exception as error:  # a store's library may raise anything
            raise NotWritable(f"{url} cannot be used: {error}") from None
        self.directory = url.rstrip("/")
        self._root = str(root).rstrip("/")
        self._attempts: dict[int, str] = {}
        """For each step, the attempt of the parts that were read last."""

    def where(self, step: int) -> str:
        return f"{self.directory}/step-{step}"

    def has(self, step: int) -> bool:
        with self._answering(self.where(step)):
            try:
                self._fs.invalidate_cache()
                self._fs.info(f"{self._path(step)}/{METADATA}")  # unlike `exists`, raises if the store does not answer
                return True
            except FileNotFoundError:
                return False

    def _names(self) -> list[str]:
        with self._answering(self.directory):
            return self._list(self._root)

    def check_writable(self) -> None:
        probe = f"{self._root}/{probe_name()}"
        try:
            self._fs.makedirs(self._root, exist_ok=True)
            self._fs.pipe_file(probe, b"resile")
        except Exception as error:  # a store's library may raise anything
            if is_hopeless(error):
                raise unwritable(error, self.directory) from None
        with contextlib.suppress(Exception):  # the right to write need not include the right to remove
            self._fs.rm_file(probe)

    def _is_taken(self, step: int) -> bool:
        return self.has(step)

    def _store(self, buffer: Buffer, record: Record, layout: Layout) -> bool:
        sums = sealed(buffer, record)[: chunks(layout.stored)]
        return self.put(record.step, layout, _blocks_of(buffer, record, layout.stored), sums)

    def put(self, step: int, layout: Layout, blocks: Iterator[bytes | memoryview], sums: Sequence[int]) -> bool:
        """Write one rank's part: the `blocks` of its data, then its checksums. Returns True if that completed the step.

        Raises StorageError if the store refused the part, and IncompleteBuffer if `blocks` raises it.
        """
        attempt = attempt_word(layout.attempt)
        try:
            self._fs.makedirs(self._path(step), exist_ok=True)
            if layout.stored:
                with self._fs.open(f"{self._path(step)}/{data_file(layout.rank, attempt)}", "wb") as file:
                    for block in blocks:
                        file.write(block)
            part = Part.of(layout, step, sums)
            self._fs.pipe_file(f"{self._path(step)}/{part_file(layout.rank, attempt)}", part.encode())
            if not {part_file(rank, attempt) for rank in range(layout.world)} <= set(self._names_of(step)):
                return False  # decided by the names: only the last of the ranks needs to read the parts
            parts = self._parts(step, attempt)
            if [each.rank for each in parts] != list(range(layout.world)):
                return False  # another writer is removing the parts of this step
            self._fs.pipe_file(f"{self._path(step)}/{METADATA}", metadata(parts, attempt))
        except IncompleteBuffer:
            raise
        except Exception as error:  # a store's library may raise anything
            raise not_stored(error, step, self.directory) from error
        self.sweep()
        return True

    def progress(self, step: int) -> int:
        with self._answering(self.where(step)):
            return len(self._names_of(step))

    def parts(self, step: int) -> list[Part]:
        with self._answering(self.where(step)):
            attempts = sorted({match["attempt"] for name in self._names_of(step) if (match := _PART.fullmatch(name))})
        written = self.metadata(step)
        complaint = IncompleteBuffer(f"{METADATA} is not what was written")
        for attempt in reversed(attempts):
            try:
                parts = self._parts(step, attempt)
                if metadata(parts, attempt) == written:
                    self._attempts[step] = attempt
                    return parts
            except IncompleteBuffer as error:
                complaint = error
        if attempts:
            raise complaint
        return []

    def metadata(self, step: int) -> bytes:
        return self._read(step, METADATA)

    @contextlib.contextmanager
    def data(self, step: int, part: Part) -> Iterator[IO[bytes]]:
        if step not in self._attempts:
            self.parts(step)
        name = data_file(part.rank, self._attempts[step])
        with self._reading(step, name):
            file = self._fs.open(f"{self._path(step)}/{name}", "rb")
        try:
            with file:
                yield file
        except OSError as error:
            raise not_read(error, f"{name} in {self.where(step)}") from None

    @contextlib.contextmanager
    def _reading(self, step: int, name: str) -> Iterator[None]:
        with self._answering(f"{name} in {self.where(step)}"):
            try:
                yield
            except FileNotFoundError:
                there = self._names_of(step)
                if not there or name in there:  # a working store would list others, or not miss this one
                    raise
                raise IncompleteBuffer(f"{name} is not there") from None

    @staticmethod
    @contextlib.contextmanager
    def _answering(what: str) -> Iterator[None]:
        try:
            yield
        except (IncompleteBuffer, NotReadable):
            raise
        except Exception as error:
            raise not_read(error, what) from None

    def set_aside(self, step: int) -> str:
        with contextlib.suppress(Exception):  # the caller passes the step over in any case
            self._fs.pipe_file(f"{self._path(step)}/{DAMAGED}", self.metadata(step))
            self._fs.rm_file(f"{self._path(step)}/{METADATA}")
            return f"step-{step}/{DAMAGED}"
        return ""

    def sweep(self) -> None:
        with contextlib.suppress(Exception):  # the next writer tries again
            steps = self.steps()
            newest = steps[-1] if steps else -1
            for step in self._expired(steps):
                self._fs.rm_file(f"{self._path(step)}/{METADATA}")  # first, so that no reader sees half of it
                self._fs.rm(self._path(step), recursive=True)
            for step in self._step_directories():
                if step < newest and not {METADATA, DAMAGED} & set(names := self._names_of(step)):
                    for name in names:  # only these: a `.metadata` written at this moment must survive
                        self._fs.rm_file(f"{self._path(step)}/{name}")
                    with contextlib.suppress(Exception):  # some stores have real directories
                        self._fs.rmdir(self._path(step))

    def _parts(self, step: int, attempt: str) -> list[Part]:
        with self._answering(self.where(step)):
            matches = map(_PART.fullmatch, self._names_of(step))
        names = [match[0] for match in matches if match and match["attempt"] == attempt]
        return decode_parts((name, self._read(step, name)) for name in names)

    def _read(self, step: int, name: str) -> bytes:
        with self._reading(step, name):
            return bytes(self._fs.cat_file(f"{self._path(step)}/{name}"))

    def _path(self, step: int) -> str:
        return f"{self._root}/step-{step}"

    def _names_of(self, step: int) -> list[str]:
        return self._list(self._path(step))

    def _list(self, path: str) -> list[str]:
        try:
            self._fs.invalidate_cache()
            found: list[Any] = self._fs.ls(path, detail=False)
        except FileNotFoundError:
            return []
        return [str(name).rstrip("/").rpartition("/")[2] for name in found]


def _blocks_of(buffer: Buffer, record: Record, length: int) -> Iterator[memoryview]:
    """Yield a buffer's first `length` bytes of data in blocks. Raises IncompleteBuffer if they are overwritten."""
    with memoryview(buffer.map()) as memory:
        for at in range(record.data_at, record.data_at + length, _BLOCK):
            yield memory[at : min(at + _BLOCK, record.data_at + length)]
            if buffer.record() != record:
                raise IncompleteBuffer("a newer step took its place in memory")
