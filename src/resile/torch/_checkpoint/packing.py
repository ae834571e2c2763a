"""The bytes of one rank's checkpoint: laid out once, filled at every save with one copy, read back with one.

Every tensor stands in the data as `torch.save` writes it. What surrounds the raw values there depends on type and shape
only (the checksums of the zip format are left out; torch does not look at them), so it is made once per shape, from
a tensor that is never touched.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import io
import math
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, NoReturn

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Replicate, Shard

from resile.checkpoint.layout import CHUNK, Item, Layout, ObjectItem, TensorItem, chunks
from resile.torch._checkpoint.flatten import Leaf, LoadTarget, local, refuse_duplicates
from resile.torch._checkpoint.pickling import pickled, unpickled
from resile.torch._support.numpy_values import sums_of_rows

ALIGN = 64
SMALLEST_SLOT = 512
PIECE = 16 << 20
"""Bytes that one thread copies at a time."""
CHECKED = 64 * CHUNK
"""Bytes of storage that are read, to be compared with their checksums, at a time."""
COMPARED = 16 * CHUNK
"""Bytes that one thread compares with their checksums at a time."""
SHOWN = 3
"""Tensors in damaged bytes that a message names."""
THREADS = 4
"""At most, while training stands still for them."""
_memcpy = ctypes.CDLL(None).memcpy  # unlike ctypes.memmove it lets other threads run
_memcpy.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
_memcpy.restype = None


class SlotTooSmall(Exception):
    """A value has outgrown its place: the checkpoint must be laid out anew."""


class Damaged(Exception):
    """What is there is not what was saved; the text says where."""


class Frame(NamedTuple):
    """What `torch.save` writes around the values of a tensor."""

    before: bytes
    after: bytes


class _Sink(io.RawIOBase):
    """Takes what `torch.save` writes, except the values."""

    def __init__(self, nbytes: int) -> None:
        self._left = nbytes
        self._until_values: int | None = None
        """Writes that come before the values, once the name of their record was seen."""
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
            self._until_values = 1  # a filler that aligns the values
        return size

    def tell(self) -> int:
        return self._size

    def writable(self) -> bool:
        return True


@functools.cache
def frame(dtype: Any, shape: tuple[int, ...]) -> Frame:
    """The frame of a tensor."""
    tensor = torch.empty(shape, dtype=dtype)
    sink = _Sink(tensor.nbytes)
    crc = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(tensor, sink)
    finally:
        torch.serialization.set_crc32_options(crc)
    return Frame(bytes(sink.before), bytes(sink.after))


class Piece(NamedTuple):
    """Where a tensor's part on this rank lies in the whole."""

    shape: tuple[int, ...]
    full: tuple[int, ...]
    origin: tuple[int, ...]
    first: bool
    """No other rank has the same part, or this is the one of them that stores it."""


