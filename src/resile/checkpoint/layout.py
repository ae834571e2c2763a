"""What is where in a checkpoint of one rank. Made by the training process; the agent moves bytes by it.

The bytes of a buffer are the bytes of the file that storage gets: every tensor stands there as `torch.save` would
write it (its frame does not depend on its contents, so it is written once), so saving is a copy of the tensors and
storing is a copy of the file.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from typing import Literal

import msgspec

Path = tuple[tuple[Literal["d", "l", "t"], str | int], ...]
"""From the top of the state to a leaf: each step is a key of a dictionary (d) or a place in a list (l) or tuple (t)."""


class TensorItem(msgspec.Struct, frozen=True, kw_only=True, tag="tensor", omit_defaults=True):
    """One tensor, or the piece of it that this rank has."""

    key: str
    """Its name in DCP: the steps of the path, joined by dots."""
    path: Path
    offset: int
    """Where its entry begins in the data."""
    length: int
    data: int
    """Where the raw values begin in the data."""
    nbytes: int
    dtype: str
    """As in `torch.float32`, without the `torch.`."""
    shape: tuple[int, ...]
    """Of this piece."""
    full: tuple[int, ...]
    """Of the whole tensor."""
    origin: tuple[int, ...]
    """Where this piece begins in the whole."""
    array: bool = False
    """It is saved from an array of numpy, and comes back as one."""


class ObjectItem(msgspec.Struct, frozen=True, kw_only=True, tag="object"):
    """One value that is no tensor, pickled by `torch.save` and padded with zeros to the length of its slot."""

    key: str
    path: Path
    offset: int
    length: int


Item = TensorItem | ObjectItem


MAX_WORLD = 1 << 20
"""Ranks; numbers beyond it come from somebody who means no good."""


def _check(rank: int, world: int, length: int, stored: int, items: Iterable[Item]) -> None:
    """See that everything lies within `length` bytes, before memory is taken or read by it.

    Raises:
        ValueError: it does not.
    """
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
    """All of one rank's part of a checkpoint, except the values."""

    rank: int
    world: int
    attempt: str
    """Parts of one step belong together only if they were made in the same attempt of the same world."""
    replicated: bool
    """Nothing in it belongs to this rank alone: any rank of any world can use it."""
    whole: bool = False
    """It has all of such a step, so that it can be the only part of one in storage."""
    length: int
    """Bytes of data."""
    stored: int
    """How many of them, from the start, this rank writes to storage; other ranks write the rest."""
    items: tuple[Item, ...]
    directory: str = ""
    """Where storage is; empty: nowhere."""
    keep_last: int = 0
    """How many steps storage keeps; 0: all."""
    keep_every: int = 0
    """Steps divisible by it are kept for ever; 0: none."""

    @classmethod
    def decode(cls, text: bytes, length: int) -> Layout:
        """What describes `length` bytes.

        Raises:
            ValueError: it is something else.
        """
        layout = msgspec.json.decode(text, type=cls)
        if layout.length != length:
            raise ValueError(f"it describes {layout.length} bytes, and there are {length}")
        _check(layout.rank, layout.world, layout.length, layout.stored, layout.items)
        return layout

    @property
    def sums(self) -> int:
        """How many checksums it has: what goes to storage has its own."""
        return chunks(self.stored) + chunks(self.length - self.stored)

    @property
    def is_anothers(self) -> bool:
        """Whether another rank brings all of the step to storage as long as nobody is lost: one of all of them does."""
        return self.replicated and self.rank > 0

    def alone(self) -> Layout:
        """How it is stored as the only part of a step; whoever else does the same is in an attempt of its own."""
        attempt = f"{self.attempt}-{self.rank}"
        return msgspec.structs.replace(self, rank=0, world=1, stored=self.length, attempt=attempt)

    def stored_items(self) -> tuple[Item, ...]:
        """What this rank writes to storage."""
        return tuple(item for item in self.items if item.offset < self.stored)


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's part of a step in storage: the file `__RANK.resile.json` beside `__RANK_0.distcp`."""

    step: int
    rank: int
    world: int
    length: int
    """Bytes of the .distcp file; 0: there is none."""
    sums: tuple[int, ...]
    """Of every CHUNK of the file."""
    items: tuple[Item, ...]
    crc: int = 0
    """Of this description itself, written with a 0 here."""

    @classmethod
    def of(cls, layout: Layout, step: int, sums: Iterable[int]) -> Part:
        """What a rank with this layout writes."""
        return cls(
            step=step,
            rank=layout.rank,
            world=layout.world,
            length=layout.stored,
            sums=tuple(sums),
            items=layout.stored_items(),
        )

    def encode(self) -> bytes:
        """As it is written to storage."""
        plain = msgspec.json.encode(msgspec.structs.replace(self, crc=0))
        return msgspec.json.encode(msgspec.structs.replace(self, crc=zlib.crc32(plain)))

    @classmethod
    def decode(cls, data: bytes) -> Part:
        """What was written.

        Raises:
            ValueError: it is something else, or not as it was written.
        """
        part = msgspec.json.decode(data, type=cls)
        if part.encode() != data:
            raise ValueError("its checksum is wrong")
        _check(part.rank, part.world, part.length, part.length, part.items)
        return part


CHUNK = 31 * 8192
"""Bytes that share a checksum: below the size from which torch spreads a sum over threads."""


def attempt_name(made: int, round_: str, world: int, floor: int) -> str:
    """What an attempt is called that was made at this moment, when `floor` was the highest sequence of all ranks."""
    return f"{made:x}.{round_}.{world}.{floor}"


def is_first(attempt: str, sequence: int) -> bool:
    """Whether a save was the first of its attempt: whoever was killed in it may have been the first to come so far."""
    words = attempt.split(".")
    return len(words) == 4 and words[3] == str(sequence - 1)


def made_at(attempt: str) -> int:
    """When an attempt was made: of two that got to the same step the later one counts. 0: nobody can tell."""
    try:
        return int(attempt.partition(".")[0], 16)
    except ValueError:
        return 0


def chunks(length: int) -> int:
    """How many checksums `length` bytes have."""
    return -(-length // CHUNK)
