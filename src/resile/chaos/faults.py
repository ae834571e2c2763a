"""The faults that can be injected into a job, and the report of an injected fault.

A new fault is a class here, a case in `inject_local` or `resile.client.cluster.chaos`, and a command in
`resile.cli.commands.chaos`.
"""

from __future__ import annotations

import msgspec


class KillProcess(msgspec.Struct, frozen=True):
    """SIGKILL one training process. `rank` is its global rank.

    If `rank` is None, the first process of `node` is killed. If both are None, a process of the newest node is killed.
    """

    node: str | None = None
    rank: int | None = None


class KillNode(msgspec.Struct, frozen=True):
    """End a node as if its machine had lost power: SIGKILL all its processes, or delete its pod without grace."""

    node: str


class FreezeNode(msgspec.Struct, frozen=True):
    """SIGSTOP every process of a node. The node's connections stay open, but no process answers."""

    node: str


class ThawNode(msgspec.Struct, frozen=True):
    node: str


class KillMaster(msgspec.Struct, frozen=True):
    """SIGKILL the job's master, or delete its pod without grace."""


Fault = KillProcess | KillNode | FreezeNode | ThawNode | KillMaster


class Injected(msgspec.Struct, frozen=True, kw_only=True):
    what: str
    at: float
    """The wall clock just before the first signal, in seconds since 1970."""
    pids: list[int]
    """The processes that got a signal; empty on a cluster."""
    node: str = ""
    """The node that was hit, such as `worker-1`; empty for the master."""


class NothingToInjectError(Exception):
    """Raised if the process, node or master to be hit does not exist or has ended. The message is one sentence."""
