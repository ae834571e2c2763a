"""Listing jobs of a cluster with their nodes, Events and plans: one look, then what a watch tells."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator

from resile.client.base import Found, Item, Listable, PlanView, Query
from resile.client.cluster import view
from resile.client.cluster.connection import EVERY_NAMESPACE, Cluster, Manifest, Wanted, Watch
from resile.client.cluster.find import find
from resile.kube import kinds as kube
from resile.kube.timestamps import moment

REST_SECONDS = 30.0
"""After which a watch looks again although nothing changed."""
LAST_SECONDS = 10.0
"""For the last words about jobs that are over, and the ends of their pods."""


async def watch(cluster: Cluster, query: Query) -> AsyncGenerator[Found, None]:
    """What there is now, and after every change, until the jobs are over and nothing more is to come of them."""
    if query.job:
        await find(cluster, query.job)
    space = EVERY_NAMESPACE if query.everywhere else cluster.namespace
    wanted = [Wanted(kube.JOBS, space, fields={"metadata.name": query.job} if query.job else None)]
    wanted += {
        Listable.JOBS: [Wanted(kube.PODS, space)] if query.with_nodes else [],
        Listable.NODES: [Wanted(kube.PODS, space)],
        Listable.EVENTS: [Wanted(kube.EVENTS, space)],
        Listable.PLANS: [Wanted(kube.PLANS, space)],
    }[query.what]
    async with cluster.watch(*wanted) as watching:
        found = _found(query, watching)
        yield found
        until = None
        while not found.nothing:
            if until is None and all(map(view.over, watching.all(kube.JOBS))):
                until = time.monotonic() + LAST_SECONDS
            seconds = REST_SECONDS if until is None else until - time.monotonic()
            if until is not None and (seconds <= 0 or _has_told_all(query.what, watching)):
                return
            if await watching.change(seconds):
                yield _found(query, watching)


def _has_told_all(kind: Listable, watching: Watch) -> bool:
    """Whether nothing more is to come of jobs that are over."""
    if kind is Listable.NODES:
        return all(map(view.pod_over, watching.all(kube.PODS)))
    if kind is Listable.EVENTS:
        ended = {event["involvedObject"].get("uid") for event in watching.all(kube.EVENTS) if view.last_word(event)}
        return ended >= {job["metadata"]["uid"] for job in watching.all(kube.JOBS)}
    return True


def _found(query: Query, watching: Watch) -> Found:
    jobs = watching.all(kube.JOBS)
    match query.what:
        case Listable.PLANS:
            plans = watching.all(kube.PLANS)
            return Found(_plans(plans, query.job), nothing=not plans)
        case Listable.EVENTS:
            items = _events(jobs, watching.all(kube.EVENTS))
        case Listable.NODES:
            items = _nodes(jobs, watching.all(kube.PODS))
        case Listable.JOBS:
            items = _jobs(jobs, watching.all(kube.PODS) if watching.has(kube.PODS) else [])
    return Found(items, nothing=not jobs)


def _jobs(jobs: list[Manifest], pods: list[Manifest]) -> list[Item]:
    by_job = view.pods_by_job(pods)
    now = time.time()
    names = [(job["metadata"]["namespace"], job["metadata"]["name"]) for job in jobs]
    return [Item(*name, view.job_view(job, by_job.get(name, []), now)) for name, job in zip(names, jobs, strict=True)]


def _nodes(jobs: list[Manifest], pods: list[Manifest]) -> list[Item]:
    known = {(job["metadata"]["namespace"], job["metadata"]["name"]) for job in jobs}
    items = [
        Item(space, pod["metadata"]["name"], view.node_view(pod, job))
        for (space, job), of_job in view.pods_by_job(pods).items()
        if (space, job) in known
        for pod in of_job
    ]
    return sorted(items, key=lambda item: (item.namespace, item.name))


def _events(jobs: list[Manifest], events: list[Manifest]) -> list[Item]:
    items = []
    for event in view.in_order(events):
        job = next((job for job in jobs if view.about(event, job)), None)
        if job is not None:
            shown = view.event_view(event, job["metadata"]["name"])
            items.append(Item(event["metadata"]["namespace"], event["metadata"]["name"], shown))
    return items


def _plans(plans: list[Manifest], only: str) -> list[Item]:
    """All plans, those for jobs that do not exist included, or those of one job."""
    views = [_plan_view(plan) for plan in plans]
    return [Item(plan.namespace, plan.name, plan) for plan in views if not only or plan.job == only]


def _plan_view(plan: Manifest) -> PlanView:
    metadata, status = plan["metadata"], plan.get("status") or {}
    return PlanView(
        name=metadata["name"],
        namespace=metadata["namespace"],
        job=view.job_of_plan(plan),
        phase=status.get("phase") or "",
        reason=status.get("reason") or "",
        message=status.get("message") or "",
        created_at=moment(metadata.get("creationTimestamp")) or 0.0,
        ended_at=moment(status.get("finishTime")),
    )
