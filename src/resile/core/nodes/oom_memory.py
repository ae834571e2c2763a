"""How much memory the replacement of a node gets that ran out of memory (OOM)."""

from __future__ import annotations

from resile.api.ids import Bytes, GiB

LARGEST_MEMORY = Bytes(64 * GiB)
"""A node that runs out of this much memory is not replaced."""
LARGEST_STEP = Bytes(8 * GiB)
"""Each replacement has twice the memory of the node before it, but at most this much more."""


def memory_after_oom(memory: Bytes, limit: Bytes | None) -> Bytes | None:
    """The memory, at most `limit`, for the replacement of a node that ran out of `memory`; None if it may not grow."""
    grown = min(memory * 2, memory + LARGEST_STEP, LARGEST_MEMORY)
    if limit is not None:
        grown = min(grown, limit)
    return Bytes(grown) if grown > memory else None
