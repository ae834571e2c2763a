"""`resile get`: jobs, nodes and events in kubectl's layout, from the master or, when it is away, from the journal."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack

import click
import msgspec

from resile.cli import rows
from resile.cli.errors import FAILED, CommandError, NotUsableError
from resile.cli.jobs import DEFAULT_NAMESPACE, LocalJob, all_jobs, find
from resile.cli.look import Look
from resile.cli.options import namespace_option, output_option, print_json
from resile.cli.tables import line, table, widths

KINDS = {
    "jobs": ("jobs", "job", "elasticjobs", "elasticjob", "ej"),
    "nodes": ("nodes", "node", "pods", "pod", "po"),
    "events": ("events", "event", "ev"),
}
WATCH_SECONDS = 0.25
"""Between two looks of `-w`."""
AGE_COLUMN = {"jobs": rows.JOB_HEADER.index("AGE"), "nodes": rows.NODE_HEADER.index("AGE"), "events": 0}


class Entry(msgspec.Struct):
    """One row, and the same as data."""

    namespace: str
    row: list[str]
    data: object
    key: str


@click.command()
@click.argument("kind")
@click.argument("name", required=False)
@namespace_option
@click.option("-A", "--all-namespaces", is_flag=True, help="jobs of every namespace")
@output_option("table", "wide", "json")
@click.option("-w", "--watch", is_flag=True, help="go on and print what changes, until the jobs are over")
@click.option("--deleted", is_flag=True, help="list nodes that were deleted, too")
def get(
    kind: str, name: str | None, namespace: str | None, all_namespaces: bool, output: str, watch: bool, deleted: bool
) -> None:
    """List jobs, or the nodes or events of a job (KIND: jobs, nodes, events).

    NAME is a job's. Without it, everything in the namespace is listed.
    """
    asked, kind = kind, next((known for known, words in KINDS.items() if kind in words), "")
    if not kind:
        raise NotUsableError(f"there is no kind {asked!r}; known are jobs, nodes and events")
    jobs = [find(name, namespace)] if name else all_jobs(None if all_namespaces else namespace or DEFAULT_NAMESPACE)
    if not jobs and output != "json":
        click.echo(_nothing(None if all_namespaces else namespace or DEFAULT_NAMESPACE), err=True)
        return
    with ExitStack() as stack:
        looks = [stack.enter_context(Look(job)) for job in jobs]
        listing = Listing(kind, looks, wide=output == "wide", spaces=all_namespaces, deleted=deleted)
        entries = listing.entries()
        if output == "json":
            data = [entry.data for entry in entries]
            print_json(data[0] if name and kind == "jobs" and data else data)
        else:
            listing.print(entries)
        if watch:
            _watch(listing, entries, as_json=output == "json")
    if listing.failed:
        sys.exit(FAILED)


class Listing:
    """Makes the rows of one kind for some jobs, again and again."""

    def __init__(self, kind: str, looks: Sequence[Look], *, wide: bool, spaces: bool, deleted: bool) -> None:
        self.kind = kind
        self.failed = False
        self._looks = looks
        self._wide = wide
        self._spaces = spaces
        self._deleted = deleted
        self._told: dict[LocalJob, int] = {}
        self._masters: dict[LocalJob, int] = {}
        self._over: dict[LocalJob, bool] = {}
        headers = {
            "jobs": rows.JOB_WIDE_HEADER if wide else rows.JOB_HEADER,
            "nodes": rows.NODE_WIDE_HEADER if wide else rows.NODE_HEADER,
            "events": rows.EVENT_HEADER,
        }
        self.header = [*(["NAMESPACE"] if spaces else []), *headers[kind]]
        self.columns: list[int] = []

    @property
    def over(self) -> bool:
        """Whether every job was over when it was looked at last."""
        return all(self._over.get(look.job, False) for look in self._looks)

    def entries(self) -> list[Entry]:
        """All rows now; of events those that were not given before. A job that cannot be read costs a sentence."""
        found: list[Entry] = []
        for look in self._looks:
            try:
                found.extend(self._of(look))
            except CommandError as error:
                if len(self._looks) == 1:
                    raise
                self.failed = True
                click.echo(f"resile: {look.job}: {error.format_message()}", err=True)
        return found

    def print(self, entries: list[Entry]) -> None:
        """The table, or kubectl's words where there is nothing."""
        shown = [self.cells(entry) for entry in entries]
        self.columns = widths([self.header, *shown])
        click.echo(table(self.header, shown))

    def print_more(self, entries: list[Entry]) -> None:
        """More rows of the same table."""
        for entry in entries:
            click.echo(line(self.cells(entry), self.columns))

    def cells(self, entry: Entry) -> list[str]:
        """A row with its namespace, where that is asked for."""
        return [entry.namespace, *entry.row] if self._spaces else entry.row

    def _of(self, look: Look) -> list[Entry]:
        space = look.job.namespace
        job = look.status()  # before the story, so that the last line of one that is over is not missed
        self._over[look.job] = job.ended_at is not None
        if self.kind == "jobs":
            return [Entry(space, rows.job_row(job, self._wide), job, str(look.job))]
        story = look.events(self._told.get(look.job, 0))
        if story:
            self._told[look.job] = story[-1].number
        if self.kind == "events":
            spec = look.directory.spec()
            return [
                Entry(space, rows.event_row(told, spec), rows.event_data(told, spec), f"{look.job}#{told.number}")
                for told in story
            ]
        self._masters[look.job] = self._masters.get(look.job, 0) + rows.restarts_of_master(story)
        master = rows.master_node(job, look.master_lives, self._masters[look.job])
        nodes = [node for node in job.nodes if self._deleted or node.status != rows.DELETED]
        return [
            Entry(space, rows.node_row(node, self._wide), node, f"{look.job}/{node.name}")
            for node in sorted([master, *nodes], key=lambda node: node.name)
        ]


def _watch(listing: Listing, before: list[Entry], *, as_json: bool) -> None:
    """Print rows that change, until every job is over; an age alone is no change."""
    age_at = AGE_COLUMN[listing.kind]

    def rest(entry: Entry) -> list[str]:
        return [cell for at, cell in enumerate(entry.row) if at != age_at]

    known = {entry.key: rest(entry) for entry in before}
    while not listing.over:
        time.sleep(WATCH_SECONDS)
        fresh = [entry for entry in listing.entries() if known.get(entry.key) != rest(entry)]
        known.update({entry.key: rest(entry) for entry in fresh})
        if as_json:
            for entry in fresh:
                click.echo(msgspec.json.encode(entry.data))
        else:
            listing.print_more(fresh)


def _nothing(namespace: str | None) -> str:
    if namespace is None:
        return "No jobs found."
    others = sorted({job.namespace for job in all_jobs()})
    hint = f" There are jobs in {', '.join(others)}: use -n or -A." if others else ""
    return f"No jobs found in {namespace} namespace.{hint}"
