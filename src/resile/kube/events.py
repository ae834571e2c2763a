"""Events: what `kubectl describe` and `kubectl get events` tell of an object."""

from __future__ import annotations

import secrets

from resile.api.timestamps import stamp
from resile.kube.kinds import Kind, Object

LONGEST_MESSAGE = 1024
"""Kubernetes refuses longer ones."""


def new_event_name(about: str) -> str:
    """A name that no other Event has."""
    return f"{about}.{secrets.token_hex(8)}"


def event(
    kind: Kind,
    metadata: Object,
    reason: str,
    message: str,
    *,
    warning: bool,
    now: float,
    component: str,
    name: str = "",
) -> Object:
    """An Event about one object, which `kind` and `metadata` (`name`, `namespace`, `uid`) identify.

    A caller that may have to write it twice gives it a `name`: the second time the API server says that it is there.
    """
    at = stamp(now)
    involved = {key: metadata[key] for key in ("name", "namespace", "uid", "resourceVersion") if key in metadata}
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": name or new_event_name(metadata["name"]), "namespace": metadata["namespace"]},
        "involvedObject": {"apiVersion": kind.api_version, "kind": kind.name, **involved},
        "type": "Warning" if warning else "Normal",
        "reason": reason,
        "message": message[:LONGEST_MESSAGE],
        "source": {"component": component},
        "reportingComponent": component,
        "firstTimestamp": at,
        "lastTimestamp": at,
        "count": 1,
    }
