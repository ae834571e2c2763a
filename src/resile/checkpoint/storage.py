"""Checkpoints in storage: one directory per step, which torch can read by itself. It appears whole or not at all.

    DIRECTORY/step-100/              .metadata  __0_0.distcp  __1_0.distcp …      what DCP reads
                                     __0.resile.json …                            our checksums
    DIRECTORY/.step-100.ATTEMPT/     the same, until every rank's part is there

Every writer puts its part into the hidden directory and then looks whether all parts are there. A writer that finds
them complete commits the step by a rename. The last writer always does; of two, one renames first and the other finds
it done. No writer waits for another, so agents can still write the parts after a crash of their processes.

A replicated step is a single part, and any rank can make the step from it, in a directory of its own. Normally rank 0
does. When processes end or a peer is lost, any node does that sees no other one write the step.
"""

from __future__ import annotations

import abc
import contextlib
import os
import re
import shutil
import stat
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING

from resile.checkpoint.buffer import Buffer, IncompleteBuffer, Record
from resile.checkpoint.checksums import sums_of
from resile.checkpoint.dcp_metadata import data_file, metadata
from resile.checkpoint.errors import (
    NotReadable,
    StorageError,
    is_hopeless,
    not_read,
    not_stored,
    probe_name,
    unwritable,
)
from resile.checkpoint.layout import Layout, Part, chunks
from resile.common.atomic_files import new_file, write_atomically

if TYPE_CHECKING:
    from resile.checkpoint.object_storage import ObjectStorage

METADATA = ".metadata"
_STEP = re.compile(r"step-(\d{1,18})")
_DRAFT = re.compile(r"\.step-(\d{1,18})\..+")
_PART = re.compile(r"__\d{1,9}\.resile\.json")
_DOOMED = ".gone-"
_BLOCK = 16 << 20
"""Bytes that the kernel copies at a time. After each block the writer checks that its buffer was not overwritten."""


class StepStorage(abc.ABC):
    """The base of `Storage` (a directory) and `ObjectStorage` (an object store). `Storage` documents their methods."""

    def __init__(self, *, keep_last: int, keep_every: int) -> None:
        """Set which steps `sweep` keeps: the newest `keep_last` steps, and all steps divisible by `keep_every`.

        If `keep_last` is 0, every step is kept. Otherwise, if `keep_every` is 0, only the newest steps are kept.
        """
        self._keep_last = keep_last
        self._keep_every = keep_every

    @abc.abstractmethod
    def has(self, step: int) -> bool:
        """True if the step is committed in storage. Raises NotReadable if storage does not answer."""

    def steps(self) -> list[int]:
        """The committed steps, oldest first. Raises NotReadable if storage does not answer."""
        return sorted(step for step in self._step_directories() if self.has(step))

    def store(self, buffer: Buffer, record: Record) -> bool:
        """Write one rank's part of a step from a buffer to storage. Returns True if that completed the step.

        Writes nothing and returns False if storage has the step, or the buffer has only a piece of a replicated step.
        Raises StorageError if storage refused the part, or the buffer was overwritten meanwhile.
        """
        try:
            layout = buffer.layout(record)
            if self._is_taken(record.step) or (layout.replicated and not layout.whole):
                return False
            return self._store(buffer, record, layout.alone() if layout.whole else layout)
        except (IncompleteBuffer, NotReadable) as error:
            raise StorageError(f"step {record.step} was not stored: {error}") from None

    def _step_directories(self) -> list[int]:
        """Steps that have a directory, committed or not."""
        return [int(match[1]) for name in self._names() if (match := _STEP.fullmatch(name))]

    @abc.abstractmethod
    def _names(self) -> list[str]:
        """What storage has at its top, by name. Raises NotReadable if storage does not answer."""

    @abc.abstractmethod
    def _is_taken(self, step: int) -> bool:
        """True if a step is in storage already and must not be written again."""

    @abc.abstractmethod
    def _store(self, buffer: Buffer, record: Record, layout: Layout) -> bool: ...

    def _expired(self, steps: list[int]) -> list[int]:
        old = steps[: -self._keep_last] if self._keep_last else []
        return [step for step in old if not self._keep_every or step % self._keep_every]


