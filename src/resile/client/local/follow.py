"""Following a job of this machine until it is over and its master has ended."""

from __future__ import annotations

import time

from resile.client.base import Failure, Following, Moment, first_failure
from resile.client.errors import CommandError
from resile.client.local.describe import last_failed_node
from resile.client.local.job_reader import JobReader
from resile.client.local.jobs import LocalJob
from resile.client.local.master_client import MasterUnreachable
from resile.client.local.master_process import served
from resile.protocol.job_changes import Stop

POLL_SECONDS = 0.1
"""Time between two requests to the master, each of which costs it well under a millisecond."""
FAREWELL_SECONDS = 45.0
"""How long the master of a job that is over may take to let its nodes end, and to end itself."""


class LocalFollowing(Following):
    """Ctrl-C ends the job, because the job belongs to its command."""

    interrupt_ends_job = True

    def __init__(self, job: LocalJob) -> None:
        self.reader = JobReader(job)
        self._polled = False
        self._last_at = 0.0
        """When to leave a job that is over, even if its master has not ended; 0 while the job runs."""

    def __exit__(self, *_: object) -> None:
        self.reader.__exit__(None, None, None)

    def poll(self) -> Moment:
        """Wait a short time, then return the job as it is.

        The moment is the last one if the job is over and its master has ended. It is also the last one
        `FAREWELL_SECONDS` after the job's end. Raises `CommandError` if the master is gone and the job is not over.
        """
        if self._polled:
            time.sleep(POLL_SECONDS)
        self._polled = True
        is_served = served(self.reader.directory)
        job = self.reader.status()  # before the events: after the end of a job there are no new events
        news = self.reader.news()
        if job.ended_at is None:
            if not is_served and not self.reader.answered:
                raise CommandError(f"the master of {self.reader.job} is gone; see {self.reader.directory.log}")
            return Moment(job, news, last=False)
        now = time.monotonic()
        self._last_at = self._last_at or now + FAREWELL_SECONDS
        return Moment(job, news, last=not is_served or now > self._last_at)

    def stop(self) -> bool:
        try:
            self.reader.client.ask(Stop(because="its user pressed Ctrl-C"))
        except MasterUnreachable:
            return False
        return True

    def failure(self) -> Failure | None:
        return first_failure(self.reader.state()) or last_failed_node(self.reader, self.reader.status())
