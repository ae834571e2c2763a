"""What `torch.save` writes around the values of a tensor, computed once per type and shape.

It depends on nothing else; the checksums of the zip format are left out, and torch does not check them. So a save
copies raw values between two known pieces of bytes, and DCP can read the result.
"""

from __future__ import annotations

import functools
import io
from typing import Any, NamedTuple

import torch


class Frame(NamedTuple):
    before: bytes
    after: bytes


class _Sink(io.RawIOBase):
    """Collects what `torch.save` writes, except the values."""

    def __init__(self, nbytes: int) -> None:
        self._left = nbytes
        self._until_values: int | None = None
        """Writes left before the values, once the name of their record was seen."""
        self.before = bytearray()
        self.after = bytearray()
        self._size = 0

    def write(self, data: Any) -> int:
        size = len(data)
        self._size += size
        if self._until_values == 0 and self._left:
            self._left -= size
            return size
        piece = bytes(data)
        (self.after if self._until_values == 0 else self.before).extend(piece)
        if self._until_values:
            self._until_values -= 1
        elif self._until_values is None and piece.endswith(b"/data/0"):
            self._until_values = 1  # padding that aligns the values
        return size

    def tell(self) -> int:
        return self._size

    def writable(self) -> bool:
        return True


@functools.cache
def frame(dtype: Any, shape: tuple[int, ...]) -> Frame:
    tensor = torch.empty(shape, dtype=dtype)
    sink = _Sink(tensor.nbytes)
    crc = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(tensor, sink)
    finally:
        torch.serialization.set_crc32_options(crc)
    return Frame(bytes(sink.before), bytes(sink.after))
