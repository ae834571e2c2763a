"""What people want of a job on a cluster: another size, a pause, an end. Written to the cluster; its master acts."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import click
from lightkube.core.resource import ApiInfo, ResourceDef
from lightkube.generic_resource import GenericNamespacedStatus

from resile.api.job import WORKER
from resile.api.kinds import elasticjob
from resile.api.manifests.metadata import GROUP, VERSION
from resile.cli.common_options import tell
from resile.client.cluster import view
from resile.client.cluster.connection import Cluster, Manifest, Wanted, on
from resile.client.cluster.find import find
from resile.client.errors import CommandError
from resile.client.target import Target
from resile.platform.kubernetes import client as kube

DELETE_SECONDS = 60.0
"""For a deleted job and its pods to be gone, beyond the pods' own grace."""
USUAL_GRACE = 30.0

_JOB = ResourceDef(GROUP, VERSION, elasticjob.KIND)


class Scale(GenericNamespacedStatus):
    """The scale subresource of ElasticJobs, which `kubectl scale` writes, too."""

    _api_info = ApiInfo(resource=_JOB, parent=_JOB, plural=elasticjob.PLURAL, verbs=["get", "patch"], action="scale")


def scale_there(target: Target, name: str, sizes: dict[str, int], output: str) -> None:
    """Change how many nodes the roles of a job have.

    Raises:
        CommandError: there is no such job or role, the job is over, or the cluster refuses.
    """

    async def scale(cluster: Cluster) -> None:
        job = await _running(cluster, name)
        roles = job["spec"]["replicaSpecs"]
        unknown = [role for role in sizes if role not in roles]
        if unknown:
            known = ", ".join(role for role in roles if role not in ("master", "dlrover-master"))
            raise CommandError(f"job {name} has no role {unknown[0]!r}; known are {known}; nothing was changed")
        if WORKER in sizes:
            await cluster.patch(Scale, name, {"spec": {"replicas": sizes[WORKER]}})
        others = {role: {"replicas": number} for role, number in sizes.items() if role != WORKER}
        if others:
            await cluster.patch(kube.JOBS, name, {"spec": {"replicaSpecs": others}})

    on(target, scale)
    words = " ".join(f"{role}={replicas}" for role, replicas in sizes.items())
    tell(output, f"elasticjob/{name} scaled: {words}", name=name, replicas=sizes)


def suspend_there(target: Target, name: str, output: str, *, on_hold: bool) -> None:
    """Let go of a job's nodes, or take them back.

    Raises:
        CommandError: there is no such job, it is over, or the cluster refuses.
    """

    async def suspend(cluster: Cluster) -> bool:
        job = await _running(cluster, name)
        if bool(job["spec"].get("suspend")) == on_hold:
            return False
        await cluster.patch(kube.JOBS, name, {"spec": {"suspend": on_hold}})
        return True

    changed = on(target, suspend)
    how = {True: ("is suspended already", "suspended"), False: ("was not suspended", "resumed")}[on_hold][changed]
    tell(output, f"elasticjob/{name} {how}", name=name, suspended=on_hold)


def delete_there(target: Target, names: list[str], output: str, *, now: bool, wait: bool) -> None:
    """Delete jobs, with everything that belongs to them; with `wait`, return when they and their pods are gone.

    Raises:
        CommandError: there is no such job, the cluster refuses, or they are not gone in time.
    """

    async def delete(cluster: Cluster) -> None:
        jobs = [await find(cluster, name) for name in names]  # all names are good before the first one goes
        for job in jobs:
            name = job["metadata"]["name"]
            pods = await cluster.all(Wanted(kube.PODS, cluster.namespace, labels=view.pod_labels(name)))
            await cluster.delete(kube.JOBS, name)
            if now:
                await asyncio.gather(*(cluster.delete(kube.PODS, pod["metadata"]["name"], grace=0) for pod in pods))
            if wait:
                await _gone(cluster, job, 0.0 if now else max(map(_grace, pods), default=0.0))
            how = "deleted" if wait else "is being deleted"
            tell(output, f"elasticjob/{name} {how}", name=name, deleted=True)

    on(target, delete)


async def _running(cluster: Cluster, name: str) -> Manifest:
    job = await find(cluster, name)
    if view.over(job):
        raise CommandError(f"job {name} is over ({view.phase(job)}); nothing was changed")
    return job


def _grace(pod: Manifest) -> float:
    grace: Any = (pod.get("spec") or {}).get("terminationGracePeriodSeconds")
    return USUAL_GRACE if grace is None else float(grace)


async def _gone(cluster: Cluster, job: Manifest, grace: float) -> None:
    """Wait for the end of a job that was deleted and of the pods that it had."""
    name, uid = job["metadata"]["name"], job["metadata"]["uid"]
    patience = grace + DELETE_SECONDS
    until = time.monotonic() + patience
    jobs = Wanted(kube.JOBS, cluster.namespace, fields={"metadata.name": name})
    pods = Wanted(kube.PODS, cluster.namespace, labels=view.pod_labels(name))
    told = False
    async with cluster.watch(jobs, pods) as watching:
        while True:
            left = [one["metadata"]["name"] for one in watching.all(kube.PODS) if _owned(one, uid)]
            there = any(one["metadata"]["uid"] == uid for one in watching.all(kube.JOBS))
            if not left and not there:
                return
            seconds = until - time.monotonic()
            if seconds <= 0:
                what = f"{len(left)} of its pods are" if left else "it is"
                raise CommandError(f"job {name} was deleted, but {what} still there after {patience:g} s; --now kills")
            if not told:
                told = True
                click.echo(f"stopping {name} ...", err=True)
            await watching.change(seconds)


def _owned(pod: Manifest, uid: str) -> bool:
    return any(owner.get("uid") == uid for owner in pod["metadata"].get("ownerReferences") or [])
