"""Changing a job of a cluster: another size, a pause. Written to the job's object; the job's master acts on it."""

from __future__ import annotations

from collections.abc import Mapping

from resile.api.job import WORKER
from resile.client.cluster import view
from resile.client.cluster.connection import Cluster, Manifest
from resile.client.cluster.find import find
from resile.client.errors import CommandError
from resile.kube import kinds as kube


async def scale(cluster: Cluster, name: str, replicas: Mapping[str, int]) -> None:
    """Change how many nodes the roles of a job have.

    Raises:
        CommandError: there is no such job or role, the job is over, or the cluster refuses.
    """
    job = await _unfinished(cluster, name)
    roles = job["spec"]["replicaSpecs"]
    unknown = [role for role in replicas if role not in roles]
    if unknown:
        known = ", ".join(role for role in roles if role not in ("master", "dlrover-master"))
        raise CommandError(f"job {name} has no role {unknown[0]!r}; known are {known}; nothing was changed")
    if WORKER in replicas:
        await cluster.patch(kube.JOBS, name, {"spec": {"replicas": replicas[WORKER]}}, "scale")
    others = {role: {"replicas": number} for role, number in replicas.items() if role != WORKER}
    if others:
        await cluster.patch(kube.JOBS, name, {"spec": {"replicaSpecs": others}})


async def set_suspended(cluster: Cluster, name: str, suspended: bool) -> bool:
    """Let go of a job's nodes, or take them back; False if that is so already.

    Raises:
        CommandError: there is no such job, it is over, or the cluster refuses.
    """
    job = await _unfinished(cluster, name)
    if bool(job["spec"].get("suspend")) == suspended:
        return False
    await cluster.patch(kube.JOBS, name, {"spec": {"suspend": suspended}})
    return True


async def _unfinished(cluster: Cluster, name: str) -> Manifest:
    job = await find(cluster, name)
    if view.over(job):
        raise CommandError(f"job {name} is over ({view.phase(job)}); nothing was changed")
    return job
