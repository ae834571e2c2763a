"""Chooses which of its two buffers each rank overwrites with its part of a sharded step, so that one step survives.

A sharded step is usable only if every rank has its part. Before each save the ranks exchange what they hold and what
they may overwrite. All keep the newest save that all have and overwrite the other buffer, or all skip the step. If any
rank is killed during the save, the kept step is complete. No I/O.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import NamedTuple


class Copied(enum.IntEnum):
    """State of the copy of a rank's last save on another node."""

    READY = 0
    """The copy exists, or none is to be made."""
    BUSY = 1
    FAILED = 2


class SaverHello(NamedTuple):
    """What a rank tells a new group."""

    made: int
    """A number greater than that of every earlier group that this rank knows of."""
    in_memory: int
    """1 if its saves survive its process."""
    partnered: int
    """1 if another node keeps replicas for its node."""
    highest: int
    """The highest sequence that it knows of."""


class SaveStatus(NamedTuple):
    """What a rank tells the others before a save."""

    highest: int
    """The highest sequence that it has used."""
    copied: int
    has_room: int
    first: int
    """The sequence in its first buffer, if this group saved it; otherwise 0."""
    first_wanted: int
    """1 if that buffer is on its way to storage."""
    second: int
    second_wanted: int
    older_wanted: int
    """1 if the buffer with the lower sequence is on its way to storage."""


class BufferChoice(NamedTuple):
    """The buffer for a save."""

    number: int
    """Index of the buffer to overwrite."""
    busy: bool
    """True if any rank is still storing its other buffer; only one may be in flight."""


def to_keep(statuses: Sequence[SaveStatus], *, partnered: bool) -> int | None:
    """The sequence that no rank overwrites; 0 if each keeps its last save; None if all skip the step.

    Args:
        statuses: of all ranks.
        partnered: True if copies are made of the last two saves, so that only the older one may be overwritten.
    """
    common = set.intersection(*({each.first, each.second} for each in statuses)) - {0}
    if not common:  # this group has saved nothing yet
        return None if any(each.older_wanted for each in statuses) else 0
    for sequence in sorted(common, reverse=True)[: 1 if partnered else 2]:
        if not any(_is_wanted_beside(each, sequence) for each in statuses):
            return sequence
    return None


def _is_wanted_beside(status: SaveStatus, kept: int) -> bool:
    return bool(status.second_wanted if status.first == kept else status.first_wanted)
