"""Writing jobs to a cluster: applying manifests, scaling, suspending. The operator and the job's master act on it."""

from __future__ import annotations

from collections.abc import Mapping

from resile.api.kinds import registry
from resile.api.kinds.base import JobKind
from resile.api.kinds.registry import job_kind_of
from resile.client.base import Document
from resile.client.cluster import job_view
from resile.client.cluster.connection import Cluster
from resile.client.cluster.jobs import find
from resile.client.errors import CommandError, NotUsableError, check_roles
from resile.kube import kinds as kube
from resile.kube.kinds import Object


async def apply(cluster: Cluster, document: Document, namespace: str | None) -> tuple[Object, str]:
    """Apply one document. Returns the object, and `created`, `configured` or `unchanged`.

    `namespace` is the one that the user named. Raises `NotUsableError` if the manifest names another one, and
    `CommandError` if the job is over.
    """
    registered = registry.kind_of_resource(document.resource)
    kind = kube.of(registered)
    item = _in_namespace(document.written, namespace, cluster)
    metadata = item["metadata"]
    before = await cluster.get(kind, metadata["name"], metadata["namespace"])
    if before is not None and isinstance(registered, JobKind) and job_view.over(before):
        raise CommandError(
            f"job {metadata['name']} is over ({job_view.phase(before)}) and will not run again; "
            f"`resile delete {metadata['name']}` removes it, with its logs, and makes room"
        )
    applied = await cluster.apply(kind, item)
    if before is None:
        return applied, "created"
    same = before["metadata"].get("generation") == applied["metadata"].get("generation")
    return applied, "unchanged" if same else "configured"


async def scale(cluster: Cluster, name: str, replicas: Mapping[str, int]) -> None:
    job = await _unfinished(cluster, name)
    kind = job_kind_of(job)
    check_roles(name, replicas, kind.declared_roles(job))
    others = dict(replicas)
    if kind.definition.scale is not None and kind.scaled_role in others:  # a user may have the right to nothing else
        number = others.pop(kind.scaled_role)
        await cluster.patch(kube.of(kind), name, {"spec": {"replicas": number}}, "scale")
    if others:
        await cluster.patch(kube.of(kind), name, kind.scale_patch(others))


async def set_suspended(cluster: Cluster, name: str, suspended: bool) -> bool:
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


def _in_namespace(document: Object, namespace: str | None, cluster: Cluster) -> Object:
    metadata = document["metadata"]
    own = metadata.get("namespace")
    if own and namespace and own != namespace:
        raise NotUsableError(f"the manifest says namespace {own}, and -n says {namespace}")
    kept = {key: metadata[key] for key in ("name", "labels", "annotations", "finalizers") if metadata.get(key)}
    rest = {key: value for key, value in document.items() if key != "status"}
    return {**rest, "metadata": {**kept, "namespace": own or cluster.namespace}}
