"""Jobs of a cluster by their names, over all registered kinds.

A kind whose CustomResourceDefinition is not installed on the cluster has no jobs there: it is passed over as long as
another kind is installed.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from resile.api.kinds import registry
from resile.api.kinds.base import ResourceKind
from resile.api.kinds.registry import job_kind_of
from resile.client.cluster.connection import Cluster, KindNotInstalled, Watch
from resile.client.errors import CommandError
from resile.client.local.jobs import all_jobs
from resile.client.pod_names import did_you_mean, pod_owner
from resile.kube import kinds as kube
from resile.kube.informer import Watched
from resile.kube.kinds import Kind, Object

T = TypeVar("T")


async def find(cluster: Cluster, name: str) -> Object:
    """Return the job of this name. If there is none, raises `CommandError`, which suggests another name."""
    job = await _get(cluster, name)
    if job is None:
        raise _unknown(cluster, name, await _jobs(cluster))
    return job


async def find_pod(cluster: Cluster, name: str) -> tuple[Object, str]:
    """Find a job by its own name or by the name of one of its pods.

    Returns the job and the name of the pod, or the job and "" if `name` is the job's own name. If a job and a pod have
    this name, the job is meant. Raises `CommandError` if neither has it.
    """
    job = await _get(cluster, name)
    if job is not None:
        return job, ""
    jobs = await _jobs(cluster)
    owner = pod_owner(name, [(job, job_kind_of(job), job["metadata"]["name"]) for job in jobs])
    if owner is None:
        raise _unknown(cluster, name, jobs)
    return owner, name


async def ask_each_kind(kinds: Sequence[ResourceKind], ask: Callable[[Kind], Awaitable[T]]) -> list[T]:
    """Call `ask` for each kind; return the answers for installed kinds. Raises `KindNotInstalled` if there are none."""
    answers: list[T] = []
    missing: KindNotInstalled | None = None
    for kind in kinds:
        try:
            answers.append(await ask(kube.of(kind)))
        except KindNotInstalled as error:
            missing = error
    if missing is not None and not answers:
        raise missing
    return answers


async def installed(cluster: Cluster, kinds: Sequence[ResourceKind]) -> list[Kind]:
    """Those of `kinds` that are installed. A single kind is not checked; if it is missing, later requests fail."""

    async def probe(kind: Kind) -> Kind:
        await cluster.all(Watched(kind, cluster.namespace, fields={"metadata.name": "none"}))
        return kind

    return [kube.of(kinds[0])] if len(kinds) == 1 else await ask_each_kind(kinds, probe)


def job_itself(job: Object) -> Watched:
    metadata = job["metadata"]
    return Watched(kube.of(job_kind_of(job)), metadata["namespace"], fields={"metadata.name": metadata["name"]})


def pods_of(job: Object) -> Watched:
    metadata = job["metadata"]
    return Watched(kube.PODS, metadata["namespace"], labels=job_kind_of(job).job_selector(metadata["name"]))


def current(watching: Watch, job: Object) -> Object | None:
    """A watched job as it is now; None if it was deleted, even if another job has its name."""
    found = watching.all(kube.of(job_kind_of(job)))
    return next((one for one in found if one["metadata"]["uid"] == job["metadata"]["uid"]), None)


async def _get(cluster: Cluster, name: str) -> Object | None:
    found = await ask_each_kind(registry.JOB_KINDS, lambda kind: cluster.get(kind, name))
    return next((job for job in found if job is not None), None)


async def _jobs(cluster: Cluster) -> list[Object]:
    found = await ask_each_kind(registry.JOB_KINDS, lambda kind: cluster.all(Watched(kind, cluster.namespace)))
    return [job for jobs in found for job in jobs]


def _unknown(cluster: Cluster, name: str, jobs: list[Object]) -> CommandError:
    names = sorted(job["metadata"]["name"] for job in jobs)
    here = " on this machine or" if all_jobs() else ""
    hint = did_you_mean(name, names) or "there are no jobs in it; -n chooses another"
    return CommandError(f"there is no job {name!r}{here} in namespace {cluster.namespace} of the cluster; {hint}")
