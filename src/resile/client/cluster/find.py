"""Finding a job of the cluster by its name, with the name that was probably meant."""

from __future__ import annotations

from resile.api.kinds import registry
from resile.api.kinds.registry import job_kind_of
from resile.client.cluster.connection import Cluster
from resile.client.errors import CommandError
from resile.client.local.jobs import all_jobs
from resile.client.pod_names import did_you_mean, is_pod_of, pod_name
from resile.kube import kinds as kube
from resile.kube.informer import Watched
from resile.kube.kinds import Object


async def find(cluster: Cluster, name: str) -> Object:
    """The job of this name in the namespace that is meant.

    Raises:
        CommandError: there is none, or the cluster refuses.
    """
    job = await _get(cluster, name)
    if job is None:
        raise _unknown(cluster, name, await _jobs(cluster))
    return job


async def find_pod(cluster: Cluster, name: str) -> tuple[Object, str]:
    """The job that a pod's name belongs to, and the pod; the pod is empty when `name` is a job's own.

    Raises:
        CommandError: no job has such a name or such a pod.
    """
    job = await _get(cluster, name)
    if job is not None:
        return job, ""
    jobs = await _jobs(cluster)
    for job in jobs:
        if is_pod_of(job_kind_of(job), name, job["metadata"]["name"]):
            return job, name
    for job in jobs:
        if pod := pod_name(job_kind_of(job), job["metadata"]["name"], name):
            raise CommandError(f"{name} is a node of a job; its log is that of a pod: `resile logs {pod}`")
    raise _unknown(cluster, name, jobs)


async def _get(cluster: Cluster, name: str) -> Object | None:
    for kind in registry.job_kinds():
        job = await cluster.get(kube.of(kind), name)
        if job is not None:
            return job
    return None


async def _jobs(cluster: Cluster) -> list[Object]:
    found = [await cluster.all(Watched(kube.of(kind), cluster.namespace)) for kind in registry.job_kinds()]
    return [job for jobs in found for job in jobs]


def _unknown(cluster: Cluster, name: str, jobs: list[Object]) -> CommandError:
    names = sorted(job["metadata"]["name"] for job in jobs)
    here = " on this machine or" if all_jobs() else ""
    hint = did_you_mean(name, names) or "there are no jobs in it; -n chooses another"
    return CommandError(f"there is no job {name!r}{here} in namespace {cluster.namespace} of the cluster; {hint}")
