"""A buffer of shared memory that holds one checkpoint of one rank and shows whether that checkpoint is complete.

A buffer is an anonymous file in memory (memfd). It has no name, so it disappears with the agent that owns it and the
processes that map it, however they end. The size of /dev/shm does not limit it.

    page 0     the commit record, the reader's mark, the seal
    page 1 …   the layout (JSON), the checksums, the data

The commit record is erased before the first byte changes and written after the last one. A process killed in between
leaves a buffer that is plainly not a checkpoint. The seal (checksums of the data) follows in the background. A process
killed before the seal leaves a complete checkpoint that cannot be checked for damage.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
import zlib
from array import array
from collections.abc import Sequence

import msgspec

from resile.checkpoint.layout import Layout, chunks

PAGE = 4096
_MAGIC = b"resile\x00\x01"
_RECORD = struct.Struct("<8sQQQQQQQ")  # magic, sequence, step, layout length, layout crc, sums at, data at, data length
_CRC = struct.Struct("<I")
_MARK_AT = 1024
_MARK = struct.Struct("<Q")
_SEAL_AT = 2048
_SEAL = struct.Struct("<QI")
_STORED_AT = 3072

MAX_LAYOUT = 1 << 30
"""Most bytes of a layout, as JSON; a hundred thousand tensors need a fiftieth of it."""


class IncompleteBuffer(Exception):
    """Raised if a buffer, or a step in storage, has no usable checkpoint. The message says why."""


class Record(msgspec.Struct, frozen=True):
    """The commit record of a checkpoint in a buffer. Its fields stand in the buffer in this order.

    `sequence` is the number of the save. `sums_at` and `data_at` are offsets in the buffer, in bytes.
    """

    sequence: int
    step: int
    layout_length: int
    layout_crc: int
    sums_at: int
    data_at: int
    length: int


def places(layout: int, length: int) -> tuple[int, int, int]:
    """Compute where checksums and data lie in a buffer with `layout` bytes of layout and `length` bytes of data.

    Returns the offset of the checksums, the offset of the data, and the size of the buffer.
    """
    sums_at = _up(PAGE + layout)
    data_at = _up(sums_at + 8 * (chunks(length) + 1))
    return sums_at, data_at, _up(data_at + length)


def _up(size: int) -> int:
    return -(-size // PAGE) * PAGE


class Buffer:
    """A buffer as one process sees it. Only the process of the buffer's own rank writes to it."""

    def __init__(self, descriptor: int) -> None:
        """Take over the file descriptor of a buffer. `close` closes it."""
        self.descriptor = descriptor
        self._map: mmap.mmap | None = None
        self._layout: tuple[tuple[int, int], Layout] | None = None

    @classmethod
    def make(cls, name: str) -> Buffer:
        descriptor = os.memfd_create(name, os.MFD_CLOEXEC)
        os.fchmod(descriptor, 0o600)
        return cls(descriptor)

    @property
    def size(self) -> int:
        return os.fstat(self.descriptor).st_size

    @property
    def untouched(self) -> int:
        """The number of bytes that were never written to. The kernel has not allocated memory for them."""
        state = os.fstat(self.descriptor)
        return max(0, state.st_size - 512 * state.st_blocks)

    def resize(self, size: int) -> None:
        """Grow to `size` bytes and keep the contents; never shrinks. Raises OSError if there is not enough memory."""
        if size > self.size:
            os.ftruncate(self.descriptor, size)

    def map(self) -> mmap.mmap:
        size = self.size
        if self._map is None or len(self._map) != size:
            self._map = mmap.mmap(self.descriptor, max(size, 1))
        return self._map

    def close(self) -> None:
        """Close the file. Other processes that map the memory keep it until they unmap it."""
        if self._map is not None:
            with contextlib.suppress(BufferError):
                self._map.close()
        self._map = None
        with contextlib.suppress(OSError):
            os.close(self.descriptor)

    # writing -------------------------------------------------------------------------------------------------------

    def begin(self, layout: bytes, length: int) -> tuple[int, int]:
        """Erase the commit record, write the layout, and return the offsets of the checksums and the data.

        Until the next `commit` the buffer holds no checkpoint. If the buffer is too small, raises ValueError and
        changes nothing.
        """
        sums_at, data_at, size = places(len(layout), length)
        if self.size < size:
            raise ValueError(f"a buffer of {self.size} bytes cannot hold {size}")
        memory = self.map()
        memory[:_MARK_AT] = bytes(_MARK_AT)
        memory[_SEAL_AT:PAGE] = bytes(PAGE - _SEAL_AT)
        memory[PAGE : PAGE + len(layout)] = layout
        return sums_at, data_at

    def commit(self, sequence: int, step: int, layout: bytes, length: int) -> Record:
        sums_at, data_at, _ = places(len(layout), length)
        record = Record(sequence, step, len(layout), zlib.crc32(layout), sums_at, data_at, length)
        fields = _RECORD.pack(_MAGIC, *msgspec.structs.astuple(record))
        self.map()[: len(fields) + _CRC.size] = fields + _CRC.pack(zlib.crc32(fields))
        return record

    def seal(self, record: Record, sums: Sequence[int]) -> None:
        """Write the checksums of the data. Does nothing if the buffer no longer holds the checkpoint of `record`."""
        memory, table = self.map(), array("q", sums).tobytes()
        if self.record() != record:
            return
        memory[record.sums_at : record.sums_at + len(table)] = table
        memory[_SEAL_AT : _SEAL_AT + _SEAL.size] = _SEAL.pack(record.sequence, zlib.crc32(table))

    def void(self) -> None:
        """Erase the commit record, so that the buffer has no checkpoint."""
        if self.size >= PAGE:
            self.map()[:_MARK_AT] = bytes(_MARK_AT)

    # reading -------------------------------------------------------------------------------------------------------

    def record(self) -> Record | None:
        """The commit record; None if there is none or its writing was cut short."""
        if self.size < PAGE:
            return None
        fields = self.map()[: _RECORD.size + _CRC.size]
        if _CRC.unpack_from(fields, _RECORD.size)[0] != zlib.crc32(fields[: _RECORD.size]):
            return None
        magic, *numbers = _RECORD.unpack_from(fields)
        if magic != _MAGIC:
            return None
        record = Record(*numbers)
        fits = record.layout_length <= MAX_LAYOUT and record.data_at + record.length <= self.size
        return record if fits else None

    @property
    def sequence(self) -> int:
        """The sequence number of the committed checkpoint; 0 if there is none."""
        record = self.record()
        return record.sequence if record is not None else 0

    def layout(self, record: Record) -> Layout:
        """The layout of the checkpoint of `record`. Raises IncompleteBuffer if it is damaged."""
        known = (record.sequence, record.layout_crc)
        if self._layout is None or self._layout[0] != known:
            text = self.map()[PAGE : PAGE + record.layout_length]
            if zlib.crc32(text) != record.layout_crc:
                raise IncompleteBuffer("its table of contents is damaged")
            try:
                self._layout = (known, Layout.decode(text, record.length))
            except ValueError as error:
                raise IncompleteBuffer(f"its table of contents cannot be read: {error}") from None
        return self._layout[1]

    def sums(self, record: Record) -> tuple[int, ...] | None:
        """The checksums of the data; None if `seal` did not write them. Raises IncompleteBuffer if they are damaged."""
        memory = self.map()
        sequence, crc = _SEAL.unpack_from(memory, _SEAL_AT)
        if sequence != record.sequence:
            return None
        table = memory[record.sums_at : record.sums_at + 8 * self.layout(record).sums]
        if zlib.crc32(table) != crc:
            raise IncompleteBuffer("its table of checksums is damaged")
        return tuple(array("q", table))

    # marks ---------------------------------------------------------------------------------------------------------

    @property
    def wanted(self) -> bool:
        """True from `want` to `release`. Meanwhile the checkpoint waits for storage or is being written to it."""
        return self.size >= PAGE and _MARK.unpack_from(self.map(), _MARK_AT)[0] != 0

    def want(self, sequence: int) -> None:
        """Ask the buffer's rank not to overwrite the checkpoint `sequence`."""
        _MARK.pack_into(self.map(), _MARK_AT, sequence)

    def release(self, sequence: int = 0) -> None:
        """Take back `want`. The buffer's rank may overwrite the checkpoint again.

        If `sequence` is not 0, only a `want` for the checkpoint `sequence` is taken back.
        """
        if self.wanted and sequence in (0, _MARK.unpack_from(self.map(), _MARK_AT)[0]):
            _MARK.pack_into(self.map(), _MARK_AT, 0)

    @property
    def stored(self) -> int:
        """The sequence number of this buffer's checkpoint if it is in storage already, otherwise 0."""
        return int(_MARK.unpack_from(self.map(), _STORED_AT)[0]) if self.size >= PAGE else 0

    def note_stored(self, record: Record) -> None:
        if self.record() == record:
            _MARK.pack_into(self.map(), _STORED_AT, record.sequence)
