"""Following a job of this machine until it is over and its master is gone."""

from __future__ import annotations

import time
from typing import Self

from resile.client.base import Failure, Moment
from resile.client.errors import CommandError
from resile.client.local.describe import last_failure
from resile.client.local.job_reader import JobReader
from resile.client.local.jobs import LocalJob
from resile.client.local.master_client import MasterUnreachable
from resile.client.local.supervision import served
from resile.protocol.job_changes import Stop

POLL_SECONDS = 0.1
"""Between two looks; a look costs the master well under a millisecond."""
FAREWELL_SECONDS = 45.0
"""For the master of a job that is over to let its nodes end and to go."""


class LocalFollowing:
    """Looks at a job every `POLL_SECONDS`; Ctrl-C is to end the job, which belongs to the command that started it."""

    interrupt_ends_job = True

    def __init__(self, job: LocalJob) -> None:
        self.reader = JobReader(job)
        self._told = 0
        self._looked = False
        self._over_since: float | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.reader.__exit__(None, None, None)

    def poll(self) -> Moment:
        """One look; the last one comes when the job is over and its master is gone, or does not go.

        Raises:
            CommandError: the master is gone, and the job is not over.
        """
        if self._looked:
            time.sleep(POLL_SECONDS)
        self._looked = True
        is_served = served(self.reader.directory)
        moment = self._look(is_served)
        if moment.job.ended_at is None and not is_served and not self.reader.answered:
            raise CommandError(f"the master of {self.reader.job} is gone; see {self.reader.directory.log}")
        return moment

    def _look(self, is_served: bool) -> Moment:
        job = self.reader.status()  # before the events: a job that is over has told everything
        news = self.reader.events(self._told)
        self._told = news[-1].number if news else self._told
        now = time.monotonic()
        if job.ended_at is not None and self._over_since is None:
            self._over_since = now
        is_late = self._over_since is not None and now - self._over_since > FAREWELL_SECONDS
        return Moment(job, news, last=job.ended_at is not None and (not is_served or is_late))

    def stop(self) -> bool:
        """Ask the master to stop the job; False if no master answered."""
        try:
            self.reader.client.ask(Stop(because="its user pressed Ctrl-C"))
        except MasterUnreachable:
            return False
        return True

    def failure(self) -> Failure | None:
        """What failed last, as the journal and the logs tell it."""
        return last_failure(self.reader, self.reader.status())
