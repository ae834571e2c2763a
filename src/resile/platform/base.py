"""The interface between the master and the platform on which its nodes run.

A platform launches and deletes nodes and reports observations; it decides nothing. Calls return at once and are
idempotent by node key, so a master that restarts may repeat them. Nodes outlive the master: after a restart `adopt`
finds them again and reports their status, including how they ended while no master watched.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import msgspec

from resile.api.ids import NodeKey, Rank, Seconds
from resile.api.plan import NodeResources
from resile.protocol.reports import NodeEnd, NodeStatus


class Launch(msgspec.Struct, frozen=True, kw_only=True):
    node: NodeKey
    rank: Rank
    replicas: int
    """How many nodes the role has now; the node finds it in the variables `NODE_NUM` and `WORKER_NUM`."""
    relaunch_count: int = 0
    resources: NodeResources = NodeResources()
    avoid: tuple[str, ...] = ()
    """Machines, by `Observation.host`, that are used only if no other machine has room."""


class Observation(msgspec.Struct, frozen=True, kw_only=True):
    """What a platform reports of one node. A node that the platform does not know any more is `DELETED`."""

    node: NodeKey
    status: NodeStatus
    end: NodeEnd = NodeEnd()
    host: str = ""
    """The platform's name of the machine that the node runs on; empty if there is none yet."""
    address: str = ""


class Platform(Protocol):
    """Launches nodes and watches them. All methods run on the master's event loop and do not block it."""

    async def start(self, observe: Callable[[Observation], None]) -> None:
        """Watch the nodes, and pass each change to `observe` at least once. Changes of one node come in order."""

    async def adopt(self) -> list[Observation]:
        """All nodes of this job that the platform knows, including those that ended."""

    def launch(self, launch: Launch) -> None:
        """Start a node, unless it exists. If it cannot be started, an observation says so."""

    def delete(self, node: NodeKey, grace: Seconds) -> None:
        """End a node: send SIGTERM, and SIGKILL after `grace` seconds. The node is then observed as `DELETED`.

        A node that had already ended may keep the status with which it ended; then there is no new observation.
        """

    async def close(self) -> None:
        """Stop watching. Nodes keep running."""
