"""Events: the operator's part of a job's story, for `kubectl describe` and `kubectl get events`."""

from __future__ import annotations

import logging
import uuid

from resile.api.manifests.metadata import API_VERSION
from resile.operator import settings
from resile.operator.cluster import EVENT, Cluster, ClusterError, Object
from resile.operator.status import stamp

log = logging.getLogger("resile.operator")

MAX_MESSAGE = 1024
"""Kubernetes refuses longer ones."""


def event(about: Object, reason: str, message: str, *, warning: bool, now: float) -> Object:
    """An Event about a custom resource."""
    metadata = about["metadata"]
    at = stamp(now)
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": f"{metadata['name']}.{uuid.uuid4().hex[:16]}", "namespace": metadata["namespace"]},
        "involvedObject": {
            "apiVersion": API_VERSION,
            "kind": about["kind"],
            "name": metadata["name"],
            "namespace": metadata["namespace"],
            "uid": metadata["uid"],
            "resourceVersion": metadata.get("resourceVersion", ""),
        },
        "type": "Warning" if warning else "Normal",
        "reason": reason,
        "message": message[:MAX_MESSAGE],
        "source": {"component": settings.FIELD_MANAGER},
        "reportingComponent": settings.FIELD_MANAGER,
        "firstTimestamp": at,
        "lastTimestamp": at,
        "count": 1,
    }


async def tell(cluster: Cluster, about: Object, reason: str, message: str, *, warning: bool, now: float) -> None:
    """Write an Event. A story that cannot be told must not keep anything from being done."""
    try:
        item = event(about, reason, message, warning=warning, now=now)
        await cluster.create(EVENT, item)
    except ClusterError as error:
        log.warning("the event %s of %s was not written: %s", reason, about["metadata"]["name"], error)
