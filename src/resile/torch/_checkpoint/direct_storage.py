"""What a training process does with storage itself, without a buffer and an agent.

It tests whether storage can be written before training begins, instead of failing at the first step. Under an agent it
is the agent that writes, as the same user on the same machine, so the result holds for it too. It also stores a step
when there is no memory for a buffer. Then the file itself is filled, and training waits for the disk.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterator
from typing import IO

import msgspec

from resile.checkpoint.buffer import Buffer
from resile.checkpoint.dcp_metadata import data_file
from resile.checkpoint.errors import NotWritable
from resile.checkpoint.layout import Layout, chunks
from resile.checkpoint.object_storage import ObjectStorage
from resile.checkpoint.storage import Storage, new_file
from resile.torch._checkpoint.flatten import Leaf
from resile.torch._checkpoint.packing import PackedState
from resile.torch._support.error_file import recorded_in_error_file

_BLOCK = 64 << 20


@recorded_in_error_file(NotWritable, permanent=True)
def check_writable(
    storage: Storage | ObjectStorage | None, tell: Callable[[str], list[str]] = lambda words: [words]
) -> None:
    """Write something and remove it again.

    Args:
        storage: None passes the test.
        tell: exchanges messages between all ranks, so that all raise the same sentence; by default this rank is alone.

    Raises:
        NotWritable: storage will never accept a step, on this rank or on another.
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
    """Write this rank's part of a step.

    Raises:
        OSError, StorageError, IncompleteBuffer: storage refused it.
    """
    if layout.is_anothers:
        return
    layout = layout.alone() if layout.whole else layout
    only = msgspec.structs.replace(layout, items=layout.stored_items(), length=layout.stored)
    sums: list[int] = []
    if isinstance(storage, ObjectStorage):
        with tempfile.TemporaryFile() as file:
            sums = _fill_file(file.fileno(), only, leaves) if only.length else []
            storage.put(step, only, _blocks(file), sums)
        return
    draft = storage.draft(step, layout.attempt)
    if only.length:
        with new_file(draft / data_file(only.rank)) as descriptor:
            sums = _fill_file(descriptor, only, leaves)
    assert len(sums) == chunks(only.length)
    storage.finish(draft, step, only, sums)


def _blocks(file: IO[bytes]) -> Iterator[memoryview]:
    while block := file.read(_BLOCK):
        yield memoryview(block)


def _fill_file(descriptor: int, layout: Layout, leaves: list[Leaf]) -> list[int]:
    """Write a checkpoint through a mapping of the file. Returns the checksums.

    Raises:
        OSError: the disk is full. Space is allocated first, as writing to an unbacked page would kill the process.
    """
    os.posix_fallocate(descriptor, 0, layout.length)
    with contextlib.closing(Buffer(os.dup(descriptor))) as file:
        packed = PackedState(file.map(), 0, layout)
        packed.write_frames()
        packed.fill(leaves)
        return packed.sums()
