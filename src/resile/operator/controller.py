"""Watches jobs, their masters' pods and Services, and plans, and queues the reconciliation that each change needs."""

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
from resile.operator.cached_objects import metadata_only, pod_only, resource_only
from resile.operator.jobs.reconciler import JobReconciler
from resile.operator.metrics import Metrics
from resile.operator.plans import PlanReconciler
from resile.operator.workqueue import WorkQueue


class Controller:
    """Runs the informers for all objects that the operator reads, and a work queue for each kind that it reconciles."""

    def __init__(self, client: Client, namespace: str, image: str, metrics: Metrics) -> None:
        self._metrics = metrics

        def informer(
            kind: Kind,
            on_change: Callable[[Object], None],
            trim: Callable[[Object], Object],
            labels: dict[str, str] | None = None,
        ) -> Informer:
            watched = Watched(kind, namespace, labels)
            made = Informer(client, watched, on_change, trim=trim, relist=intervals.RELIST)
            self._informers.append((kind, made))
            return made

        self._informers: list[tuple[Kind, Informer]] = []
        self._queues: list[tuple[Kind, WorkQueue, list[Informer]]] = []
        """Each queue with the informers that its reconciler reads."""
        for kind in registry.job_kinds():
            jobs = _JobController(kind, client, image, metrics, informer, self._count)
            self._queues.append((of(kind), jobs.queue, jobs.informers))
            self._queues += [(of(plans.kind), plans.queue, plans.informers) for plans in jobs.plans]

    def not_synced(self) -> list[str]:
        return list(dict.fromkeys(kind.name for kind, informer in self._informers if not informer.synced.is_set()))

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            for _, informer in self._informers:
                group.create_task(informer.run())
            for _, queue, informers in self._queues:
                group.create_task(_run_when_synced(queue, informers))
            group.create_task(self._measure())

    def _count(self, kind: Kind, _: Key, outcome: str, seconds: float) -> None:
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


Inform = Callable[..., Informer]
"""Makes an informer from a Kubernetes kind, `on_change`, `trim`, and the labels of the objects (None: all)."""
Count = Callable[[Kind, Key, str, float], None]
"""Counts one reconciliation, given the kind and key of its object, its outcome, and the seconds that it took."""


class _JobController:
    """Watches the jobs of one kind, their plans, and the pods and Services of their masters. Does not watch nodes."""

    def __init__(
        self, kind: JobKind, client: Client, image: str, metrics: Metrics, inform: Inform, count: Count
    ) -> None:
        self._kind = kind
        jobs = inform(of(kind), self._on_job, resource_only)
        pods = inform(PODS, self._on_master_object, pod_only, kind.masters)
        services = inform(SERVICES, self._on_master_object, metadata_only, kind.masters)
        self.informers = [jobs, pods, services]
        reconciler = JobReconciler(kind, client, jobs, pods, services, image, metrics)
        self.queue = WorkQueue(reconciler.reconcile, functools.partial(count, of(kind)))
        plan_kinds = [plan_kind for plan_kind in registry.plan_kinds() if plan_kind.job_kind is kind]
        self.plans = [_PlanController(plan_kind, client, jobs, inform, count) for plan_kind in plan_kinds]

    def _on_job(self, item: Object) -> None:
        job = key_of(item)
        self.queue.add(job)
        for plans in self.plans:
            plans.on_job(job)

    def _on_master_object(self, item: Object) -> None:
        name = self._kind.job_of(item["metadata"].get("labels") or {})
        if name:
            self.queue.add(Key(item["metadata"]["namespace"], name))


class _PlanController:
    def __init__(self, kind: PlanKind, client: Client, jobs: Informer, inform: Inform, count: Count) -> None:
        self.kind = kind
        self._informer = inform(of(kind), self._on_plan, resource_only)
        self.informers = [jobs, self._informer]
        reconciler = PlanReconciler(kind, client, self._informer, jobs)
        self.queue = WorkQueue(reconciler.reconcile, functools.partial(count, of(kind)))

    def _on_plan(self, item: Object) -> None:
        self.queue.add(key_of(item))

    def on_job(self, job: Key) -> None:
        for plan in self._informer.all():
            is_its = key_of(plan).namespace == job.namespace and self.kind.job_of(plan) == job.name
            if is_its and self.kind.is_open(plan):
                self.queue.add(key_of(plan))
