"""The bytes of one rank's checkpoint. A save copies the state once into them, and a restore copies once from them.

Every tensor is in these bytes as `torch.save` writes it, so they go to storage unchanged.
"""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

import torch

from resile.checkpoint.buffer import IncompleteBuffer
from resile.checkpoint.layout import CHUNK, Layout, ObjectItem, TensorItem, chunks
from resile.torch._checkpoint.flatten import Leaf, LoadTarget, local
from resile.torch._checkpoint.parallel_copy import memcpies, memcpy, run_jobs
from resile.torch._checkpoint.pickling import pickled, unpickled
from resile.torch._checkpoint.rank_layout import Extent, extent_of, frame
from resile.torch._support.numpy_values import sums_of_rows

CHECKED = 64 * CHUNK
"""Bytes that are read from storage at a time for comparison with their checksums."""
COMPARED = 16 * CHUNK
"""Bytes that one thread compares with their checksums at a time."""
SHOWN = 3
"""How many tensors a message about damaged bytes names."""


class SlotTooSmall(Exception):
    """A value needs more bytes than its slot in the layout has, so the checkpoint needs a new layout."""


class Damaged(IncompleteBuffer):
    """The data is not what was saved; the text says where."""


class PackedState:
    """The bytes of one rank's checkpoint in `memory`, from `offset` on. `layout` says which leaf is where."""

    def __init__(self, memory: Any, offset: int, layout: Layout) -> None:
        self.layout = layout
        if layout.length:
            self.bytes = torch.frombuffer(memory, dtype=torch.uint8, offset=offset, count=layout.length)
        else:  # the leader of the node keeps everything
            self.bytes = torch.empty(0, dtype=torch.uint8)
        self._address = self.bytes.data_ptr()

    def write_frames(self) -> None:
        """Write the bytes before and after each tensor's values. They stay the same from save to save."""
        for item in self.layout.items:
            if isinstance(item, TensorItem):
                around = frame(getattr(torch, item.dtype), item.shape)
                self._put(item.offset, around.before)
                self._put(item.data + item.nbytes, around.after)

    def fill(self, leaves: Iterable[Leaf], threads: int = 1) -> None:
        """Copy the values of the leaves into the bytes. The previous contents are lost even if this raises.

        Raises SlotTooSmall if a value has outgrown its slot, and CannotRestore if no restore could read a value back.
        """
        by_key = {item.key: item for item in self.layout.items}
        copies: list[Callable[[], None]] = []
        for leaf in leaves:
            item = by_key.get(leaf.key)
            if isinstance(item, TensorItem):
                source = local(leaf.value).detach()
                if source.device.type == "cpu" and source.is_contiguous():
                    copies += memcpies(self._address + item.data, source.data_ptr(), item.nbytes)
                elif item.nbytes:
                    self._tensor(item).copy_(source)
            elif item is not None:
                data = pickled(leaf.value, leaf.key)
                if len(data) > item.length:
                    raise SlotTooSmall(item.key)
                self._put(item.offset, data.ljust(item.length, b"\0"))
        run_jobs(threads, copies)

    def sums(self) -> list[int]:
        """The checksum of each chunk: first of the chunks that go to storage, then of the others."""
        stored = self.layout.stored
        return [*self._sums(0, stored), *self._sums(stored, self.layout.length)]

    def check(self, sums: Sequence[int], threads: int = 1, *, base: int = 0) -> None:
        """Compare the bytes with these checksums, on `threads` threads. Raises Damaged if a checksum differs.

        `base` is added to the offsets in the error's text.
        """
        run_jobs(threads, self.checks(sums, base=base))

    def checks(self, sums: Sequence[int], *, base: int = 0) -> list[Callable[[], None]]:
        """The work of `check` as functions that threads can share. Each of them may raise Damaged."""
        stored, first = self.layout.stored, chunks(self.layout.stored)
        spans = ((0, stored, sums[:first]), (stored, self.layout.length, sums[first:]))
        return [
            functools.partial(
                self._check, at, min(at + COMPARED, end), base, wanted[number : number + COMPARED // CHUNK]
            )
            for start, end, wanted in spans
            for number, at in zip(range(0, len(wanted), COMPARED // CHUNK), range(start, end, COMPARED), strict=True)
        ]

    def read(self, load_target: LoadTarget, threads: int = 1, *, values: bool = True) -> None:
        """Copy what this rank needs into the state. Of a sharded tensor, copy only the overlap with this rank's piece.

        If `values` is False, tensors are copied and pickled values are not. If a tensor has another shape in the state,
        this raises StateMismatch before anything is copied.
        """
        run_jobs(threads, self._copies(load_target))
        for item in self.layout.items if values else ():
            if isinstance(item, ObjectItem) and load_target.wants(item.path):
                data = ctypes.string_at(self._address + item.offset, item.length)
                load_target.value(item.path, unpickled(data))

    def _copies(self, load_target: LoadTarget) -> list[Callable[[], None]]:
        copies: list[Callable[[], None]] = []
        for item in self.layout.items:
            if isinstance(item, TensorItem) and load_target.wants(item.path):
                whole = load_target.tensor(item.path, getattr(torch, item.dtype), item.full, array=item.array)
                target = local(whole).detach()
                here = extent_of(whole)
                shared = here.overlap(Extent(item.origin, item.shape))
                if shared is None:
                    continue
                load_target.cover(item.path, shared.origin, math.prod(shared.shape))
                alike = target.device.type == "cpu" and target.is_contiguous() and str(target.dtype)[6:] == item.dtype
                if alike and here.shape == item.shape == shared.shape:
                    copies += memcpies(target.data_ptr(), self._address + item.data, item.nbytes)
                else:
                    source = self._tensor(item)[shared.within(item.origin)]
                    copies.append(functools.partial(target[shared.within(here.origin)].copy_, source))
        return copies

    def _check(self, start: int, end: int, base: int, expected: Sequence[int]) -> None:
        for number, (got, wanted) in enumerate(zip(self._sums(start, end), expected, strict=True)):
            if got != wanted:
                self._complain(start + number * CHUNK, min(start + (number + 1) * CHUNK, end), base)

    def _complain(self, start: int, end: int, base: int) -> NoReturn:
        inside = [item.key for item in self.layout.items if item.offset < end and start < item.offset + item.length]
        where = f"bytes {base + start} to {base + end}"
        names = ", ".join(inside[:SHOWN]) or "a filler"
        more = f" and {len(inside) - SHOWN} more" if len(inside) > SHOWN else ""
        raise Damaged(f"the checksum of {where} is wrong, in {names}{more}")

    def _sums(self, start: int, end: int) -> list[int]:
        found: list[int] = []
        for at in range(start, end, COMPARED):
            stop = min(at + COMPARED, end)
            whole = at + (stop - at) // CHUNK * CHUNK
            found += sums_of_rows(self.bytes[at:whole].view(torch.int64).view(-1, CHUNK // 8))
            if whole < stop:
                found.append(int(self.bytes[whole:stop].view(torch.int64).sum()))
        return found

    def _tensor(self, item: TensorItem) -> Any:
        return self.bytes[item.data : item.data + item.nbytes].view(getattr(torch, item.dtype)).view(item.shape)

    def _put(self, offset: int, data: bytes) -> None:
        memcpy(self._address + offset, data, len(data))
