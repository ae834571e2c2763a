"""The interface between the master and the platform on which its nodes run.

A platform does what it is told (launch, delete) and tells what it sees (observations); it decides nothing. Calls return
at once and are idempotent by node key, so a master that restarts may repeat them. Everything a platform launched
outlives the master: after a restart `adopt` finds it again and reports how it is, including how it ended
while no master watched.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import msgspec

from resile.api.ids import NodeKey, Rank, Seconds
from resile.api.plan import NodeResources
from resile.protocol.reports import NodeEnd, NodeStatus


class Launch(msgspec.Struct, frozen=True, kw_only=True):
    """One node to start."""

    node: NodeKey
    rank: Rank
    replicas: int
    """How many nodes the role has now: `NODE_NUM` and `WORKER_NUM`."""
    relaunch_count: int = 0
    resources: NodeResources = NodeResources()
    avoid: tuple[str, ...] = ()
    """Machines, by the names that observations give them, not to be used as long as there is room on others."""


class Observation(msgspec.Struct, frozen=True, kw_only=True):
    """What the platform sees of a node. A node it does not know any more is `DELETED`."""

    node: NodeKey
    status: NodeStatus
    end: NodeEnd = NodeEnd()
    host: str = ""
    """The machine it is on, by the platform's own name for it."""
    address: str = ""


class Platform(Protocol):
    """Launches nodes and watches them. All methods run on the master's event loop and do not block it."""

    async def start(self, observe: Callable[[Observation], None]) -> None:
        """Begin watching; from now on every change is given to `observe`, each at least once, in order per node."""

    async def adopt(self) -> list[Observation]:
        """Everything of this job that the platform knows now, ended nodes included."""

    def launch(self, launch: Launch) -> None:
        """Start a node; failures to start it come back as observations. A node that exists already is left alone."""

    def delete(self, node: NodeKey, grace: Seconds) -> None:
        """End a node: SIGTERM, and after `grace` SIGKILL. It is observed as `DELETED`; an unknown node likewise."""

    async def close(self) -> None:
        """Stop watching. Nodes keep running."""