class Storage(StepStorage):
    """The checkpoints in one directory. All ranks of the job must see this directory."""

    def __init__(self, directory: str | Path, *, keep_last: int = 0, keep_every: int = 0) -> None:
        """Use `directory`. The first write creates it. `keep_last` and `keep_every` are those of `StepStorage`."""
        super().__init__(keep_last=keep_last, keep_every=keep_every)
        self.directory = Path(directory).absolute()

    def path(self, step: int) -> Path:
        """The directory of a committed step, for `torch.distributed.checkpoint.load`."""
        return self.directory / f"step-{step}"

    def draft(self, step: int, attempt: str) -> Path:
        """The directory for the parts of an uncommitted step; created if necessary."""
        path = self.directory / f".step-{step}.{attempt_word(attempt)}"
        path.mkdir(parents=True, exist_ok=True)
        return path

    def check_writable(self) -> None:
        """Create and remove a file as a test. Raises NotWritable if that fails and waiting does not cure the error.

        Other errors are ignored here, because they may be over when `store` is called.
        """
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            probe = self.directory / probe_name()
            probe.touch()
            probe.unlink(missing_ok=True)
        except OSError as error:
            if is_hopeless(error) or isinstance(error, FileNotFoundError):  # its parents cannot be made, as in /proc
                raise unwritable(error, str(self.directory)) from None

    def _is_taken(self, step: int) -> bool:
        try:
            return self.path(step).exists()
        except OSError as error:  # as of a network file system that was mounted anew
            raise not_stored(error, step, str(self.directory)) from error

    def _store(self, buffer: Buffer, record: Record, layout: Layout) -> bool:
        try:
            draft = self.draft(record.step, layout.attempt)
            if layout.stored:
                with new_file(draft / data_file(layout.rank)) as target:
                    _copy(buffer, record, layout.stored, target)
            sums = sealed(buffer, record)[: chunks(layout.stored)]
            return self.finish(draft, record.step, layout, sums)
        except OSError as error:
            raise not_stored(error, record.step, str(self.directory)) from error

    def finish(self, draft: Path, step: int, layout: Layout, sums: Iterable[int]) -> bool:
        """Write this rank's part file into `draft`, and commit the step if no part is missing then.

        Call this only if the rank's data is in `draft` already. Returns True if this call committed the step.
        """
        write_atomically(draft / part_file(layout.rank), Part.of(layout, step, sums).encode())
        try:
            if not {part_file(rank) for rank in range(layout.world)} <= set(os.listdir(draft)):
                return False  # decided by the names: only the last of the ranks needs to read the parts
            parts = self._parts(draft)
            if [part.rank for part in parts] != list(range(layout.world)):
                return False  # another writer is removing the draft
            write_atomically(draft / METADATA, metadata(parts))
            _sync(draft)
            os.rename(draft, self.path(step))
        except (OSError, IncompleteBuffer):
            if self.path(step).exists():  # another writer was quicker, or an earlier attempt stored this step
                shutil.rmtree(draft, ignore_errors=True)
                return False
            raise
        _sync(self.directory)
        self.sweep()
        return True

    def progress(self, step: int) -> int:
        """A number that changes while a step is being written. If two calls return the same, no rank seems to write it.

        In a directory the number counts files and bytes; in an object store, it counts only files.
        """
        size = 0
        with contextlib.suppress(OSError, NotReadable):  # a draft that has just been committed
            for name in self._names():
                if (draft := _DRAFT.fullmatch(name)) and int(draft[1]) == step:
                    size += sum(1 + file.stat().st_size for file in os.scandir(self.directory / name))
        return size

    def where(self, step: int) -> str:
        """The directory or URL of a committed step, as torch's DCP readers take it."""
        return str(self.path(step))

    def has(self, step: int) -> bool:
        try:
            return stat.S_ISREG(os.stat(self.path(step) / METADATA).st_mode)
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError as error:
            raise not_read(error, str(self.path(step))) from None

    def parts(self, step: int) -> list[Part]:
        """The parts of a step, sorted by rank; empty if DCP wrote the step without resile.

        Raises IncompleteBuffer if a part is damaged or `.metadata` does not belong to the parts. Raises NotReadable if
        storage cannot be read.
        """
        with self._reading(step, "its parts"):
            parts = self._parts(self.path(step))
        if parts and self.metadata(step) != metadata(parts):
            raise IncompleteBuffer(f"{METADATA} is not what was written")
        return parts

    def metadata(self, step: int) -> bytes:
        """The contents of DCP's `.metadata`. Raises IncompleteBuffer if it is missing, NotReadable if unreadable."""
        with self._reading(step, METADATA):
            return (self.path(step) / METADATA).read_bytes()

    @contextlib.contextmanager
    def data(self, step: int, part: Part) -> Iterator[IO[bytes]]:
        """Open the file with a part's data, for use in a `with` block.

        Raises IncompleteBuffer if the file is missing, and NotReadable if opening it or reading it in the block fails.
        """
        name = data_file(part.rank)
        with self._reading(step, name), (self.path(step) / name).open("rb") as file:
            yield file

    @contextlib.contextmanager
    def _reading(self, step: int, name: str) -> Iterator[None]:
        """Translate an OSError of a `with` block that reads a step. `name` is what is read, for messages.

        The error becomes IncompleteBuffer if a file of the step is missing, and NotReadable in all other cases.
        """
        try:
            yield
        except OSError as error:
            if isinstance(error, FileNotFoundError) and os.path.isdir(self.path(step)):
                raise IncompleteBuffer(f"{name} is not there") from None
            raise not_read(error, f"{name} in {self.path(step)}") from None

    @staticmethod
    def _parts(path: Path) -> list[Part]:
        names = sorted(filter(_PART.fullmatch, os.listdir(path)))
        return decode_parts((name, (path / name).read_bytes()) for name in names)

    def set_aside(self, step: int) -> str:
        """Rename a damaged step, so that users can inspect it but no restore finds it.

        Returns the new name; empty if storage refused.
        """
        for number in range(100):
            name = f"damaged-step-{step}{f'.{number}' if number else ''}"
            with contextlib.suppress(OSError):
                os.rename(self.path(step), self.directory / name)
                return name
        return ""

    def sweep(self) -> None:
        """Remove steps that `keep_last` and `keep_every` do not keep. Remove drafts of steps before the newest step."""
        try:
            steps = self.steps()
        except NotReadable:  # the next writer tries again
            return
        if not steps:
            return
        newest = steps[-1]
        for name in self._names():
            old = _DRAFT.fullmatch(name)
            if old and int(old[1]) < newest:
                self._remove(self.directory / name)
            elif name.startswith(_DOOMED):
                shutil.rmtree(self.directory / name, ignore_errors=True)
        for step in self._expired(steps):
            self._remove(self.path(step))

    def _remove(self, path: Path) -> None:
        """Rename a directory, then remove it. After the rename, no other process reads half of it or commits it."""
        doomed = self.directory / f"{_DOOMED}{path.name.lstrip('.')}"
        with contextlib.suppress(OSError):
            os.rename(path, doomed)
        shutil.rmtree(doomed, ignore_errors=True)

    def _names(self) -> list[str]:
        try:
            return os.listdir(self.directory)
        except FileNotFoundError:
            return []
        except OSError as error:
            raise not_read(error, str(self.directory)) from None


