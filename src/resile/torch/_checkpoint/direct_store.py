"""Stores a step when there is no memory for a buffer: the file itself is filled, and training waits for the disk."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from typing import IO

import msgspec

from resile.checkpoint.buffer import Buffer
from resile.checkpoint.dcp_metadata import data_file
from resile.checkpoint.layout import Layout, chunks
from resile.checkpoint.object_storage import ObjectStorage
from resile.checkpoint.storage import Storage, new_file
from resile.torch._checkpoint.flatten import Leaf
from resile.torch._checkpoint.packing import PackedState

_BLOCK = 64 << 20


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
