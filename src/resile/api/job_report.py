"""What the status of a job's resource says, whichever kind of resource that is.

The master fills a `JobReport` from the state of the core; the kind of the job writes it in its own fields, and reads it
back for the command line.
"""

from __future__ import annotations

import msgspec

from resile.api.job_phase import JobPhase


class NodeCounts(msgspec.Struct, kw_only=True):
    """How many nodes of a role are in which state; nodes that were deleted are not counted."""

    launching: int = 0
    """Asked for, and nothing seen of them yet."""
    pending: int = 0
    """Without room, or starting."""
    running: int = 0
    succeeded: int = 0
    failed: int = 0


class FailureReport(msgspec.Struct, frozen=True, kw_only=True):
    """The newest thing that went wrong, also when the job has long recovered."""

    node: str
    """The node's name."""
    reason: str
    """One word that programs can rely on, such as OOMKilled."""
    message: str
    at: float
    exit_code: int | None = None


class JobReport(msgspec.Struct, frozen=True, kw_only=True):
    """A job at one moment, without what only its nodes' rows show."""

    phase: JobPhase
    reason: str = ""
    message: str = ""
    nodes: dict[str, NodeCounts] = {}
    """By role."""
    started_at: float | None = None
    ended_at: float | None = None
    plan: str = ""
    """The name of the plan being executed."""
    step: int | None = None
    total: int = 0
    speed: float = 0.0
    round: int = 0
    members: int = 0
    goodput: float = 0.0
    restarts: int = 0
    last_failure: FailureReport | None = None
    generation: int = 0
    """Of the spec that this report speaks of."""
