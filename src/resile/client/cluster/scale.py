"""Changing a job of a cluster: another size, a pause. Written to the job's object; the job's master acts on it."""

from __future__ import annotations

from collections.abc import Mapping

from resile.api.kinds.registry import job_kind_of
from resile.client.cluster import job_view
from resile.client.cluster.connection import Cluster
from resile.client.cluster.find import find
from resile.client.errors import CommandError
from resile.kube import kinds as kube
from resile.kube.kinds import Object


async def scale(cluster: Cluster, name: str, replicas: Mapping[str, int]) -> None:
    """Change how many nodes the roles of a job have.

    Raises:
        CommandError: there is no such job or role, the job is over, or the cluster refuses.
    """
    job = await _unfinished(cluster, name)
    kind = job_kind_of(job)
    known = kind.declared_roles(job)
    unknown = [role for role in replicas if role not in known]
    if unknown:
        said = ", ".join(known)
        raise CommandError(f"job {name} has no role {unknown[0]!r}; known are {said}; nothing was changed")
    others = dict(replicas)
    if kind.definition.scale is not None and kind.scaled_role in others:  # a user may have the right to nothing else
        number = others.pop(kind.scaled_role)
        await cluster.patch(kube.of(kind), name, {"spec": {"replicas": number}}, "scale")
    if others:
        await cluster.patch(kube.of(kind), name, kind.scale_patch(others))


async def set_suspended(cluster: Cluster, name: str, suspended: bool) -> bool:
    """Let go of a job's nodes, or take them back; False if that is so already.

    Raises:
        CommandError: there is no such job, it is over, or the cluster refuses.
    """
    job = await _unfinished(cluster, name)
    kind = job_kind_of(job)
    if kind.is_suspended(job) == suspended:
        return False
    await cluster.patch(kube.of(kind), name, kind.suspend_patch(suspended))
    return True


async def _unfinished(cluster: Cluster, name: str) -> Object:
    job = await find(cluster, name)
    if job_view.over(job):
        raise CommandError(f"job {name} is over ({job_view.phase(job)}); nothing was changed")
    return job
