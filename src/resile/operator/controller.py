"""Watches jobs, their masters' pods and Services, and plans, and queues the reconciliation that each change needs.

The informers drop large parts of objects that the operator does not read, so that they take less memory.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable

from resile.api.kinds import registry
from resile.api.kinds.base import JobKind, PlanKind
from resile.kube.client import Client
from resile.kube.informer import Informer, Key, Watched, key_of
from resile.kube.kinds import PODS, SERVICES, Kind, Object, of
from resile.operator import intervals
from resile.operator.jobs.master_pod import LAST_APPLIED
from resile.operator.jobs.reconciler import JobReconciler
from resile.operator.metrics import Metrics
from resile.operator.plans import PlanReconciler
from resile.operator.workqueue import Reconcile, WorkQueue


class Controller:
    """Runs the informers for all objects that the operator reads, and a work queue for each kind that it reconciles."""

    def __init__(self, client: Client, namespace: str, image: str, metrics: Metrics) -> None:
        self._client = client
        self._namespace = namespace
        self._metrics = metrics
        self._informers: list[tuple[Kind, Informer]] = []
        self._queues: list[tuple[Kind, WorkQueue, list[Informer]]] = []
        """Each queue with the informers that its reconciler reads."""
        for kind in registry.JOB_KINDS:
            self._watch_jobs(kind, image)

    def not_synced(self) -> list[str]:
        return list(dict.fromkeys(kind.name for kind, informer in self._informers if not informer.synced.is_set()))

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            for _, informer in self._informers:
                group.create_task(informer.run())
            for _, queue, informers in self._queues:
                group.create_task(_run_when_synced(queue, informers))
            group.create_task(self._measure())

    def _watch_jobs(self, kind: JobKind, image: str) -> None:
        """Watch the jobs of one kind, their plans, and the pods and Services of their masters, but not the nodes."""

        def on_job(item: Object) -> None:
            queue.add(key_of(item))
            for add_plans in plans:
                add_plans(key_of(item))

        def on_master_object(item: Object) -> None:
            name = kind.job_of(item["metadata"].get("labels") or {})
            if name:
                queue.add(Key(item["metadata"]["namespace"], name))

        jobs = self._inform(of(kind), on_job, _resource_only)
        pods = self._inform(PODS, on_master_object, _pod_only, kind.masters)
        services = self._inform(SERVICES, on_master_object, _metadata_only, kind.masters)
        reconciler = JobReconciler(kind, self._client, jobs, pods, services, image, self._metrics)
        queue = self._queue(of(kind), reconciler.reconcile, [jobs, pods, services])
        plans = [self._watch_plans(plan, jobs) for plan in registry.PLAN_KINDS if plan.job_kind is kind]

    def _watch_plans(self, kind: PlanKind, jobs: Informer) -> Callable[[Key], None]:
        """Watch the plans of one kind. Returns a function that queues all open plans of a job."""

        def add_plans(job: Key) -> None:
            for plan in plans.all():
                is_its = key_of(plan).namespace == job.namespace and kind.job_of(plan) == job.name
                if is_its and kind.is_open(plan):
                    queue.add(key_of(plan))

        plans = self._inform(of(kind), lambda item: queue.add(key_of(item)), _resource_only)
        queue = self._queue(of(kind), PlanReconciler(kind, self._client, plans, jobs).reconcile, [jobs, plans])
        return add_plans

    def _inform(
        self,
        kind: Kind,
        on_change: Callable[[Object], None],
        trim: Callable[[Object], Object],
        labels: dict[str, str] | None = None,
    ) -> Informer:
        watched = Watched(kind, self._namespace, labels)
        informer = Informer(self._client, watched, on_change, trim=trim, relist=intervals.RELIST)
        self._informers.append((kind, informer))
        return informer

    def _queue(self, kind: Kind, reconcile: Reconcile, informers: list[Informer]) -> WorkQueue:
        queue = WorkQueue(reconcile, functools.partial(self._count, kind))
        self._queues.append((kind, queue, informers))
        return queue

    def _count(self, kind: Kind, outcome: str, seconds: float) -> None:
        self._metrics.reconciles.labels(kind.name, outcome).inc()
        self._metrics.seconds.labels(kind.name).observe(seconds)

    async def _measure(self) -> None:
        while True:
            for kind, queue, _ in self._queues:
                self._metrics.waiting.labels(kind.name).set(len(queue))
            for name in {kind.name for kind, _ in self._informers}:
                known = sum(len(informer) for kind, informer in self._informers if kind.name == name)
                self._metrics.objects.labels(name).set(known)
            await asyncio.sleep(intervals.MEASURE)


async def _run_when_synced(queue: WorkQueue, informers: list[Informer]) -> None:
    """Run `queue` once all of `informers` have listed their objects. Before that, a job would seem to have no master.

    If a kind has no CRD, its objects cannot be listed. Then the queue of this kind waits until the CRD exists, and
    /readyz names the kind. Queues of other kinds are not delayed.
    """
    for informer in informers:
        await informer.synced.wait()
    await queue.run()


def _resource_only(item: Object) -> Object:
    """A custom resource without large metadata that is not needed, such as kubectl's copy of the manifest."""
    metadata = _metadata(item)
    if LAST_APPLIED in metadata.get("annotations", {}):
        metadata["annotations"] = {key: text for key, text in metadata["annotations"].items() if key != LAST_APPLIED}
    return {**item, "metadata": metadata}


def _pod_only(item: Object) -> Object:
    return {"metadata": _metadata(item), "status": item.get("status") or {}}


def _metadata_only(item: Object) -> Object:
    return {"metadata": _metadata(item)}


def _metadata(item: Object) -> Object:
    return {field: value for field, value in item["metadata"].items() if field != "managedFields"}
