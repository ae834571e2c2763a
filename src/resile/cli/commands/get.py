"""`resile get`: jobs, nodes, events and plans in kubectl's layout."""

from __future__ import annotations

import click

from resile.cli.common_options import jobs_of, output_option, say, target_options
from resile.cli.output.listing import FORMATS, Listing, kind_of
from resile.cli.process_exit import FAILED
from resile.client.base import Found, Listable, Query
from resile.client.target import Target, configured


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
) -> int:
    """List jobs, or the nodes, events or scale plans of a job (KIND: jobs, nodes, events, plans).

    NAME is a job's. Without it, everything in the namespace is listed: of this machine if it has jobs there, else of
    the cluster that KUBECONFIG names. If both have a job called NAME, the one of this machine is listed. --local and
    --cluster choose.

    \b
    resile get jobs -A                 every job
    resile get nodes torch-mnist -w    the pods of one, and whatever happens to them
    resile get events torch-mnist      its story
    resile get jobs -o json            as data, for programs
    """  # noqa: D301
    if not kind:
        raise click.UsageError("name what to list: jobs, nodes, events or plans", click.get_current_context())
    what = kind_of(kind)
    listing = Listing(what, output, spaces=all_namespaces)
    with_nodes = output != "table"
    query = Query(what=what, job=name or "", everywhere=all_namespaces, with_nodes=with_nodes, deleted=deleted)
    with jobs_of(target, query.job, everywhere=all_namespaces) as jobs:
        looks = jobs.watch(query)
        found = next(looks)
        for_people = output in ("table", "wide")
        if found.nothing and for_people:
            say(_nothing(query, found, jobs.namespace))
            return 0
        if jobs.is_local and not name and not target.local and for_people and configured():
            say("(on this machine; --cluster lists those of the cluster)")
        failed = _complain(found)
        listing.show(found.items, one=bool(name) and query.what is Listable.JOBS)
        for found in looks if watch else ():
            failed = _complain(found) or failed
            listing.show_changed(found.items)
    return FAILED if failed else 0


def _complain(found: Found) -> bool:
    for sentence in found.unreadable:
        say(f"resile: {sentence}")
    return bool(found.unreadable)


def _nothing(query: Query, found: Found, namespace: str) -> str:
    what = "plans" if query.what is Listable.PLANS else "jobs"
    if query.everywhere:
        return f"No {what} found."
    return f"No {what} found in {namespace} namespace. {found.hint}".rstrip()
