"""Types for ids and units, so that no function takes or returns a bare int or str for them.

The `id` of a new node is always higher than all before: the replacement of worker-1 among four nodes is worker-4. The
replacement inherits the `rank`. A `Round` numbers one agreed membership; messages of older rounds are refused.
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
"""The round of an agent that was in no round yet; rounds are numbered from 1."""

MiB = 1024 * 1024
GiB = 1024 * MiB


class NodeKey(msgspec.Struct, frozen=True, order=True, array_like=True):
    """Identifies a node of a job: one pod or one local process group. A key is never used again."""

    role: str
    id: NodeId

    def __str__(self) -> str:
        return f"{self.role}-{self.id}"
