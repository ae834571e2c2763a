"""Reads the custom resources of a cluster as their users wrote them."""

from __future__ import annotations

from resile.api.job import JobSpec
from resile.api.kinds.base import JobKind, Resource
from resile.api.manifests.errors import BadManifest
from resile.api.manifests.reader import read_manifest
from resile.kube.kinds import Object

_METADATA = ("name", "namespace", "uid", "labels", "annotations")


def read_object(item: Object) -> Resource:
    """Read a resource without its status and without unused metadata; raises `BadManifest` with all errors."""
    metadata = {field: item["metadata"][field] for field in _METADATA if field in item["metadata"]}
    parts = {field: item.get(field) for field in ("apiVersion", "kind", "spec")}
    return read_manifest({**parts, "metadata": metadata})


def read_job(kind: JobKind, item: Object) -> JobSpec | BadManifest:
    try:
        return kind.to_job_spec(read_object(item))
    except BadManifest as bad:
        return bad
