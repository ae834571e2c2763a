"""`JobReport`: the status of a job's resource, independent of its kind.

The master creates a `JobReport` from the state of the core. The kind of the job writes it into the fields of its own
status, and reads it back for the command line.
"""

from __future__ import annotations

import msgspec

from resile.api.job_phase import JobPhase


class NodeCounts(msgspec.Struct, kw_only=True):
    """The numbers of nodes of a role by their state, without deleted nodes."""

    launching: int = 0
    """Requested from the platform, which has not shown them yet."""
    pending: int = 0
    """Unschedulable, or starting."""
    running: int = 0
    succeeded: int = 0
    failed: int = 0


class FailureReport(msgspec.Struct, frozen=True, kw_only=True):
    """The newest failure of a node or of a whole job, even if the job has recovered from it."""

    node: str
    reason: str
    """One word that programs can rely on, such as OOMKilled."""
    message: str
    at: float
    exit_code: int | None = None


class JobReport(msgspec.Struct, frozen=True, kw_only=True):
    """The status of a job at one moment, with numbers of nodes instead of the nodes themselves."""

    phase: JobPhase
    reason: str = ""
    message: str = ""
    nodes: dict[str, NodeCounts] = {}
    """The numbers of nodes by role."""
    started_at: float | None = None
    ended_at: float | None = None
    plan: str = ""
    """The name of the plan being executed; empty if there is none."""
    step: int | None = None
    total: int = 0
    speed: float = 0.0
    round: int = 0
    members: int = 0
    goodput: float = 0.0
    restarts: int = 0
    last_failure: FailureReport | None = None
    generation: int = 0
    """The generation of the spec that the master has read."""
