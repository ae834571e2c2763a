"""What follows what: a change of a job, of its master's pod or Service is a reason to look at that job."""

from __future__ import annotations

import asyncio
import functools

from resile.api.kinds.labels import MASTER_APP, MASTER_APP_VALUE, PREFIXED_JOB_NAME
from resile.operator import settings
from resile.operator.cluster import ELASTIC_JOB, POD, SCALE_PLAN, SERVICE, Cluster, Object
from resile.operator.informer import Informer, key_of
from resile.operator.jobs.reconciler import JobReconciler
from resile.operator.metrics import Metrics
from resile.operator.scaleplans.decisions import is_open, job_named_by
from resile.operator.scaleplans.reconciler import ScalePlanReconciler
from resile.operator.trim import metadata_only, pod_only, resource_only
from resile.operator.workqueue import Key, WorkQueue

MASTERS = {MASTER_APP: MASTER_APP_VALUE}
"""Pods and Services of masters; the nodes of jobs are never looked at here, however many there are."""


class Controller:
    """Mirrors of what the operator reads, and a queue for each kind that it acts on."""

    def __init__(self, cluster: Cluster, namespace: str, image: str, metrics: Metrics) -> None:
        self._metrics = metrics
        mirror = functools.partial(Informer, cluster)
        self._jobs = mirror(ELASTIC_JOB, namespace, self._job_changed, keep=resource_only)
        self._plans = mirror(SCALE_PLAN, namespace, self._plan_changed, keep=resource_only)
        self._pods = mirror(POD, namespace, self._part_changed, keep=pod_only, labels=MASTERS)
        self._services = mirror(SERVICE, namespace, self._part_changed, keep=metadata_only, labels=MASTERS)
        jobs = JobReconciler(cluster, self._jobs, self._pods, self._services, image, metrics)
        plans = ScalePlanReconciler(cluster, self._plans, self._jobs)
        self._job_queue = WorkQueue(jobs.look, functools.partial(self._count, "ElasticJob"))
        self._plan_queue = WorkQueue(plans.look, functools.partial(self._count, "ScalePlan"))
        self._mirrors = {
            "ElasticJob": self._jobs,
            "ScalePlan": self._plans,
            "Pod": self._pods,
            "Service": self._services,
        }

    def behind(self) -> list[str]:
        """The kinds that have not been seen yet."""
        return [kind for kind, mirror in self._mirrors.items() if not mirror.synced.is_set()]

    async def run(self) -> None:
        """Follow the cluster and look at whatever changes, until cancelled."""
        async with asyncio.TaskGroup() as group:
            for mirror in self._mirrors.values():
                group.create_task(mirror.run())
            for mirror in self._mirrors.values():
                # Or a job would seem to have no master. It may take as long as the API server is away; /readyz tells.
                await mirror.synced.wait()
            group.create_task(self._job_queue.run())
            group.create_task(self._plan_queue.run())
            group.create_task(self._measure())

    def _job_changed(self, item: Object) -> None:
        job = key_of(item)
        self._job_queue.add(job)
        for plan in self._plans.all():
            if key_of(plan).namespace == job.namespace and is_open(plan) and job_named_by(plan) == job.name:
                self._plan_queue.add(key_of(plan))

    def _plan_changed(self, item: Object) -> None:
        self._plan_queue.add(key_of(item))

    def _part_changed(self, item: Object) -> None:
        name = (item["metadata"].get("labels") or {}).get(PREFIXED_JOB_NAME)
        if name:
            self._job_queue.add(Key(item["metadata"]["namespace"], name))

    def _count(self, kind: str, _: Key, outcome: str, seconds: float) -> None:
        self._metrics.looks.labels(kind, outcome).inc()
        self._metrics.seconds.labels(kind).observe(seconds)

    async def _measure(self) -> None:
        while True:
            self._metrics.waiting.labels("ElasticJob").set(len(self._job_queue))
            self._metrics.waiting.labels("ScalePlan").set(len(self._plan_queue))
            for kind, mirror in self._mirrors.items():
                self._metrics.objects.labels(kind).set(len(mirror.all()))
            await asyncio.sleep(settings.MEASURE)
