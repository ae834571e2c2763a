"""What agents report and the core decides on: plain values that messages and core events both carry."""

from __future__ import annotations

import enum
import signal

import msgspec

from resile.api.ids import Rank

MAX_LOG_TAIL = 8 * 1024
MAX_ERROR = 4 * 1024
"""How many characters of a worker's output and error a master gets: it must bear 10,000 failures (DLRover #1723)."""


class RendezvousConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The rules of rendezvous that an agent was started with (`--nnodes`, `--node_unit`, `--rdzv-conf`)."""

    min_nodes: int = 1
    max_nodes: int = 1
    node_unit: int = 1
    max_restarts: int = 3
    join_timeout: float | None = None
    last_call: float | None = None
    pend_timeout: float | None = None


class WorkerFailure(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    global_rank: int
    local_rank: int
    pid: int
    at: float
    """Wall-clock seconds when the process ended (or when `@record` wrote its error)."""
    exit_code: int = 0
    """As the shell would give it; 0 when a signal ended the process."""
    signal: int = 0
    error: str = ""
    """The exception's type and message if the script recorded one, else empty."""
    traceback: str = ""
    log_tail: str = ""
    oom: bool = False
    permanent: bool = False
    """True if the process itself says that another try would fail in the same way."""

    def __str__(self) -> str:
        how = f"signal {self.signal}" if self.signal else f"exit code {self.exit_code}"
        why = f": {self.error.splitlines()[0]}" if self.error.strip() else ""
        return f"rank {self.global_rank} (pid {self.pid}) ended with {how}{why}"


class NodeStatus(enum.StrEnum):
    LAUNCHING = "Launching"
    """Requested; the platform has not answered yet."""
    PENDING = "Pending"
    """It cannot start now (no room, image missing), so no round waits for it."""
    STARTING = "Starting"
    """It has a machine and is starting."""
    RUNNING = "Running"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"
    DELETED = "Deleted"

    @property
    def ended(self) -> bool:
        return self in _ENDED


_ENDED = (NodeStatus.SUCCEEDED, NodeStatus.FAILED, NodeStatus.DELETED)  # once: finding a member of an enum is slow


class NodeEnd(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    exit_code: int | None = None
    """128 + signal if a signal ended the node."""
    reason: str = ""
    """`OOMKilled`, `Evicted`, `Preempted`, `DeadlineExceeded`, … as the platform names it; empty if it says nothing."""
    message: str = ""


class ReplicaEndpoint(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Where an agent receives copies of another node's checkpoints."""

    address: str
    port: int
    fingerprint: str = ""
    """SHA-256 of the certificate that it shows, in hexadecimal; empty if it does not speak TLS."""


class RoundAssignment(msgspec.Struct, frozen=True, kw_only=True):
    """What an agent needs to start the processes of its node in a round, as torchrun would."""

    group_rank: Rank
    group_world_size: int
    first_rank: int
    """The global rank of the process with local rank 0 on this node."""
    world_size: int
    master_addr: str
    master_port: int
    nproc: int = 0
    """How many processes of this node are in the round; 0 means all that it runs."""
    partner: ReplicaEndpoint | None = None
    """The node that keeps copies of this one's checkpoints; None if there is no other node."""


def signal_name(number: int) -> str:
    """The name of a signal, such as "SIGKILL" for 9; "signal 64" if it has no name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
