"""Which of its two buffers each rank overwrites with its part of a sharded step: agreed by all, so that one step stays.

A step of shards is of use only if every rank has its part of it. So before each save the ranks tell each other what
they hold and what they may overwrite; all keep the newest save that all have, and overwrite the other buffer, or all
leave the step out. Whoever is killed in the middle of the save, the kept one is whole. No I/O.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import NamedTuple


class Copied(enum.IntEnum):
    """What became of the copy of a rank's last save on another node."""

    READY = 0
    """It is there, or none is to be made."""
    BUSY = 1
    FAILED = 2


class SaverHello(NamedTuple):
    """What a rank tells the others of a new group."""

    made: int
    """A number that no earlier group had, as far as it knows."""
    in_memory: int
    """1: its saves survive its end."""
    partnered: int
    """1: its node has another one that keeps copies."""
    highest: int
    """The highest sequence that it knows of."""


class SaveStatus(NamedTuple):
    """What a rank tells the others before a save."""

    highest: int
    """The highest sequence that it has given."""
    copied: int
    has_room: int
    first: int
    """The sequence that its first buffer holds of a save in this group; 0: none."""
    first_wanted: int
    """1: it is on its way to storage."""
    second: int
    second_wanted: int
    older_wanted: int
    """1: the one that holds less, or what was saved earlier, is on its way to storage."""


class BufferChoice(NamedTuple):
    """Where a save goes."""

    number: int
    """The buffer that is overwritten."""
    busy: bool
    """The other one is on its way to storage, on some rank: one on the way is enough, or saves would have no place."""


def to_keep(statuses: Sequence[SaveStatus], *, partnered: bool) -> int | None:
    """The sequence that no rank overwrites; 0: each keeps what it saved last; None: the step is left out.

    Args:
        statuses: of all ranks.
        partnered: copies are made: of the two last saves, so that no other than the older may be overwritten.
    """
    common = set.intersection(*({each.first, each.second} for each in statuses)) - {0}
    if not common:  # nothing is saved in this group yet
        return None if any(each.older_wanted for each in statuses) else 0
    for sequence in sorted(common, reverse=True)[: 1 if partnered else 2]:
        if not any(_is_wanted_beside(each, sequence) for each in statuses):
            return sequence
    return None


def _is_wanted_beside(status: SaveStatus, kept: int) -> bool:
    return bool(status.second_wanted if status.first == kept else status.first_wanted)