def piece_of(tensor: Any) -> Piece:
    """This rank's part of a sharded tensor."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    mesh, placements = tensor.device_mesh, tensor.placements
    if not all(isinstance(placement, Shard | Replicate) for placement in placements):
        raise TypeError(f"a tensor with the placements {placements} cannot be saved")
    shape, origin = compute_local_shape_and_global_offset(tensor.shape, mesh, placements)
    coordinate = mesh.get_coordinate() or [0] * len(placements)
    first = all(at == 0 for at, placement in zip(coordinate, placements, strict=True) if placement.is_replicate())
    return Piece(tuple(shape), tuple(tensor.shape), tuple(origin), first)


class Extent(NamedTuple):
    """A block of a tensor."""

    origin: tuple[int, ...]
    shape: tuple[int, ...]

    def overlap(self, other: Extent) -> Extent | None:
        """What two blocks of one tensor have in common; None: nothing."""
        origin = tuple(map(max, self.origin, other.origin))
        ends = [min(a + b, c + d) for a, b, c, d in zip(*self, *other, strict=True)]
        shape = tuple(end - start for start, end in zip(origin, ends, strict=True))
        return Extent(origin, shape) if all(size > 0 for size in shape) else None

    def within(self, origin: tuple[int, ...]) -> tuple[slice, ...]:
        """Where this block is in one around it that begins at `origin`."""
        return tuple(
            slice(at - base, at - base + size) for at, base, size in zip(self.origin, origin, self.shape, strict=True)
        )


def _extent(tensor: Any) -> Extent:
    """What this rank has of a tensor."""
    if isinstance(tensor, DTensor):
        piece = piece_of(tensor)
        return Extent(piece.origin, piece.shape)
    return Extent((0,) * tensor.dim(), tuple(tensor.shape))


class Saver(NamedTuple):
    """Who lays out."""

    rank: int
    world: int
    leads: bool
    """It keeps what all ranks of its node have alike."""
    attempt: str


def lay_out(leaves: Iterable[Leaf], saver: Saver, **settings: Any) -> Layout:
    """Give every leaf that this rank keeps its place; what it writes to storage comes first.

    Raises:
        CannotRestore: a value could be written, but not read again.
        ValueError: two leaves have one name.
    """
    leaves = list(leaves)
    refuse_duplicates(leaves)
    stored: list[Callable[[int], Item]] = []
    others: list[Callable[[int], Item]] = []
    replicated = True
    for leaf in leaves:
        if not isinstance(leaf.value, torch.Tensor):
            (stored if saver.rank == 0 else others).append(functools.partial(_object_item, leaf))
        elif isinstance(leaf.value, DTensor):
            replicated = False
            piece = piece_of(leaf.value)
            stores = piece.first and math.prod(piece.shape) > 0
            (stored if stores else others).append(functools.partial(_tensor_item, leaf, piece))
        elif _keeps(saver, leaf):
            shape = tuple(leaf.value.shape)
            whole = Piece(shape, shape, (0,) * len(shape), True)
            (stored if saver.rank == 0 else others).append(functools.partial(_tensor_item, leaf, whole))
    items: list[Item] = []
    end = boundary = 0
    for group in (stored, others):
        for make in group:
            items.append(make(end))
            end = _align(end + items[-1].length)
        boundary = end if group is stored else boundary
    return Layout(
        rank=saver.rank,
        world=saver.world,
        attempt=saver.attempt,
        replicated=replicated,
        whole=replicated and (saver.leads or saver.rank == 0),
        length=end,
        stored=boundary,
        items=tuple(items),
        **settings,
    )


def _object_item(leaf: Leaf, offset: int) -> Item:
    need = len(pickled(leaf.value, leaf.key))
    length = SMALLEST_SLOT
    while length < need + need // 2:
        length *= 2
    return ObjectItem(key=leaf.key, path=leaf.path, offset=offset, length=length)


def _tensor_item(leaf: Leaf, piece: Piece, offset: int) -> Item:
    dtype = leaf.value.dtype
    around = frame(dtype, piece.shape)
    nbytes = math.prod(piece.shape) * dtype.itemsize
    return TensorItem(
        key=leaf.key,
        path=leaf.path,
        offset=offset,
        length=len(around.before) + nbytes + len(around.after),
        data=offset + len(around.before),
        nbytes=nbytes,
        dtype=str(dtype).removeprefix("torch."),
        shape=piece.shape,
        full=piece.full,
        origin=piece.origin,
        array=leaf.array,
    )


def _align(offset: int) -> int:
    return -(-offset // ALIGN) * ALIGN


def _keeps(saver: Saver, leaf: Leaf) -> bool:
    """Whether a rank has this leaf in its checkpoint: what all ranks have alike is kept once per node."""
    plain = isinstance(leaf.value, torch.Tensor) and not isinstance(leaf.value, DTensor)
    return not plain or saver.leads or saver.rank == 0


def still_fits(layout: Layout, leaves: Iterable[Leaf], saver: Saver) -> bool:
    """Whether these leaves still are what was laid out (a value may yet have outgrown its slot)."""
    if (layout.rank, layout.world, layout.attempt) != (saver.rank, saver.world, saver.attempt):
        return False
    by_key = {item.key: item for item in layout.items}
    kept = [leaf for leaf in leaves if _keeps(saver, leaf)]
    return len(kept) == len(by_key) and all(_is_of(by_key.get(leaf.key), leaf) for leaf in kept)


def _is_of(item: Item | None, leaf: Leaf) -> bool:
    value = leaf.value
    if isinstance(item, TensorItem) and isinstance(value, torch.Tensor):
        alike = tuple(value.shape) == item.full and item.array == leaf.array
        return alike and str(value.dtype) == f"torch.{item.dtype}"
    return isinstance(item, ObjectItem) and not isinstance(value, torch.Tensor)


class PackedState:
    """The data of one buffer, as torch sees it."""

    def __init__(self, memory: Any, offset: int, layout: Layout) -> None:
        """The data begin at `offset` of the memory."""
        self.layout = layout
        if layout.length:
            self.bytes = torch.frombuffer(memory, dtype=torch.uint8, offset=offset, count=layout.length)
        else:  # a rank whose node's leader keeps everything
            self.bytes = torch.empty(0, dtype=torch.uint8)
        self._address = self.bytes.data_ptr()

    def write_frames(self) -> None:
        """Write all that does not change from save to save."""
        for item in self.layout.items:
            if isinstance(item, TensorItem):
                around = frame(getattr(torch, item.dtype), item.shape)
                self._put(item.offset, around.before)
                self._put(item.data + item.nbytes, around.after)

    def fill(self, leaves: Iterable[Leaf], threads: int = 1) -> None:
        """Copy the values in.

        Raises:
            SlotTooSmall: some value needs more room; what was there is gone.
            CannotRestore: some value has become one that cannot be read again; the same.
        """
        by_key = {item.key: item for item in self.layout.items}
        copies: list[Callable[[], None]] = []
        for leaf in leaves:
            item = by_key.get(leaf.key)
            if isinstance(item, TensorItem):
                source = local(leaf.value).detach()
                if source.device.type == "cpu" and source.is_contiguous():
                    copies += _memcpies(self._address + item.data, source.data_ptr(), item.nbytes)
                elif item.nbytes:
                    self._tensor(item).copy_(source)
            elif item is not None:
                data = pickled(leaf.value, leaf.key)
                if len(data) > item.length:
                    raise SlotTooSmall(item.key)
                self._put(item.offset, data.ljust(item.length, b"\0"))
        run_jobs(threads, copies)

    def sums(self) -> list[int]:
        """The checksums: of every chunk of what goes to storage, then of the rest."""
        stored = self.layout.stored
        return [*self._sums(0, stored), *self._sums(stored, self.layout.length)]

    def check(self, sums: Sequence[int], threads: int = 1, *, base: int = 0) -> None:
        """Compare every byte with the checksums; `base` is where these bytes begin in what the message speaks of.

        Raises:
            Damaged: one does not fit.
        """
        run_jobs(threads, self.checks(sums, base=base))

    def checks(self, sums: Sequence[int], *, base: int = 0) -> list[Callable[[], None]]:
        """The same, as jobs that threads can share; each raises Damaged if one does not fit."""
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
        """Copy what this rank has use for to where it belongs: of a sharded tensor, what lies in this rank's part.

        Raises:
            StateMismatch: a tensor has another shape in the state; nothing was copied.
        """
        run_jobs(threads, self._copies(load_target))
        for item in self.layout.items if values else ():
            if isinstance(item, ObjectItem) and load_target.wants(item.path):
                load_target.value(item.path, unpickled(self._slice(item.offset, item.length)))

    def _copies(self, load_target: LoadTarget) -> list[Callable[[], None]]:
        copies: list[Callable[[], None]] = []
        for item in self.layout.items:
            if isinstance(item, TensorItem) and load_target.wants(item.path):
                whole = load_target.tensor(item.path, getattr(torch, item.dtype), item.full, array=item.array)
                target = local(whole).detach()
                here = _extent(whole)
                shared = here.overlap(Extent(item.origin, item.shape))
                if shared is None:
                    continue
                load_target.cover(item.path, shared.origin, math.prod(shared.shape))
                alike = target.device.type == "cpu" and target.is_contiguous() and str(target.dtype)[6:] == item.dtype
                if alike and here.shape == item.shape == shared.shape:
                    copies += _memcpies(target.data_ptr(), self._address + item.data, item.nbytes)
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
        """Of every chunk between the two; many at once, and in this thread alone."""
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

    def _slice(self, offset: int, length: int) -> bytes:
        return ctypes.string_at(self._address + offset, length)

    def _put(self, offset: int, data: bytes) -> None:
        _memcpy(self._address + offset, data, len(data))


def _memcpies(target: int, source: int, nbytes: int) -> list[Callable[[], None]]:
    """One copy, in pieces that several threads can share."""
    return [
        functools.partial(_memcpy, target + at, source + at, min(PIECE, nbytes - at)) for at in range(0, nbytes, PIECE)
    ]


def copying_threads(nbytes: int) -> int:
    """How many threads to copy with: memory is faster than one of them, but only cores that are idle help.

    Idle now, that is: the load average of the last minute would count what this process itself did before. Its own
    threads do not count: training waits for the copy, and those that torch added with spin for a while after it.
    """
    if nbytes <= PIECE:
        return 1
    cores = len(os.sched_getaffinity(0))
    try:
        others = _running() - _running_here()
    except (OSError, ValueError, IndexError):
        return 1
    return max(1, min(THREADS, cores, cores - others))


def _running() -> int:
    """Threads of this machine that run or want to."""
    with open("/proc/loadavg") as file:
        return int(file.read().split()[3].partition("/")[0])


def _running_here() -> int:
    """Those of this process, this one among them."""
    running = 0
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError), open(f"/proc/self/task/{thread}/stat") as file:
            running += file.read().rpartition(")")[2].split()[0] == "R"
    return running


def run_jobs(threads: int, jobs: Iterable[Callable[[], None]]) -> None:
    """Do all jobs on a few threads, this one among them; raises what one of them raises.

    Args:
        threads: how many, with this one.
        jobs: whoever is free takes the next. An iterator of a list may be shared by several calls.
    """
    rest = iter(jobs)

    def do() -> None:
        for job in rest:
            job()

    if threads <= 1:
        do()
        return
    with ThreadPoolExecutor(threads - 1) as pool:
        others = [pool.submit(do) for _ in range(threads - 1)]
        do()
        for other in others:
            other.result()
