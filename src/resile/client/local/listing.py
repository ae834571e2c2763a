"""Listing the jobs of this machine, their nodes or events: once, then again every `WATCH_SECONDS`."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack

from resile.api.job_view import JobView
from resile.client.base import EVENT, POD, Found, Item, Listable, Query
from resile.client.errors import CommandError
from resile.client.local.job_reader import JobReader, event_view
from resile.client.local.jobs import LocalJob, all_jobs

WATCH_SECONDS = 0.25
DELETED = "Deleted"


def watch(jobs: Sequence[LocalJob], query: Query) -> Iterator[Found]:
    """Yield listings until all jobs are over. A listing of events has only the events since the listing before it.

    A job that cannot be read is named in `unreadable`; if it is the only job, `CommandError` is raised instead.
    """
    if not jobs:
        others = [] if query.everywhere else sorted({job.namespace for job in all_jobs()})
        yield Found([], nothing=True, hint=f"There are jobs in {', '.join(others)}: use -n or -A." if others else "")
        return
    with ExitStack() as stack:
        readers = [stack.enter_context(JobReader(job)) for job in jobs]
        running = dict.fromkeys(jobs, True)
        while True:
            found = Found([])
            for reader in readers:
                try:
                    view = reader.status()  # before the events: after the end of a job there are no new events
                    running[reader.job] = view.ended_at is None
                    found.items.extend(_items(reader, view, query))
                except CommandError as error:
                    if len(readers) == 1:
                        raise
                    found.unreadable.append(f"{reader.job}: {error}")
            yield found
            if not any(running.values()):
                return
            time.sleep(WATCH_SECONDS)


def _items(reader: JobReader, view: JobView, query: Query) -> list[Item]:
    job, space = reader.job, reader.job.namespace
    spec, kind = job.spec_and_kind()
    if query.what is Listable.JOBS:
        return [Item(space, view.name, view, kind.noun)]
    news = reader.news()
    if query.what is Listable.EVENTS:
        return [Item(space, f"{job.name}.{event.number}", event_view(event, spec), EVENT) for event in news]
    master = reader.master_node(view)
    nodes = [node for node in view.nodes if query.deleted or node.status != DELETED]
    return [Item(space, node.name, node, POD) for node in sorted([master, *nodes], key=lambda node: node.name)]