def decode_parts(files: Iterable[tuple[str, bytes]]) -> list[Part]:
    """Decode part files, given by name and contents, sorted by rank. Raises IncompleteBuffer if one is damaged."""
    parts = []
    for name, text in files:
        try:
            parts.append(Part.decode(text))
        except ValueError as error:
            raise IncompleteBuffer(f"{name} is not what was written: {error}") from None
    return sorted(parts, key=lambda part: part.rank)


def attempt_word(attempt: str) -> str:
    return re.sub(r"[^A-Za-z0-9_.-]", "_", attempt)


def open_storage(directory: str, *, keep_last: int = 0, keep_every: int = 0) -> Storage | ObjectStorage:
    """Open a directory, or an object store by its URL. Raises StorageError if the store cannot be opened."""
    if "://" not in directory:
        return Storage(directory, keep_last=keep_last, keep_every=keep_every)
    from resile.checkpoint.object_storage import ObjectStorage

    return ObjectStorage(directory, keep_last=keep_last, keep_every=keep_every)


def sealed(buffer: Buffer, record: Record) -> Sequence[int]:
    """Return the checksums of a buffer. If the process that filled the buffer did not write them, write them now.

    Raises IncompleteBuffer if the checksums are damaged, or the buffer was overwritten meanwhile.
    """
    sums = buffer.sums(record)
    if sums is not None:
        return sums
    made = sums_of(buffer.map(), record.data_at, buffer.layout(record))
    if buffer.record() != record:
        raise IncompleteBuffer("a newer step took its place in memory")
    buffer.seal(record, made)
    return made


def part_file(rank: int, attempt: str = "") -> str:
    """The name of the file that describes a rank's part. `attempt` is as in `data_file`."""
    return f"__{rank}.{attempt}.resile.json" if attempt else f"__{rank}.resile.json"


def _copy(buffer: Buffer, record: Record, length: int, target: int) -> None:
    at, end = record.data_at, record.data_at + length
    while at < end:
        at += os.sendfile(target, buffer.descriptor, at, min(_BLOCK, end - at))
        if buffer.record() != record:  # also if the buffer ended early, and nothing was copied
            raise IncompleteBuffer("a newer step took its place in memory")


def _sync(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
