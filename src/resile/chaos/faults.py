"""The faults that can be injected into a job, and what is told of one that was."""

from __future__ import annotations

import msgspec


class KillProcess(msgspec.Struct, frozen=True):
    """SIGKILL one training process: the one with this global rank, else the node's first, else one of any node."""

    node: str | None = None
    rank: int | None = None


class KillNode(msgspec.Struct, frozen=True):
    """SIGKILL every process of a node, or delete its pod without grace, as if its machine had lost power."""

    node: str


class FreezeNode(msgspec.Struct, frozen=True):
    """SIGSTOP every process of a node: its connections stay open and nothing answers."""

    node: str


class ThawNode(msgspec.Struct, frozen=True):
    """SIGCONT every process of a node."""

    node: str


class KillMaster(msgspec.Struct, frozen=True):
    """SIGKILL the job's master, or delete its pod without grace."""


Fault = KillProcess | KillNode | FreezeNode | ThawNode | KillMaster


class Injected(msgspec.Struct, frozen=True, kw_only=True):
    """What was done, when (wall clock, just before the first signal), and to which processes."""

    what: str
    at: float
    pids: list[int]
    node: str = ""
    """Empty for the master."""


class NothingToInjectError(Exception):
    """The fault has no target; the text is one sentence."""
