"""The phases of a job, and the reasons in its status that operator, master and command line share."""

from __future__ import annotations

import enum


class JobPhase(enum.StrEnum):
    """The phase of a job. Every phase is also the type of a condition in the job's status."""

    CREATED = "Created"
    PENDING = "Pending"
    RUNNING = "Running"
    RESTARTING = "Restarting"
    SCALING = "Scaling"
    SUSPENDED = "Suspended"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"

    @property
    def reason(self) -> str:
        return f"Job{self.value}"

    @property
    def ended(self) -> bool:
        """True if a job in this phase will never run again."""
        return self in (JobPhase.SUCCEEDED, JobPhase.FAILED)


INVALID_SPEC = "InvalidSpec"
"""The reason in the status of a job whose manifest has errors, from the start or after a change."""
JOURNAL_GONE = "JournalGone"
"""The reason in the status of a job whose journal was deleted; its master asks the operator for a new one."""
