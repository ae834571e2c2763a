"""Typed ids and units: what crosses a module's edge is never a bare int or str.

A node's `id` only grows: a replacement of worker-1 among four is worker-4. Its `rank` is the place it fills and is
inherited by the replacement. A `Round` numbers one agreed membership and fences everything made in it.
"""

from __future__ import annotations

from typing import NewType

import msgspec

NodeId = NewType("NodeId", int)
Rank = NewType("Rank", int)
Round = NewType("Round", int)
Seconds = NewType("Seconds", float)
Bytes = NewType("Bytes", int)

NO_ROUND = Round(0)
"""The round of an agent that has not been in any; real rounds start at 1."""

MiB = 1024 * 1024
GiB = 1024 * MiB


class NodeKey(msgspec.Struct, frozen=True, order=True, array_like=True):
    """Which node: one pod or one local process group. Never reused within a job."""

    role: str
    id: NodeId

    def __str__(self) -> str:
        return f"{self.role}-{self.id}"
