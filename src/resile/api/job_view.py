"""A job as people see it, as plain data. The command line, the metrics and the web page read these views.

A job of this machine and a job of a cluster have the same view, so that a reader need not know where a job runs. Fields
that a cluster or a machine does not know keep their empty values. Times are in seconds since 1970.
"""

from __future__ import annotations

import msgspec

MASTER = "master"
"""The role of the master in listings of nodes."""


class NodeView(msgspec.Struct, frozen=True, kw_only=True):
    """One node of a job, or its master."""

    name: str
    role: str
    id: int
    rank: int
    status: str
    """The STATUS that `kubectl` would show: Running, Pending, Completed, Error, OOMKilled, Terminating, …"""
    ready: bool
    restarts: int
    """How often the command of this node was restarted; a replacement is another node."""
    crashes: int
    """How often the training processes of this node failed."""
    relaunch_count: int
    """How many nodes had the rank of this node before."""
    launched_at: float
    ended_at: float | None
    host: str
    address: str
    message: str
    standbys: int = 0
    """How many standbys of this node are ready."""
    standby_memory: int = 0
    """The memory of all standbys of this node, in bytes."""
    containers: int = 1
    """How many containers the node's pod has; 1 for a node of this machine."""
    ready_containers: int = 0


class OutageView(msgspec.Struct, frozen=True, kw_only=True):
    """One interruption: the time from `noticed_at` to `next_step_at`, in which training stood still.

    `next_step_at` is None if no step has followed yet.
    """

    because: str
    node: str
    noticed_at: float
    next_step_at: float | None


class DatasetView(msgspec.Struct, frozen=True, kw_only=True):
    """How much of one data set is done, according to its ledger."""

    name: str
    done: int
    """How many records are done."""
    total: int
    """How many records all epochs have."""
    leased: int
    """How many shards workers have under lease."""


class JobView(msgspec.Struct, frozen=True, kw_only=True):
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
    """How many steps are completed; -1 before the first report."""
    total: int
    speed: float
    """Steps per second."""
    goodput: float
    nodes: list[NodeView]
    outages: list[OutageView]
    datasets: list[DatasetView]


class JobEvent(msgspec.Struct, frozen=True, kw_only=True):
    """One event in the history of a job, as `resile get events` shows it."""

    number: int
    """Counts the job events from 1."""
    at: float
    reason: str
    message: str
    node: str = ""
    """The node that the event is about, such as `worker-1`; empty if it is about the whole job."""
    warning: bool = False
