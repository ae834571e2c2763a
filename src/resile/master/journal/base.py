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
    """Raised if the journal cannot be read or written now; trying again may help. The text is one sentence."""


class JournalDamaged(JournalError):
    """Raised if the journal's content was changed or cannot be understood; trying again does not help."""


class JournalGone(JournalError):
    """Raised if the journal's ConfigMap was deleted. Writing succeeds again once the operator has made a new one."""


class JournalTaken(JournalDamaged):
    """Raised if another master writes this journal now, so that this master must end."""


class History(msgspec.Struct, kw_only=True):
    state: JobState
    at: float
    """When the snapshot `state` was written."""
    events: list[tuple[float, AnyEvent]]

    @property
    def until(self) -> float:
        return max((at for at, _ in self.events), default=self.at)


class Journal(Protocol):
    folds_itself: bool
    """True if `append` keeps the log short, so that the master need not write snapshots while the job runs."""

    def load(self) -> History | None:
        """Load the snapshot and the events after it; None if the journal is empty.

        Raises `JournalDamaged` if any of it is damaged.
        """

    def append(self, events: Sequence[tuple[float, AnyEvent]], story: Sequence[JobEvent]) -> None:
        """Add `events` to the log, and `story` to the story. If this raises an error, nothing is added."""

    def snapshot(self, state: JobState, at: float) -> None:
        """Replace the old snapshot and all events by `state`. The story stays."""

    def story(self, after: int = 0, limit: int = 1000) -> list[JobEvent]:
        """The first `limit` job events with a number above `after`."""

    def last_told(self) -> int:
        """The number of the newest job event, 0 if there is none."""

    def close(self) -> None: ...
