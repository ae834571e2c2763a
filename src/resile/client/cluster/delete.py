"""Deleting jobs of a cluster, and waiting until they and their pods are gone."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from resile.api.kinds.registry import job_kind_of
from resile.client.base import Deleted, Say
from resile.client.cluster.connection import Cluster
from resile.client.cluster.jobs import current, job_itself, pods_of
from resile.client.errors import CommandError
from resile.kube import kinds as kube
from resile.kube.kinds import Object
from resile.kube.owner_references import is_owned_by

DELETE_SECONDS = 60.0
"""How long to wait until a deleted job and its pods are gone, beyond the grace period of the pods."""
USUAL_GRACE = 30.0


async def delete(
    cluster: Cluster, jobs: Sequence[Object], say: Say, *, now: bool, wait: bool
) -> AsyncGenerator[Deleted, None]:
    for job in jobs:
        name = job["metadata"]["name"]
        pods = await cluster.all(pods_of(job))
        await cluster.delete(kube.of(job_kind_of(job)), name)
        if now:
            await asyncio.gather(*(cluster.delete(kube.PODS, pod["metadata"]["name"], grace=0) for pod in pods))
        if wait:
            await _gone(cluster, job, 0.0 if now else max(map(_grace, pods), default=0.0), say)
        yield Deleted(name, job_kind_of(job).noun, gone=wait)


def _grace(pod: Object) -> float:
    grace: Any = (pod.get("spec") or {}).get("terminationGracePeriodSeconds")
    return USUAL_GRACE if grace is None else float(grace)


async def _gone(cluster: Cluster, job: Object, grace: float, say: Say) -> None:
    name, uid = job["metadata"]["name"], job["metadata"]["uid"]
    patience = grace + DELETE_SECONDS
    until = time.monotonic() + patience
    told = False
    async with cluster.watch(job_itself(job), pods_of(job)) as watching:
        while True:
            left = [one["metadata"]["name"] for one in watching.all(kube.PODS) if is_owned_by(one, uid)]
            if not left and current(watching, job) is None:
                return
            seconds = until - time.monotonic()
            if seconds <= 0:
                what = f"{len(left)} of its pods are" if left else "it is"
                raise CommandError(f"job {name} was deleted, but {what} still there after {patience:g} s; --now kills")
            if not told:
                told = True
                say(f"stopping {name} ...")
            await watching.change(seconds)
