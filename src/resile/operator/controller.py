"""Which change leads to which reconciliation: of a job itself, or of its master's pod or Service."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable

from resile.api.kinds.labels import MASTER_APP, MASTER_APP_VALUE, PREFIXED_JOB_NAME
from resile.kube.client import Client
from resile.kube.informer import Informer, Key, Watched, key_of
from resile.kube.kinds import ELASTIC_JOBS, PODS, SCALE_PLANS, SERVICES, Kind, Object
from resile.operator import settings
from resile.operator.jobs.reconciler import JobReconciler
from resile.operator.metrics import Metrics
from resile.operator.scaleplans.decisions import is_open, job_named_by
from resile.operator.scaleplans.reconciler import ScalePlanReconciler
from resile.operator.trim import metadata_only, pod_only, resource_only
from resile.operator.workqueue import WorkQueue

MASTERS = {MASTER_APP: MASTER_APP_VALUE}
"""The labels of masters' pods and Services; the nodes of jobs are never watched here, however many there are."""


class Controller:
    """Informers of what the operator reads, and a queue for each kind that it acts on."""

    def __init__(self, client: Client, namespace: str, image: str, metrics: Metrics) -> None:
        self._metrics = metrics

        def informer(
            kind: Kind,
            on_change: Callable[[Object], None],
            trim: Callable[[Object], Object],
            labels: dict[str, str] | None = None,
        ) -> Informer:
            watched = Watched(kind, namespace, labels)
            return Informer(client, watched, on_change, trim=trim, relist=settings.RELIST)

        self._jobs = informer(ELASTIC_JOBS, self._on_job, resource_only)
        self._plans = informer(SCALE_PLANS, self._on_plan, resource_only)
        self._pods = informer(PODS, self._on_master_object, pod_only, MASTERS)
        self._services = informer(SERVICES, self._on_master_object, metadata_only, MASTERS)
        jobs = JobReconciler(client, self._jobs, self._pods, self._services, image, metrics)
        plans = ScalePlanReconciler(client, self._plans, self._jobs)
        self._job_queue = WorkQueue(jobs.reconcile, functools.partial(self._count, ELASTIC_JOBS))
        self._plan_queue = WorkQueue(plans.reconcile, functools.partial(self._count, SCALE_PLANS))
        self._informers = {
            ELASTIC_JOBS: self._jobs,
            SCALE_PLANS: self._plans,
            PODS: self._pods,
            SERVICES: self._services,
        }

    def not_synced(self) -> list[str]:
        """The kinds that have not been listed yet."""
        return [kind.name for kind, informer in self._informers.items() if not informer.synced.is_set()]

    async def run(self) -> None:
        """Follow the cluster and reconcile whatever changes, until cancelled."""
        async with asyncio.TaskGroup() as group:
            for informer in self._informers.values():
                group.create_task(informer.run())
            for informer in self._informers.values():
                # Or a job would seem to have no master. It may take as long as the API server is away; /readyz tells.
                await informer.synced.wait()
            group.create_task(self._job_queue.run())
            group.create_task(self._plan_queue.run())
            group.create_task(self._measure())

    def _on_job(self, item: Object) -> None:
        job = key_of(item)
        self._job_queue.add(job)
        for plan in self._plans.all():
            if key_of(plan).namespace == job.namespace and is_open(plan) and job_named_by(plan) == job.name:
                self._plan_queue.add(key_of(plan))

    def _on_plan(self, item: Object) -> None:
        self._plan_queue.add(key_of(item))

    def _on_master_object(self, item: Object) -> None:
        name = (item["metadata"].get("labels") or {}).get(PREFIXED_JOB_NAME)
        if name:
            self._job_queue.add(Key(item["metadata"]["namespace"], name))

    def _count(self, kind: Kind, _: Key, outcome: str, seconds: float) -> None:
        self._metrics.reconciles.labels(kind.name, outcome).inc()
        self._metrics.seconds.labels(kind.name).observe(seconds)

    async def _measure(self) -> None:
        while True:
            self._metrics.waiting.labels(ELASTIC_JOBS.name).set(len(self._job_queue))
            self._metrics.waiting.labels(SCALE_PLANS.name).set(len(self._plan_queue))
            for kind, informer in self._informers.items():
                self._metrics.objects.labels(kind.name).set(len(informer))
            await asyncio.sleep(settings.MEASURE)
