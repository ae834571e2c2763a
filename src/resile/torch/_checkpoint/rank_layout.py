"""Decides which leaves of a state one rank keeps, and at which byte of its buffer each leaf begins.

A rank keeps its part of every sharded tensor. One rank of each node, its leader, keeps what all ranks have alike, and
rank 0 stores that. A layout stays valid as long as names, shapes and types stay the same, so that a save is one copy.
"""

from __future__ import annotations

import functools
import io
import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch

from resile.checkpoint.buffer import PAGE
from resile.checkpoint.layout import Item, Layout, ObjectItem, TensorItem
from resile.torch._checkpoint.flatten import Leaf, local, parts, refuse_duplicates
from resile.torch._checkpoint.pickling import pickled
from resile.torch._support.sharding import is_sharded

ALIGN = 64
SMALLEST_SLOT = 512
"""Minimum bytes for a value that is no tensor, because it may grow from save to save."""
_EXTRA_STATE = {"SGD": 0, "Adagrad": 0, "RMSprop": 1, "ASGD": 2, "Rprop": 2}
"""How many tensors of each parameter's size an optimizer adds at its first step. Others add two, as Adam does."""


class Frame(NamedTuple):
    """The bytes that `torch.save` writes around the values of a tensor. They depend on its type and shape alone.

    The checksums of the zip format would depend on the values. They are left out, and torch does not check them. A save
    therefore copies raw values between two known pieces of bytes, and DCP can read the result.
    """

    before: bytes
    after: bytes


class _Sink(io.RawIOBase):
    def __init__(self, nbytes: int) -> None:
        self._left = nbytes
        self._until_values: int | None = None
        """How many more calls of `write` come before the values; None until their file name was written."""
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


class Extent(NamedTuple):
    """A block of a tensor: the index of its first element, and its shape."""

    origin: tuple[int, ...]
    shape: tuple[int, ...]

    def overlap(self, other: Extent) -> Extent | None:
        origin = tuple(map(max, self.origin, other.origin))
        ends = [min(a + b, c + d) for a, b, c, d in zip(*self, *other, strict=True)]
        shape = tuple(end - start for start, end in zip(origin, ends, strict=True))
        return Extent(origin, shape) if all(size > 0 for size in shape) else None

    def within(self, origin: tuple[int, ...]) -> tuple[slice, ...]:
        """The slices that select this block in an enclosing block that begins at `origin`."""
        return tuple(
            slice(at - base, at - base + size) for at, base, size in zip(self.origin, origin, self.shape, strict=True)
        )


def extent_of(tensor: Any) -> Extent:
    """The block of a tensor that this rank has: its piece of a sharded tensor, or all of another one."""
    if not is_sharded(tensor):
        return Extent((0,) * tensor.dim(), tuple(tensor.shape))
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
    from torch.distributed.tensor.placement_types import Replicate, Shard

    if not all(isinstance(placement, Shard | Replicate) for placement in tensor.placements):
        raise TypeError(f"a tensor with the placements {tensor.placements} cannot be saved")
    shape, origin = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return Extent(tuple(origin), tuple(shape))


class Saver(NamedTuple):
    rank: int
    world: int
    leads: bool
    """True if the rank keeps what all ranks of its node have alike."""
    attempt: str


def lay_out(leaves: Iterable[Leaf], saver: Saver, **settings: Any) -> Layout:
    """Make a layout with the leaves that this rank keeps. The leaves that this rank writes to storage come first.

    `settings` are passed to `Layout`. Raises CannotRestore if a value could be written but not read again, and
    ValueError if two leaves have the same name.
    """
    leaves = list(leaves)
    refuse_duplicates(leaves)
    replicated = not any(is_sharded(leaf.value) for leaf in leaves)
    kept = [leaf for leaf in leaves if _keeps(saver, leaf)]
    stored = [leaf for leaf in kept if _stores(saver, leaf)]
    others = [leaf for leaf in kept if not _stores(saver, leaf)]
    items: list[Item] = []
    end = boundary = 0
    for leaf in stored + others:
        items.append(_item(leaf, end))
        end = _align(end + items[-1].length)
        if len(items) == len(stored):
            boundary = end
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


def _item(leaf: Leaf, offset: int) -> Item:
    if not isinstance(leaf.value, torch.Tensor):
        need = len(pickled(leaf.value, leaf.key))
        length = SMALLEST_SLOT
        while length < need + need // 2:
            length *= 2
        return ObjectItem(key=leaf.key, path=leaf.path, offset=offset, length=length)
    extent, dtype = extent_of(leaf.value), leaf.value.dtype
    around = frame(dtype, extent.shape)
    nbytes = math.prod(extent.shape) * dtype.itemsize
    return TensorItem(
        key=leaf.key,
        path=leaf.path,
        offset=offset,
        length=len(around.before) + nbytes + len(around.after),
        data=offset + len(around.before),
        nbytes=nbytes,
        dtype=str(dtype).removeprefix("torch."),
        shape=extent.shape,
        full=tuple(leaf.value.shape),
        origin=extent.origin,
        array=leaf.array,
    )


def _align(offset: int) -> int:
    return -(-offset // ALIGN) * ALIGN


def _keeps(saver: Saver, leaf: Leaf) -> bool:
    plain = isinstance(leaf.value, torch.Tensor) and not is_sharded(leaf.value)
    return not plain or saver.leads or saver.rank == 0


def _stores(saver: Saver, leaf: Leaf) -> bool:
    """True if this rank writes the leaf to storage. If several ranks have the same piece, the first writes it."""
    tensor = leaf.value
    if not is_sharded(tensor):
        return saver.rank == 0
    coordinate = tensor.device_mesh.get_coordinate() or [0] * len(tensor.placements)
    pairs = zip(coordinate, tensor.placements, strict=True)
    return all(at == 0 for at, placement in pairs if placement.is_replicate()) and local(tensor).numel() > 0


def still_fits(layout: Layout, leaves: Iterable[Leaf], saver: Saver) -> bool:
    """True if the layout has these leaves' names, shapes and types. A value may still need more bytes than its slot."""
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


def estimate_growth(state: Mapping[str, Any], *, leads: bool) -> int:
    """Estimate the bytes that optimizers will add to this rank's part at their first step. `leads` is as in `Saver`."""
    total = 0
    for _, part in parts(state):
        if isinstance(part, torch.optim.Optimizer):
            times = _EXTRA_STATE.get(type(part).__name__, 2)
            for group in part.param_groups:
                extra = times + sum(bool(group.get(option)) for option in ("momentum", "amsgrad", "centered"))
                for parameter in group["params"]:
                    mine = leads or is_sharded(parameter)
                    if mine and parameter.requires_grad and parameter not in part.state:
                        own = local(parameter)
                        total += extra * (own.numel() * own.element_size() + 2 * PAGE)
    return total
