"""Trims objects of the API server to the parts that the operator reads, so that its informers take less memory."""

from __future__ import annotations

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
_LAST_APPLIED = "kubectl.kubernetes.io/last-applied-configuration"


def resource_only(item: Object) -> Object:
    """A custom resource without large metadata that is not needed, such as kubectl's copy of the manifest."""
    metadata = _metadata(item)
    if _LAST_APPLIED in metadata.get("annotations", {}):
        metadata["annotations"] = {key: text for key, text in metadata["annotations"].items() if key != _LAST_APPLIED}
    return {**item, "metadata": metadata}


def pod_only(item: Object) -> Object:
    return {"metadata": _metadata(item), "status": item.get("status") or {}}


def metadata_only(item: Object) -> Object:
    return {"metadata": _metadata(item)}


def _metadata(item: Object) -> Object:
    return {field: item["metadata"][field] for field in _KEPT_METADATA if field in item["metadata"]}
