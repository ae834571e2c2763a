"""Objects as the API server gives them, cut down to what is read."""

from __future__ import annotations

from resile.api.job import JobSpec
from resile.api.kinds.base import JobKind
from resile.api.manifests.errors import BadManifest
from resile.api.manifests.reader import read_manifest
from resile.kube.kinds import Object

_KEPT_METADATA = (
    "name",
    "namespace",
    "uid",
    "resourceVersion",
    "generation",
    "labels",
    "annotations",
    "creationTimestamp",
    "deletionTimestamp",
    "deletionGracePeriodSeconds",
    "ownerReferences",
)
_READ_METADATA = ("name", "namespace", "uid", "labels", "annotations")
_LAST_APPLIED = "kubectl.kubernetes.io/last-applied-configuration"


def plain(item: Object) -> Object:
    """A resource as its user wrote it, without what a newer API server or another program may have added."""
    metadata = {field: item["metadata"][field] for field in _READ_METADATA if field in item["metadata"]}
    return {
        "apiVersion": item.get("apiVersion"),
        "kind": item.get("kind"),
        "metadata": metadata,
        "spec": item.get("spec"),
    }


def read_job(kind: JobKind, item: Object) -> JobSpec | BadManifest:
    """The job that an object describes, or its errors."""
    try:
        return kind.to_job_spec(read_manifest(plain(item)))
    except BadManifest as bad:
        return bad


def resource_only(item: Object) -> Object:
    """Keep of a custom resource what the operator reads: half of a fresh object is about who wrote which field."""
    metadata = _metadata(item)
    if _LAST_APPLIED in metadata.get("annotations", {}):
        metadata["annotations"] = {key: text for key, text in metadata["annotations"].items() if key != _LAST_APPLIED}
    return {**item, "metadata": metadata}


def pod_only(item: Object) -> Object:
    """Keep of a pod its metadata and its status."""
    return {"metadata": _metadata(item), "status": item.get("status") or {}}


def metadata_only(item: Object) -> Object:
    """Keep of an object that it exists."""
    return {"metadata": _metadata(item)}


def _metadata(item: Object) -> Object:
    return {field: item["metadata"][field] for field in _KEPT_METADATA if field in item["metadata"]}
