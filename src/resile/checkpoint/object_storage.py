"""Checkpoints in an object store, by its fsspec URL (`s3://…`, `gs://…`): whole or not at all, without any rename.

    URL/step-100/   .metadata                       written last: without it there is no checkpoint
                    __0_0.ATTEMPT.distcp …          data, named in .metadata
                    __0.ATTEMPT.resile.json …       our checksums

Parts of different attempts lie side by side under different names. Whoever finds all parts of an attempt there writes
`.metadata`, which names exactly those; a store writes one object as a whole or not at all. If two writers find them
complete, both write the same bytes. What all ranks have alike is one part, and each writer of it an attempt.
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
    StorageError,
    is_hopeless,
    not_read,
    not_stored,
    probe_name,
    unwritable,
)
from resile.checkpoint.layout import Layout, Part, chunks
from resile.checkpoint.storage import METADATA, attempt_word, sealed

_STEP = re.compile(r"step-(\d{1,18})")
_PART = re.compile(r"__\d{1,9}\.(?P<attempt>.+)\.resile\.json")
_BLOCK = 16 << 20
DAMAGED = "damaged.metadata"


class ObjectStorage:
    """The checkpoints under one URL."""

    def __init__(self, url: str, *, keep_last: int = 0, keep_every: int = 0) -> None:
        """Look at it.

        Raises:
            NotWritable: fsspec is not installed, or knows no such store.
        """
        try:
            from fsspec.core import url_to_fs
        except ImportError:
            raise NotWritable(f"{url} needs fsspec: pip install 'resile[storage]'") from None
        try:
            self._fs, root = url_to_fs(url)
        except ImportError as error:  # of the store itself; fsspec names the package
            raise NotWritable(f"{url} needs a package that is not installed: {error}") from None
        except Exception as error:  # a store's library raises whatever it likes
            raise NotWritable(f"{url} cannot be used: {error}") from None
        self.directory = url.rstrip("/")
        self._root = str(root).rstrip("/")
        self._keep_last = keep_last
        self._keep_every = keep_every
        self._attempts: dict[int, str] = {}
        """The attempt that each step is of whose parts were asked for last."""

    def where(self, step: int) -> str:
        """What `torch.distributed.checkpoint.load` takes, with its FsspecReader."""
        return f"{self.directory}/step-{step}"

    def has(self, step: int) -> bool:
        """Whether a step is there as a whole.

        Raises:
            NotReadable: nobody can tell.
        """
        with self._answering(self.where(step)):
            return self._is_there(f"{self._path(step)}/{METADATA}")

    def steps(self) -> list[int]:
        """The committed steps, oldest first.

        Raises:
            NotReadable: nobody can tell.
        """
        with self._answering(self.directory):
            directories = self._directories()
        return sorted(step for step in directories if self.has(step))

    def check_writable(self) -> None:
        """Find out whether anything can be written: an object is, and is removed again.

        Raises:
            NotWritable: nothing can, and waiting does not mend that. What may pass is left to `store`.
        """
        probe = f"{self._root}/{probe_name()}"
        try:
            self._fs.makedirs(self._root, exist_ok=True)
            self._fs.pipe_file(probe, b"resile")
        except Exception as error:  # a store's library raises whatever it likes
            if is_hopeless(error):
                raise unwritable(error, self.directory) from None
        with contextlib.suppress(Exception):  # who may write need not have the right to remove
            self._fs.rm_file(probe)

    def store(self, buffer: Buffer, record: Record) -> bool:
        """Write the part that a buffer holds; whether that made the step complete.

        Raises:
            StorageError: the buffer was overwritten meanwhile, or the store does not take it.
        """
        try:
            layout = buffer.layout(record)
            if self.has(record.step) or (layout.replicated and not layout.whole):
                return False
            layout = layout.alone() if layout.whole else layout
            sums = sealed(buffer, record)[: chunks(layout.stored)]
            blocks = _blocks_of(buffer, record, layout.stored)
            return self.put(record.step, layout, blocks, sums)
        except (IncompleteBuffer, NotReadable) as error:
            raise StorageError(f"step {record.step} was not stored: {error}") from None

    def put(self, step: int, layout: Layout, blocks: Iterator[memoryview], sums: Sequence[int]) -> bool:
        """Write one rank's part; whether that made the step complete.

        Raises:
            StorageError: the store does not take it.
            IncompleteBuffer: from `blocks`.
        """
        attempt = attempt_word(layout.attempt)
        try:
            self._fs.makedirs(self._path(step), exist_ok=True)
            if layout.stored:
                with self._fs.open(f"{self._path(step)}/{data_file(layout.rank, attempt)}", "wb") as file:
                    for block in blocks:
                        file.write(block)
            part = Part.of(layout, step, sums)
            self._fs.pipe_file(f"{self._path(step)}/{_part_file(layout.rank, attempt)}", part.encode())
            if not {_part_file(rank, attempt) for rank in range(layout.world)} <= set(self._names(step)):
                return False  # without reading any: of so many ranks only the last one needs them
            parts = self._parts(step, attempt)
            if [each.rank for each in parts] != list(range(layout.world)):
                return False
            self._fs.pipe_file(f"{self._path(step)}/{METADATA}", metadata(parts, attempt))
        except IncompleteBuffer:
            raise
        except Exception as error:  # a store's library raises whatever it likes
            raise not_stored(error, step, self.directory) from error
        self.sweep()
        return True

    def progress(self, step: int) -> int:
        """A number that changes while somebody is writing a step, as far as a store shows that."""
        with self._answering(self.where(step)):
            return len(self._names(step))

    def parts(self, step: int) -> list[Part]:
        """The parts that the step consists of, by rank; none in one that plain DCP wrote.

        Raises:
            IncompleteBuffer: one is not as it was written, or `.metadata` is of none of the attempts there.
            NotReadable: the store does not give them.
        """
        self._attempts[step], parts = self._committed(step)
        return parts

    def _committed(self, step: int) -> tuple[str, list[Part]]:
        """The attempt that `.metadata` is of, and its parts."""
        with self._answering(self.where(step)):
            attempts = sorted({match["attempt"] for name in self._names(step) if (match := _PART.fullmatch(name))})
        written = self.metadata(step)
        complaint = IncompleteBuffer(f"{METADATA} is not what was written")
        for attempt in reversed(attempts):
            try:
                parts = self._parts(step, attempt)
                if metadata(parts, attempt) == written:
                    return attempt, parts
            except IncompleteBuffer as error:
                complaint = error
        if attempts:
            raise complaint
        return "", []

    def metadata(self, step: int) -> bytes:
        """DCP's own description.

        Raises:
            IncompleteBuffer: it is not there.
            NotReadable: the store does not give it.
        """
        with self._reading(step, METADATA):
            return bytes(self._fs.cat_file(f"{self._path(step)}/{METADATA}"))

    @contextlib.contextmanager
    def data(self, step: int, part: Part) -> Iterator[IO[bytes]]:
        """The data of a part, to read.

        Raises:
            IncompleteBuffer: it is not there.
            NotReadable: the store does not give it, now or while it is being read.
        """
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
        """Tell an object that is not there from one that the store does not give."""
        with self._answering(f"{name} in {self.where(step)}"):
            try:
                yield
            except FileNotFoundError:
                there = self._names(step)
                if not there or name in there:  # nothing is, or this too: that is no answer of a store that works
                    raise
                raise IncompleteBuffer(f"{name} is not there") from None

    @staticmethod
    @contextlib.contextmanager
    def _answering(what: str) -> Iterator[None]:
        """Whatever the store's library raises means that it cannot be read."""
        try:
            yield
        except (IncompleteBuffer, NotReadable):
            raise
        except Exception as error:
            raise not_read(error, what) from None

    def set_aside(self, step: int) -> str:
        """Make a damaged step no checkpoint any more; a person can look at it, and a sound one take its place.

        What its metadata are called now; empty if the store refused.
        """
        with contextlib.suppress(Exception):  # it is passed over in any case
            self._fs.pipe_file(f"{self._path(step)}/{DAMAGED}", self.metadata(step))
            self._fs.rm_file(f"{self._path(step)}/{METADATA}")
            return f"step-{step}/{DAMAGED}"
        return ""

    def sweep(self) -> None:
        """Remove what retention does not keep, and parts of steps that a newer one has overtaken."""
        with contextlib.suppress(Exception):  # the next writer tries again
            steps = self.steps()
            newest = steps[-1] if steps else -1
            old = set(steps[: -self._keep_last] if self._keep_last else ())
            for step in self._directories():
                if step in old:
                    if not self._keep_every or step % self._keep_every:
                        self._fs.rm_file(f"{self._path(step)}/{METADATA}")  # first, so that nobody reads half of it
                        self._fs.rm(self._path(step), recursive=True)
                elif step < newest and not {METADATA, DAMAGED} & set(names := self._names(step)):
                    for name in names:  # and nothing else: who commits it this moment is not to lose that
                        self._fs.rm_file(f"{self._path(step)}/{name}")
                    with contextlib.suppress(Exception):  # where directories are more than the names of their files
                        self._fs.rmdir(self._path(step))

    def _parts(self, step: int, attempt: str) -> list[Part]:
        with self._answering(self.where(step)):
            names = self._names(step)
        parts = []
        for name in names:
            match = _PART.fullmatch(name)
            if match and match["attempt"] == attempt:
                with self._reading(step, name):
                    text = bytes(self._fs.cat_file(f"{self._path(step)}/{name}"))
                try:
                    parts.append(Part.decode(text))
                except ValueError as error:
                    raise IncompleteBuffer(f"{name} is not what was written: {error}") from None
        return sorted(parts, key=lambda part: part.rank)

    def _is_there(self, path: str) -> bool:
        """Not `exists`, which says no when the store does not answer; and not from what was listed before."""
        try:
            self._fs.invalidate_cache()
            self._fs.info(path)
            return True
        except FileNotFoundError:
            return False

    def _path(self, step: int) -> str:
        return f"{self._root}/step-{step}"

    def _directories(self) -> list[int]:
        return [int(match[1]) for name in self._list(self._root) if (match := _STEP.fullmatch(name))]

    def _names(self, step: int) -> list[str]:
        return self._list(self._path(step))

    def _list(self, path: str) -> list[str]:
        try:
            self._fs.invalidate_cache()
            found: list[Any] = self._fs.ls(path, detail=False)
        except FileNotFoundError:
            return []
        return [str(name).rstrip("/").rpartition("/")[2] for name in found]


def _part_file(rank: int, attempt: str) -> str:
    return f"__{rank}.{attempt}.resile.json"


def _blocks_of(buffer: Buffer, record: Record, length: int) -> Iterator[memoryview]:
    """The data of a buffer, as long as nobody overwrites it.

    Raises:
        IncompleteBuffer: somebody did.
    """
    with memoryview(buffer.map()) as memory:
        for at in range(record.data_at, record.data_at + length, _BLOCK):
            yield memory[at : min(at + _BLOCK, record.data_at + length)]
            if buffer.record() != record:
                raise IncompleteBuffer("a newer step took its place in memory")
