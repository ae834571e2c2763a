"""What people see of a job, as plain data: the command line, the metrics and the web page all read this.

A job of this machine and a job of a cluster have the same view, so that a reader need not know where a job runs. What a
place cannot tell is left at its empty value.
"""

from __future__ import annotations

import msgspec

MASTER = "master"
"""The role of the master's own row among the nodes of a job."""


class NodeView(msgspec.Struct, frozen=True, kw_only=True):
    """One node, as a row."""

    name: str
    role: str
    id: int
    rank: int
    status: str
    """As `kubectl` would show it: Running, Pending, Completed, Error, OOMKilled, Terminating, …"""
    ready: bool
    restarts: int
    """How often this node's command was started again in place; a replacement is another node."""
    crashes: int
    """How often its training processes failed."""
    relaunch_count: int
    launched_at: float
    ended_at: float | None
    host: str
    address: str
    message: str
    standbys: int = 0
    """Interpreters that wait there to replace training processes."""
    standby_memory: int = 0
    """Bytes of all of them."""
    containers: int = 1
    """How many containers its pod has; a node of this machine is one."""
    ready_containers: int = 0


class OutageView(msgspec.Struct, frozen=True, kw_only=True):
    """One time that training stood still."""

    because: str
    node: str
    noticed_at: float
    next_step_at: float | None


class DatasetView(msgspec.Struct, frozen=True, kw_only=True):
    """One data set's ledger."""

    name: str
    done: int
    total: int
    leased: int


class JobView(msgspec.Struct, frozen=True, kw_only=True):
    """One job, with its nodes."""

    name: str
    namespace: str
    phase: str
    reason: str
    message: str
    created_at: float
    started_at: float | None
    ended_at: float | None
    at: float
    round: int
    members: int
    min_nodes: int
    max_nodes: int
    step: int
    total: int
    speed: float
    goodput: float
    nodes: list[NodeView]
    outages: list[OutageView]
    datasets: list[DatasetView]
