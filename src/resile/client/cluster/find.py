"""Finding a job of the cluster by its name, with the name that was probably meant."""

from __future__ import annotations

from resile.api.job import JobSpec
from resile.api.kinds.elasticjob import ElasticJob
from resile.api.kinds.to_job_spec import to_job_spec
from resile.api.manifests.errors import BadManifest
from resile.api.manifests.names import master_name, node_of_pod
from resile.api.manifests.reader import read_manifest
from resile.client.cluster.connection import Cluster, Manifest, Wanted, on
from resile.client.errors import CommandError
from resile.client.local.jobs import all_jobs, meant, pod_name
from resile.client.target import Target
from resile.platform.kubernetes import client as kube


async def find(cluster: Cluster, name: str) -> Manifest:
    """The ElasticJob of this name in the namespace that is meant.

    Raises:
        CommandError: there is none, or the cluster refuses.
    """
    job = await cluster.get(kube.JOBS, name)
    if job is None:
        raise _unknown(cluster, name, await _jobs(cluster))
    return job


def spec_there(target: Target, name: str) -> JobSpec:
    """What a job of the cluster asks for, as the engine reads it.

    Raises:
        CommandError: there is no such job, it cannot be read, or the cluster refuses.
    """
    try:
        read = read_manifest(on(target, lambda cluster: find(cluster, name)))
    except BadManifest as bad:
        raise CommandError(f"job {name} cannot be read: {bad.errors[0]}") from bad
    if not isinstance(read, ElasticJob):
        raise CommandError(f"job {name} is no {ElasticJob.__name__}")
    return to_job_spec(read)


async def find_pod(cluster: Cluster, name: str) -> tuple[Manifest, str]:
    """The job that a pod's name belongs to, and the pod; the pod is empty when `name` is a job's own.

    Raises:
        CommandError: no job has such a name or such a pod.
    """
    job = await cluster.get(kube.JOBS, name)
    if job is not None:
        return job, ""
    jobs = await _jobs(cluster)
    for job in jobs:
        known = job["metadata"]["name"]
        if name == master_name(known) or node_of_pod(name, known) is not None:
            return job, name
    for job in jobs:
        if pod := pod_name(job["metadata"]["name"], name):
            raise CommandError(f"{name} is a node of a job; its log is that of a pod: `resile logs {pod}`")
    raise _unknown(cluster, name, jobs)


async def _jobs(cluster: Cluster) -> list[Manifest]:
    return await cluster.all(Wanted(kube.JOBS, cluster.namespace))


def _unknown(cluster: Cluster, name: str, jobs: list[Manifest]) -> CommandError:
    names = sorted(job["metadata"]["name"] for job in jobs)
    here = " on this machine or" if all_jobs() else ""
    hint = meant(name, names) or "there are no jobs in it; -n chooses another"
    return CommandError(f"there is no job {name!r}{here} in namespace {cluster.namespace} of the cluster; {hint}")
