"""`resile get` on a cluster: one look, or what a watch tells until every job is over."""

from __future__ import annotations

import time

import click
import msgspec

from resile.cli.output import rows
from resile.cli.output.listing import Entry, Listing
from resile.cli.output.tables import age
from resile.client.cluster import view
from resile.client.cluster.connection import EVERY_NAMESPACE, Cluster, Manifest, Wanted, Watch, on
from resile.client.cluster.find import find
from resile.client.target import Target
from resile.platform.kubernetes import client as kube

REST_SECONDS = 30.0
"""After which a watch looks again although nothing changed."""
LAST_SECONDS = 10.0
"""For the last words about jobs that are over, and the ends of their pods."""


def get_there(target: Target, listing: Listing, name: str | None, *, everywhere: bool, watch: bool) -> None:
    """Print the listing; with `watch`, go on until the jobs are over.

    Raises:
        CommandError: there is no such job, or the cluster refuses.
    """
    on(target, lambda cluster: _get(cluster, listing, name, everywhere=everywhere, watch=watch))


async def _get(cluster: Cluster, listing: Listing, name: str | None, *, everywhere: bool, watch: bool) -> None:
    if name:
        await find(cluster, name)
    space = EVERY_NAMESPACE if everywhere else cluster.namespace
    fields = {"metadata.name": name} if name else None
    wanted = [Wanted(kube.JOBS, space, fields=fields)]
    wanted += {
        "jobs": [Wanted(kube.PODS, space)] if listing.wide or not listing.for_people else [],
        "nodes": [Wanted(kube.PODS, space)],
        "events": [Wanted(kube.EVENTS, space)],
        "plans": [Wanted(kube.PLANS, space)],
    }[listing.kind]
    async with cluster.watch(*wanted) as watching:
        what = "plans" if listing.kind == "plans" else "jobs"
        if not watching.all(kube.PLANS if what == "plans" else kube.JOBS) and listing.for_people:
            click.echo(f"No {what} found." if everywhere else f"No {what} found in {space} namespace.", err=True)
            return
        listing.show(_entries(listing, watching, name), one=bool(name) and listing.kind == "jobs")
        until = None
        while watch:
            if until is None and all(map(view.over, watching.all(kube.JOBS))):
                until = time.monotonic() + LAST_SECONDS
            seconds = REST_SECONDS if until is None else until - time.monotonic()
            if until is not None and (seconds <= 0 or _all_told(listing.kind, watching)):
                return
            if await watching.change(seconds):
                listing.show_changed(_entries(listing, watching, name))


def _all_told(kind: str, watching: Watch) -> bool:
    """Whether nothing more is to come of jobs that are over."""
    if kind == "nodes":
        return all(map(view.pod_over, watching.all(kube.PODS)))
    if kind == "events":
        ended = {event["involvedObject"].get("uid") for event in watching.all(kube.EVENTS) if view.last_word(event)}
        return ended >= {job["metadata"]["uid"] for job in watching.all(kube.JOBS)}
    return True


def _entries(listing: Listing, watching: Watch, name: str | None) -> list[Entry]:
    jobs = watching.all(kube.JOBS)
    match listing.kind:
        case "events":
            return _events(jobs, watching.all(kube.EVENTS))
        case "plans":
            return _plans(watching.all(kube.PLANS), name, wide=listing.wide)
        case "nodes":
            return _nodes(jobs, watching.all(kube.PODS), wide=listing.wide)
    return _jobs(jobs, watching.all(kube.PODS) if watching.has(kube.PODS) else [], wide=listing.wide)


def _jobs(jobs: list[Manifest], pods: list[Manifest], *, wide: bool) -> list[Entry]:
    theirs = view.pods_by_job(pods)
    now = time.time()
    found = []
    for job in jobs:
        space, name = job["metadata"]["namespace"], job["metadata"]["name"]
        seen = view.job_view(job, theirs.get((space, name), []), now)
        found.append(Entry(space, rows.job_row(seen, wide), seen, f"{space}/{name}", f"elasticjob/{name}"))
    return found


def _nodes(jobs: list[Manifest], pods: list[Manifest], *, wide: bool) -> list[Entry]:
    known = {(job["metadata"]["namespace"], job["metadata"]["name"]) for job in jobs}
    found = []
    for (space, job), theirs in view.pods_by_job(pods).items():
        for pod in theirs if (space, job) in known else []:
            found.append(node_entry(pod, job, wide=wide))
    return sorted(found, key=lambda entry: (entry.namespace, entry.key))


def node_entry(pod: Manifest, job: str, *, wide: bool) -> Entry:
    """The row of one pod."""
    node = view.node_view(pod, job)
    row = rows.node_row(node, wide)
    row[1] = view.ready_cell(pod)
    space = pod["metadata"]["namespace"]
    return Entry(space, row, node, f"{space}/{node.name}", f"pod/{node.name}")


def _events(jobs: list[Manifest], events: list[Manifest]) -> list[Entry]:
    found = []
    for event in view.in_order(events):
        job = next((job for job in jobs if view.about(event, job)), None)
        if job is not None:
            found.append(event_entry(event, job["metadata"]["name"]))
    return found


def event_entry(event: Manifest, job: str) -> Entry:
    """The row of one Event."""
    told = view.story([event])[0]
    involved = event["involvedObject"]
    about = f"{str(involved.get('kind', '')).lower()}/{involved.get('name', '')}"
    space, name = event["metadata"]["namespace"], event["metadata"]["name"]
    row = [
        age(time.time() - told.at),
        "Warning" if told.warning else "Normal",
        told.reason,
        about,
        " ".join(told.message.split()),
    ]
    data = {**msgspec.to_builtins(told), "object": about, "job": job}
    return Entry(space, row, data, event["metadata"]["uid"], f"event/{name}")


def _plans(plans: list[Manifest], only: str | None, *, wide: bool) -> list[Entry]:
    """All plans, those for jobs that do not exist included, or those of one job."""
    found = []
    for plan in plans:
        metadata, status = plan["metadata"], plan.get("status") or {}
        job = view.job_of_plan(plan)
        if only and job != only:
            continue
        seen = {
            "name": metadata["name"],
            "namespace": metadata["namespace"],
            "job": job,
            "phase": status.get("phase") or "",
            "reason": status.get("reason") or "",
            "message": status.get("message") or "",
            "created_at": view.moment(metadata.get("creationTimestamp")) or 0.0,
            "ended_at": view.moment(status.get("finishTime")),
        }
        row = [seen["name"], seen["phase"] or rows.NONE, age(time.time() - seen["created_at"])]
        row += [job, seen["message"] or rows.NONE] if wide else []
        found.append(Entry(metadata["namespace"], row, seen, metadata["uid"], f"scaleplan/{metadata['name']}"))
    return found
