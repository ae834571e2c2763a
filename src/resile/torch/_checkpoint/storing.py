"""Brings saves to storage: from a buffer in the background, or directly when there is no memory for a buffer.

From buffers, one save at a time. With both buffers on their way to storage, the next save would have no buffer to go
to. A save that is due meanwhile is deferred, and is lost to storage if its buffer is overwritten first.

This module also tests before training begins whether storage can be written, instead of failing at the first step.
Under an agent it is the agent that writes, as the same user on the same machine, so the result holds for it too.
"""

from __future__ import annotations

import contextlib
import functools
import os
import tempfile
from collections.abc import Callable

import msgspec

from resile.checkpoint.buffer import Buffer
from resile.checkpoint.dcp_metadata import data_file
from resile.checkpoint.errors import NotWritable
from resile.checkpoint.layout import Layout
from resile.checkpoint.memory_client import MemoryClient
from resile.checkpoint.object_storage import ObjectStorage
from resile.checkpoint.storage import Storage
from resile.checkpoint.torchrun_buffers import ProcessBuffers
from resile.common.atomic_files import new_file
from resile.common.log_once import LogOnce
from resile.torch._checkpoint.flatten import Leaf
from resile.torch._checkpoint.packing import PackedState
from resile.torch._support.error_file import recorded_in_error_file

_BLOCK = 64 << 20


class StoreQueue:
    """The saves of one rank that wait for storage."""

    def __init__(
        self,
        memory: MemoryClient | ProcessBuffers,
        once: LogOnce,
        submit: Callable[[Callable[[], None]], object],
    ) -> None:
        """`submit` runs a function on the thread that computes checksums, after all functions submitted before."""
        self._memory = memory
        self._log_once = once
        self._submit = submit
        self._requested = 0
        """The sequence number of the last save that was sent to storage; 0 once `wait` has waited for the save."""
        self._error = ""
        """Why storage refused the last save that `wait` waited for; empty if storage has the save."""
        self.deferred: tuple[int, int] | None = None
        """Buffer and sequence number of a save that was due while storage was busy with the previous one.

        `follow_up` sends it unless its buffer was overwritten.
        """

    def reserve(self, number: int, sequence: int) -> None:
        """Keep a buffer from being overwritten until it is stored. Call `send` once the buffer has its checksums."""
        self._memory.buffers[number].want(sequence)
        self._requested = sequence

    def follow_up(self, overwritten: int | None) -> None:
        """Send the deferred save, if there is one. Call this only when storage is free.

        `overwritten` is the number of the buffer that the next save overwrites; None if no save follows. The deferred
        save is dropped if it is in that buffer, or if its buffer already contains another save.
        """
        deferred, self.deferred = self.deferred, None
        if deferred is None or deferred[0] == overwritten:
            return
        number, sequence = deferred
        if self._memory.buffers[number].sequence == sequence:
            if not any(each.wanted for each in self._memory.buffers):
                self._memory.buffers[number].want(sequence)
            self._requested = sequence
            self._submit(lambda: self.send(number, sequence))

    def send(self, number: int, sequence: int) -> None:
        """Have the agent write a buffer to storage. Without an agent, a thread of this process writes it."""
        if not self._memory.store(number, sequence):
            self._memory.buffers[number].release()
            self._log_once.say("storage gets no more checkpoints: the agent does not answer")

    def wait(self, timeout: float) -> None:
        """Wait until storage has the last save that was sent. Then send the deferred save and wait for it, too.

        Raises TimeoutError if a save takes longer than `timeout` seconds. If storage refused the last save, every call
        raises OSError.
        """
        self._await_requested(timeout)
        self.follow_up(None)  # storage may accept this one, even if it refused the one before
        self._await_requested(timeout)
        if self._error:
            raise OSError(self._error)

    def _await_requested(self, timeout: float) -> None:
        if self._requested:
            sequence, self._requested = self._requested, 0
            answer = self._memory.wait(sequence, timeout)
            if answer is None:
                self._requested = sequence
                raise TimeoutError(f"storage did not take the checkpoint within {timeout:g} s")
            self._error = answer


@recorded_in_error_file(NotWritable, permanent=True)
def check_writable(
    storage: Storage | ObjectStorage | None, tell: Callable[[str], list[str]] = lambda words: [words]
) -> None:
    """Write something to storage and remove it again. Raises NotWritable if storage will never accept a step.

    `tell` sends a text to all ranks and returns the texts of all ranks, so that all ranks raise the same error. The
    default is for a single rank.
    """
    words = ""
    try:
        if storage is not None:
            storage.check_writable()
    except NotWritable as error:
        words = str(error)
    if refusal := next(filter(None, tell(words)), ""):
        raise NotWritable(refusal)


def store_directly(storage: Storage | ObjectStorage, step: int, layout: Layout, leaves: list[Leaf]) -> None:
    """Write this rank's part to storage without a buffer. Raises OSError, StorageError or IncompleteBuffer."""
    if layout.is_anothers:
        return
    layout = layout.alone() if layout.whole else layout
    only = msgspec.structs.replace(layout, items=layout.stored_items(), length=layout.stored)
    sums: list[int] = []
    if isinstance(storage, ObjectStorage):
        with tempfile.TemporaryFile() as file:
            if only.length:
                sums = _fill_file(file.fileno(), only, leaves)
            storage.put(step, only, iter(functools.partial(file.read, _BLOCK), b""), sums)
        return
    draft = storage.draft(step, layout.attempt)
    if only.length:
        with new_file(draft / data_file(only.rank)) as descriptor:
            sums = _fill_file(descriptor, only, leaves)
    storage.finish(draft, step, only, sums)


def _fill_file(descriptor: int, layout: Layout, leaves: list[Leaf]) -> list[int]:
    """Write the leaves to an open file, as `layout` says, and return the checksums.

    Disk space is allocated first, because writing to a mapped page without disk space kills the process.
    """
    os.posix_fallocate(descriptor, 0, layout.length)
    with contextlib.closing(Buffer(os.dup(descriptor))) as file:
        packed = PackedState(file.map(), 0, layout)
        packed.write_frames()
        packed.fill(leaves)
        return packed.sums()
