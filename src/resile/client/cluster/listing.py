"""Listing the jobs of a cluster, their nodes, Events or plans: once, then again after every change."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Iterator, Sequence

from resile.api.kinds import registry
from resile.api.kinds.base import PlanKind, ResourceKind
from resile.api.kinds.registry import job_kind_of
from resile.api.timestamps import moment
from resile.client.base import EVENT, POD, Found, Item, Listable, PlanView, Query
from resile.client.cluster import job_view
from resile.client.cluster.connection import Cluster, Watch
from resile.client.cluster.jobs import find, installed
from resile.kube import kinds as kube
from resile.kube.informer import Watched
from resile.kube.kinds import ALL_NAMESPACES, Object

REST_SECONDS = 30.0
"""How long one wait for a change lasts. If nothing changed, the next wait follows without output."""
LAST_SECONDS = 10.0
"""How long to wait, after all jobs are over, for their last Events and the ends of their pods."""


async def watch(cluster: Cluster, query: Query) -> AsyncGenerator[Found, None]:
    """Yield the listing as it is now, and after every change, until all jobs are over and their pods have ended."""
    if query.job:
        await find(cluster, query.job)
    space = ALL_NAMESPACES if query.everywhere else cluster.namespace
    only = {"metadata.name": query.job} if query.job else None
    wanted = [Watched(kind, space, fields=only) for kind in await installed(cluster, registry.JOB_KINDS)]
    match query.what:
        case Listable.EVENTS:
            wanted.append(Watched(kube.EVENTS, space))
        case Listable.PLANS:
            wanted += [Watched(kind, space) for kind in await installed(cluster, registry.PLAN_KINDS)]
        case Listable.NODES | Listable.JOBS if query.with_nodes or query.what is Listable.NODES:
            wanted.append(Watched(kube.PODS, space))
    async with cluster.watch(*wanted) as watching:
        found = _found(query, watching)
        yield found
        until = None
        while not found.nothing:
            if until is None and all(map(job_view.over, _of(registry.JOB_KINDS, watching))):
                until = time.monotonic() + LAST_SECONDS
            seconds = REST_SECONDS if until is None else until - time.monotonic()
            if until is not None and (seconds <= 0 or _has_told_all(query.what, watching)):
                return
            if await watching.change(seconds):
                yield _found(query, watching)


def _has_told_all(kind: Listable, watching: Watch) -> bool:
    if kind is Listable.NODES:
        return all(map(job_view.pod_over, watching.all(kube.PODS)))
    if kind is Listable.EVENTS:
        ended = {event["involvedObject"].get("uid") for event in watching.all(kube.EVENTS) if job_view.last_word(event)}
        return ended >= {job["metadata"]["uid"] for job in _of(registry.JOB_KINDS, watching)}
    return True


def _found(query: Query, watching: Watch) -> Found:
    jobs = _of(registry.JOB_KINDS, watching)
    match query.what:
        case Listable.PLANS:
            plans = _of(registry.PLAN_KINDS, watching)
            return Found(_plans(plans, query.job), nothing=not plans)
        case Listable.EVENTS:
            items = _events(jobs, watching.all(kube.EVENTS))
        case Listable.NODES:
            items = _nodes(jobs, watching.all(kube.PODS))
        case Listable.JOBS:
            items = _jobs(jobs, watching.all(kube.PODS))
    return Found(items, nothing=not jobs)


def _of(kinds: Sequence[ResourceKind], watching: Watch) -> list[Object]:
    """The watched objects of `kinds`. Kinds that are not installed are not watched, and have none."""
    return [item for kind in kinds for item in watching.all(kube.of(kind))]


def _jobs(jobs: list[Object], pods: list[Object]) -> list[Item]:
    now = time.time()
    views = ((job_kind_of(job), job_view.job_view(job, its, now)) for job, its in _with_pods(jobs, pods))
    return [Item(view.namespace, view.name, view, kind.noun) for kind, view in views]


def _nodes(jobs: list[Object], pods: list[Object]) -> list[Item]:
    items = []
    for job, its in _with_pods(jobs, pods):
        views = (job_view.node_view(job_kind_of(job), pod, job["metadata"]["name"]) for pod in its)
        items += [Item(job["metadata"]["namespace"], view.name, view, POD) for view in views]
    return sorted(items, key=lambda item: (item.namespace, item.name))


def _with_pods(jobs: list[Object], pods: list[Object]) -> Iterator[tuple[Object, list[Object]]]:
    by_job = {kind.name: job_view.pods_by_job(kind, pods) for kind in registry.JOB_KINDS}
    for job in jobs:
        name = job["metadata"]["namespace"], job["metadata"]["name"]
        yield job, by_job[job_kind_of(job).name].get(name, [])


def _events(jobs: list[Object], events: list[Object]) -> list[Item]:
    items = []
    for event in job_view.in_order(events):
        job = next((job for job in jobs if job_view.about(event, job)), None)
        if job is not None:
            shown = job_view.event_view(event, job["metadata"]["name"])
            items.append(Item(event["metadata"]["namespace"], event["metadata"]["name"], shown, EVENT))
    return items


def _plans(plans: list[Object], only: str) -> list[Item]:
    items = []
    for plan in plans:
        kind = registry.kind_of(plan)
        assert isinstance(kind, PlanKind)
        shown = _plan_view(kind, plan)
        if not only or shown.job == only:
            items.append(Item(shown.namespace, shown.name, shown, kind.definition.kind.lower()))
    return items


def _plan_view(kind: PlanKind, plan: Object) -> PlanView:
    metadata, status = plan["metadata"], plan.get("status") or {}
    return PlanView(
        name=metadata["name"],
        namespace=metadata["namespace"],
        job=kind.job_of(plan),
        phase=kind.phase_of(plan) or "",
        reason=status.get("reason") or "",
        message=status.get("message") or "",
        created_at=moment(metadata.get("creationTimestamp")) or 0.0,
        ended_at=moment(status.get("finishTime")),
    )
