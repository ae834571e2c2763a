"""The table of contents of one rank's checkpoint. The training process makes it, and the agent moves bytes by it.

The data in a buffer is byte for byte the file that goes to storage. Every tensor stands there as `torch.save` would
write it. The frame around its values does not depend on them and is written once, so saving only copies the values and
storing only copies the file.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from typing import Literal

import msgspec

Path = tuple[tuple[Literal["d", "l", "t"], str | int], ...]
"""The way from the top of the state to a leaf: keys of dictionaries (d) and positions in lists (l) and tuples (t)."""


class TensorItem(msgspec.Struct, frozen=True, kw_only=True, tag="tensor", omit_defaults=True):
    """The entry in a layout for a tensor, or for this rank's piece of a tensor."""

    key: str
    """The name in DCP: the path's keys, joined by dots."""
    path: Path
    offset: int
    """Where the entry (the tensor as `torch.save` writes it) begins in the data."""
    length: int
    data: int
    """Where the raw values begin in the data."""
    nbytes: int
    dtype: str
    """As in `torch.float32`, without the `torch.`."""
    shape: tuple[int, ...]
    full: tuple[int, ...]
    """Shape of the whole tensor."""
    origin: tuple[int, ...]
    """Where this piece begins in the whole tensor."""
    array: bool = False
    """True if it was a numpy array and is to be restored as one."""


class ObjectItem(msgspec.Struct, frozen=True, kw_only=True, tag="object"):
    """The entry in a layout for a value that is no tensor. `torch.save` pickles it; zeros pad it to `length` bytes."""

    key: str
    path: Path
    offset: int
    length: int


Item = TensorItem | ObjectItem


MAX_WORLD = 1 << 20
"""Ranks. A layout that names more is damaged or forged."""


def _check(rank: int, world: int, length: int, stored: int, items: Iterable[Item]) -> None:
    if not (0 <= rank < world <= MAX_WORLD and 0 <= stored <= length):
        raise ValueError(f"rank {rank} of {world} has {stored} of {length} bytes to store")
    for item in items:
        inside = 0 <= item.offset <= item.offset + item.length <= length
        if inside and isinstance(item, TensorItem):
            inside = item.offset <= item.data <= item.data + item.nbytes <= item.offset + item.length
            inside = inside and len(item.shape) == len(item.full) == len(item.origin)
            inside = inside and min((*item.shape, *item.full, *item.origin), default=0) >= 0
        if not inside:
            raise ValueError(f"the place of {item.key[:100]} is outside of it")


class Layout(msgspec.Struct, frozen=True, kw_only=True):
    """Describes one rank's part of a checkpoint: what lies where, without the values."""

    rank: int
    world: int
    attempt: str
    """The attempt's name. Parts of one step belong together only if the same attempt of the same world made them."""
    replicated: bool
    """True if nothing in this part belongs to its rank alone, so that any rank of any world can use the part."""
    whole: bool = False
    """True if this part has all of a replicated step and can be its only part in storage."""
    length: int
    stored: int
    """How many of the `length` bytes, from the start, this rank writes to storage. Other ranks write the rest."""
    items: tuple[Item, ...]
    directory: str = ""
    """The storage; empty if there is none."""
    keep_last: int = 0
    keep_every: int = 0

    @classmethod
    def decode(cls, text: bytes, length: int) -> Layout:
        """Decode the JSON of a layout for `length` bytes of data. Raises ValueError if `text` is no such layout."""
        layout = msgspec.json.decode(text, type=cls)
        if layout.length != length:
            raise ValueError(f"it describes {layout.length} bytes, and there are {length}")
        _check(layout.rank, layout.world, layout.length, layout.stored, layout.items)
        return layout

    @property
    def sums(self) -> int:
        """The number of checksums: one for each chunk. No chunk mixes bytes that this rank stores with other bytes."""
        return chunks(self.stored) + chunks(self.length - self.stored)

    @property
    def is_anothers(self) -> bool:
        """True if all ranks have the same state and this is not rank 0. Normally rank 0 stores such a step."""
        return self.replicated and self.rank > 0

    def alone(self) -> Layout:
        """Copy this layout as if its rank were alone in the world and its part were the whole step.

        The attempt of the copy contains the number of this rank, so that no two ranks write to the same files.
        """
        attempt = f"{self.attempt}-{self.rank}"
        return msgspec.structs.replace(self, rank=0, world=1, stored=self.length, attempt=attempt)

    def stored_items(self) -> tuple[Item, ...]:
        return tuple(item for item in self.items if item.offset < self.stored)


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """Describes one rank's part of a step in storage, in `__RANK.resile.json`. The data is in `__RANK_0.distcp`."""

    step: int
    rank: int
    world: int
    length: int
    """Bytes of the .distcp file; 0 if there is none."""
    sums: tuple[int, ...]
    """One checksum for every CHUNK bytes of the file."""
    items: tuple[Item, ...]
    crc: int = 0
    """Checksum of this description, computed with 0 in this field."""

    @classmethod
    def of(cls, layout: Layout, step: int, sums: Iterable[int]) -> Part:
        return cls(
            step=step,
            rank=layout.rank,
            world=layout.world,
            length=layout.stored,
            sums=tuple(sums),
            items=layout.stored_items(),
        )

    def encode(self) -> bytes:
        plain = msgspec.json.encode(msgspec.structs.replace(self, crc=0))
        return msgspec.json.encode(msgspec.structs.replace(self, crc=zlib.crc32(plain)))

    @classmethod
    def decode(cls, data: bytes) -> Part:
        """Decode a part from storage. Raises ValueError if the data is no part, or is damaged."""
        part = msgspec.json.decode(data, type=cls)
        if part.encode() != data:
            raise ValueError("its checksum is wrong")
        _check(part.rank, part.world, part.length, part.length, part.items)
        return part


CHUNK = 31 * 8192
"""Bytes that share a checksum: fewer than the number from which torch uses several threads for a sum."""


def attempt_name(made: int, round_: str, world: int, floor: int) -> str:
    """Make the name of an attempt that `world` ranks begin in the round `round_`.

    `made` is when it began, in nanoseconds since 1970. `floor` is the highest sequence number before the attempt.
    """
    return f"{made:x}.{round_}.{world}.{floor}"


def is_first(attempt: str, sequence: int) -> bool:
    """True if the checkpoint `sequence` is the first of its attempt."""
    words = attempt.split(".")
    return len(words) == 4 and words[3] == str(sequence - 1)


def made_at(attempt: str) -> int:
    """When an attempt began, in nanoseconds since 1970, read from its name; 0 if the name has no time."""
    try:
        return int(attempt.partition(".")[0], 16)
    except ValueError:
        return 0


def chunks(length: int) -> int:
    """Number of checksums for `length` bytes."""
    return -(-length // CHUNK)
