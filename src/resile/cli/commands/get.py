"""`resile get`: jobs, nodes, events and plans in kubectl's layout.

Jobs of this machine are read from their master or, when it is away, from the journal; those of a cluster from the API
server.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack

import click

from resile.cli.common_options import output_option, target_options
from resile.cli.exit_codes import FAILED
from resile.cli.output import rows
from resile.cli.output.listing import FORMATS, Entry, Listing, kind_of
from resile.client.errors import CommandError, NotUsableError
from resile.client.local.job_reader import JobReader
from resile.client.local.jobs import DEFAULT_NAMESPACE, LocalJob, all_jobs, find
from resile.client.target import Target, configured

WATCH_SECONDS = 0.25
"""Between two looks of `-w`."""


@click.command()
@click.argument("kind", metavar="KIND", required=False, default="")
@click.argument("name", required=False)
@target_options
@click.option("-A", "--all-namespaces", is_flag=True, help="jobs of every namespace")
@output_option(*FORMATS)
@click.option("-w", "--watch", is_flag=True, help="go on and print what changes, until the jobs are over")
@click.option("--deleted", is_flag=True, help="list nodes that were deleted, too (on this machine)")
def get(
    kind: str, name: str | None, target: Target, all_namespaces: bool, output: str, watch: bool, deleted: bool
) -> None:
    """List jobs, or the nodes, events or scale plans of a job (KIND: jobs, nodes, events, plans).

    NAME is a job's. Without it, everything in the namespace is listed: of this machine if it has jobs there, else of
    the cluster that KUBECONFIG names; --local and --cluster choose. In a name's place, too, a job of this machine comes
    before one of the cluster.

    \b
    resile get jobs -A                 every job
    resile get nodes torch-mnist -w    the pods of one, and whatever happens to them
    resile get events torch-mnist      its story
    resile get jobs -o json            as data, for programs
    """  # noqa: D301
    if not kind:
        raise click.UsageError("name what to list: jobs, nodes, events or plans", click.get_current_context())
    listing = Listing(kind_of(kind), output, spaces=all_namespaces)
    if not target.here(name or "", everywhere=all_namespaces):
        from resile.cli.cluster.get import get_there

        get_there(target, listing, name, everywhere=all_namespaces, watch=watch)
        return
    if listing.kind == "plans":
        raise NotUsableError("scale plans are kept on a cluster only; `resile get events JOB` tells of changes here")
    _get_here(target, listing, name, everywhere=all_namespaces, watch=watch, deleted=deleted)


def _get_here(
    target: Target, listing: Listing, name: str | None, *, everywhere: bool, watch: bool, deleted: bool
) -> None:
    space = None if everywhere else target.namespace or DEFAULT_NAMESPACE
    jobs = [find(name, target.namespace)] if name else all_jobs(space)
    if not jobs and listing.for_people:
        click.echo(_nothing(space), err=True)
        return
    if not name and not target.local and listing.for_people and configured():
        click.echo("(on this machine; --cluster lists those of the cluster)", err=True)
    with ExitStack() as stack:
        looking = Looking(listing, [stack.enter_context(JobReader(job)) for job in jobs], deleted=deleted)
        listing.show(looking.entries(), one=bool(name) and listing.kind == "jobs")
        while watch and not looking.over:
            time.sleep(WATCH_SECONDS)
            listing.show_changed(looking.entries())
    if looking.failed:
        sys.exit(FAILED)


class Looking:
    """Makes the rows of one kind for some jobs of this machine, again and again."""

    def __init__(self, listing: Listing, looks: Sequence[JobReader], *, deleted: bool) -> None:
        self.failed = False
        self._kind = listing.kind
        self._wide = listing.wide
        self._looks = looks
        self._deleted = deleted
        self._told: dict[LocalJob, int] = {}
        self._masters: dict[LocalJob, int] = {}
        self._over: dict[LocalJob, bool] = {}

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
                click.echo(f"resile: {look.job}: {error}", err=True)
        return found

    def _of(self, look: JobReader) -> list[Entry]:
        space = look.job.namespace
        job = look.status()  # before the story, so that the last line of one that is over is not missed
        self._over[look.job] = job.ended_at is not None
        if self._kind == "jobs":
            return [Entry(space, rows.job_row(job, self._wide), job, str(look.job), f"elasticjob/{job.name}")]
        story = look.events(self._told.get(look.job, 0))
        if story:
            self._told[look.job] = story[-1].number
        if self._kind == "events":
            spec = look.directory.spec()
            return [
                Entry(
                    space,
                    rows.event_row(told, spec),
                    rows.event_data(told, spec),
                    f"{look.job}#{told.number}",
                    f"event/{look.job.name}.{told.number}",
                )
                for told in story
            ]
        self._masters[look.job] = self._masters.get(look.job, 0) + rows.restarts_of_master(story)
        master = rows.master_node(job, look.master_lives, self._masters[look.job])
        nodes = [node for node in job.nodes if self._deleted or node.status != rows.DELETED]
        return [
            Entry(space, rows.node_row(node, self._wide), node, f"{look.job}/{node.name}", f"pod/{node.name}")
            for node in sorted([master, *nodes], key=lambda node: node.name)
        ]


def _nothing(namespace: str | None) -> str:
    if namespace is None:
        return "No jobs found."
    others = sorted({job.namespace for job in all_jobs()})
    hint = f" There are jobs in {', '.join(others)}: use -n or -A." if others else ""
    return f"No jobs found in {namespace} namespace.{hint}"
