"""Applying manifests to a cluster."""

from __future__ import annotations

from resile.api.kinds import registry
from resile.api.kinds.base import JobKind
from resile.client.base import Document
from resile.client.cluster import job_view
from resile.client.cluster.connection import Cluster
from resile.client.errors import CommandError, NotUsableError
from resile.kube import kinds as kube
from resile.kube.kinds import Object


async def apply(cluster: Cluster, document: Document, namespace: str | None) -> tuple[Object, str]:
    """Apply one document; the object, and whether it was `created`, `configured` or `unchanged`.

    Raises:
        NotUsableError: the manifest names another namespace than the user.
        CommandError: the cluster refuses, or a job of the name is over.
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


def _in_namespace(document: Object, namespace: str | None, cluster: Cluster) -> Object:
    metadata = document["metadata"]
    own = metadata.get("namespace")
    if own and namespace and own != namespace:
        raise NotUsableError(f"the manifest says namespace {own}, and -n says {namespace}")
    kept = {key: metadata[key] for key in ("name", "labels", "annotations", "finalizers") if metadata.get(key)}
    rest = {key: value for key, value in document.items() if key != "status"}
    return {**rest, "metadata": {**kept, "namespace": own or cluster.namespace}}
