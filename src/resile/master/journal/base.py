"""The interface of journals, which `sqlite` and `configmap` implement, and the errors of both.

A journal holds a snapshot of the job's state, the durable events since, and the story: all job events, in order.
`append` returns only when the events would survive the death of this process and of its machine. It may run in a thread
of its own, one call at a time; reading the story does not wait for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec

from resile.api.job_view import JobEvent
from resile.core.events import AnyEvent
from resile.core.state import JobState


class JournalError(Exception):
    """The journal cannot be read or written now, and trying again may help. The text is one sentence."""


class JournalDamaged(JournalError):
    """The journal is not what was written, and trying again will not help."""


class JournalGone(JournalError):
    """The journal was deleted. It can be written again once there is a new one."""


class JournalTaken(JournalDamaged):
    """Another master writes this journal now, so this one must end."""


class History(msgspec.Struct, kw_only=True):
    state: JobState
    at: float
    """When the state was written."""
    events: list[tuple[float, AnyEvent]]

    @property
    def until(self) -> float:
        """The time of the newest event, or of the state if there is none."""
        return max((at for at, _ in self.events), default=self.at)


class Journal(Protocol):
    folds_itself: bool
    """True if `append` keeps the log short, so that the master need not write snapshots while the job runs."""

    def load(self) -> History | None:
        """All that was written before, or None if the journal is empty."""

    def append(self, events: Sequence[tuple[float, AnyEvent]], story: Sequence[JobEvent]) -> None:
        """Write all events or none."""

    def snapshot(self, state: JobState, at: float) -> None:
        """Replace the state and the events by this state. The story stays."""

    def story(self, after: int = 0, limit: int = 1000) -> list[JobEvent]:
        """Job events with a number above `after`."""

    def last_told(self) -> int:
        """The number of the newest job event, 0 if there is none."""

    def close(self) -> None: ...
