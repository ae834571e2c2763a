"""Listing the jobs of this machine, their nodes or events: once, then again every `WATCH_SECONDS`."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack

from resile.client.base import EVENT, POD, Found, Item, Listable, Query
from resile.client.errors import CommandError
from resile.client.local.job_reader import JobReader, event_view
from resile.client.local.jobs import LocalJob, all_jobs

WATCH_SECONDS = 0.25
DELETED = "Deleted"


def watch(jobs: Sequence[LocalJob], query: Query) -> Iterator[Found]:
    if not jobs:
        others = [] if query.everywhere else sorted({job.namespace for job in all_jobs()})
        yield Found([], nothing=True, hint=f"There are jobs in {', '.join(others)}: use -n or -A." if others else "")
        return
    with ExitStack() as stack:
        lister = _Lister([stack.enter_context(JobReader(job)) for job in jobs], query)
        while True:
            yield lister.listing()
            if lister.is_over:
                return
            time.sleep(WATCH_SECONDS)


class _Lister:
    def __init__(self, readers: Sequence[JobReader], query: Query) -> None:
        self._readers = readers
        self._query = query
        self._over: dict[LocalJob, bool] = {}

    @property
    def is_over(self) -> bool:
        return all(self._over.get(reader.job, False) for reader in self._readers)

    def listing(self) -> Found:
        """Make a new listing. A listing of events has only the events since the listing before it.

        A job that cannot be read is named in `unreadable`; if it is the only job, `CommandError` is raised instead.
        """
        found = Found([])
        for reader in self._readers:
            try:
                found.items.extend(self._items(reader))
            except CommandError as error:
                if len(self._readers) == 1:
                    raise
                found.unreadable.append(f"{reader.job}: {error}")
        return found

    def _items(self, reader: JobReader) -> list[Item]:
        job, space = reader.job, reader.job.namespace
        view = reader.status()  # before the events: after the end of a job there are no new events
        self._over[job] = view.ended_at is not None
        spec, kind = job.spec_and_kind()
        if self._query.what is Listable.JOBS:
            return [Item(space, view.name, view, kind.noun)]
        news = reader.news()
        if self._query.what is Listable.EVENTS:
            return [Item(space, f"{job.name}.{event.number}", event_view(event, spec), EVENT) for event in news]
        master = reader.master_node(view)
        nodes = [node for node in view.nodes if self._query.deleted or node.status != DELETED]
        return [Item(space, node.name, node, POD) for node in sorted([master, *nodes], key=lambda node: node.name)]
