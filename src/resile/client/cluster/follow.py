"""Following a job of a cluster to its end, by its object, its pods and its Events."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable, Iterator

from resile.api.job_view import JobEvent
from resile.client.base import Failure, Following, Moment
from resile.client.cluster import job_view
from resile.client.cluster.connection import INSTALL, Cluster, Watch
from resile.client.cluster.describe import journal
from resile.client.cluster.jobs import current, job_itself, pods_of
from resile.client.errors import CommandError
from resile.kube import kinds as kube
from resile.kube.informer import Watched
from resile.kube.kinds import Object
from resile.master.job_view import view as view_of_state

TAKE_UP_SECONDS = 10.0
"""How long a job may have no status before the user is asked if an operator runs."""
REST_SECONDS = 1.0
"""A job is shown again after this long even if nothing changed."""
LAST_WORDS_SECONDS = 5.0
"""How long to wait for the last Events of a job that is over."""


class ClusterFollowing(Following):
    """Follows a job on a cluster until it ends. Ctrl-C ends only the command; the job goes on.

    What watches the job is stopped when the context of `ClusterJobs` ends.
    """

    interrupt_ends_job = False

    def __init__(self, moments: Iterator[Moment], failure: Callable[[], Failure | None]) -> None:
        self._moments = moments
        self._failure = failure

    def poll(self) -> Moment:
        return next(self._moments)

    def stop(self) -> bool:
        """Do nothing and return False, because only `delete` ends a job of a cluster."""
        return False

    def failure(self) -> Failure | None:
        return self._failure()


async def moments(cluster: Cluster, job: Object) -> AsyncGenerator[Moment, None]:
    """Yield the job after each change, and at least every `REST_SECONDS`, until it is over.

    Only the last moment has the job's interruptions, because they are read from the journal at the end. Raises
    `CommandError` if the job is deleted.
    """
    space, uid = job["metadata"]["namespace"], job["metadata"]["uid"]
    events = Watched(kube.EVENTS, space, fields={"involvedObject.uid": uid})
    async with cluster.watch(job_itself(job), pods_of(job), events) as watching:
        story = _Story()
        warn_at, until = time.monotonic() + TAKE_UP_SECONDS, None
        while True:
            now = current(watching, job)
            if now is None:
                raise CommandError("the job was deleted")
            news = story.news(watching)
            if until is None and job_view.over(now):
                until = time.monotonic() + LAST_WORDS_SECONDS
            if until is not None and (story.has_end or time.monotonic() > until):
                break
            note = ""
            if not now.get("status") and time.monotonic() > warn_at:
                warn_at = float("inf")
                note = f"no operator has taken the job up yet: does it run? {INSTALL}"
            yield Moment(job_view.job_view(now, watching.all(kube.PODS), time.time()), news, last=False, note=note)
            await watching.change(REST_SECONDS)
        state = await journal(cluster, now)
        known = view_of_state(state, time.time()) if state is not None else None
        yield Moment(job_view.job_view(now, watching.all(kube.PODS), time.time(), known), news, last=True)


class _Story:
    def __init__(self) -> None:
        self.has_end = False
        """True if one of the returned Events says that the job has ended."""
        self._told: set[str] = set()

    def news(self, watching: Watch) -> list[JobEvent]:
        """The watched Events that `news` has not returned before, oldest first."""
        events = job_view.in_order(watching.all(kube.EVENTS))
        fresh = [event for event in events if event["metadata"]["uid"] not in self._told]
        news = [job_view.job_event(event, number) for number, event in enumerate(fresh, len(self._told) + 1)]
        self._told.update(event["metadata"]["uid"] for event in fresh)
        self.has_end = self.has_end or any(map(job_view.last_word, fresh))
        return news
