"""Events: what `kubectl describe` and `kubectl get events` show of an object."""

from __future__ import annotations

import logging
import secrets
from typing import TYPE_CHECKING

from resile.api.timestamps import stamp
from resile.kube.errors import KubeError
from resile.kube.kinds import EVENTS, Kind, Object

if TYPE_CHECKING:
    from resile.kube.client import Client

log = logging.getLogger("resile.kube")

LONGEST_MESSAGE = 1024
"""The most characters of an Event's message that Kubernetes accepts."""


def new_event_name(about: str) -> str:
    return f"{about}.{secrets.token_hex(8)}"


async def emit(
    client: Client,
    kind: Kind,
    metadata: Object,
    reason: str,
    message: str,
    *,
    warning: bool,
    now: float,
    name: str = "",
) -> None:
    """Write an Event about the object that `kind` and `metadata` identify. If that fails, only log it.

    With `name`, the Event gets this name, and a second call changes nothing. `now` is the time of the Event.
    """
    at = stamp(now)
    involved = {key: metadata[key] for key in ("name", "namespace", "uid", "resourceVersion") if key in metadata}
    event: Object = {
        "metadata": {"name": name or new_event_name(metadata["name"]), "namespace": metadata["namespace"]},
        "involvedObject": {"apiVersion": kind.api_version, "kind": kind.name, **involved},
        "type": "Warning" if warning else "Normal",
        "reason": reason,
        "message": message[:LONGEST_MESSAGE],
        "source": {"component": client.field_manager},
        "reportingComponent": client.field_manager,
        "firstTimestamp": at,
        "lastTimestamp": at,
        "count": 1,
    }
    try:
        await client.create(EVENTS, event)
    except KubeError as error:
        log.warning("the Event %s of %s cannot be written: %s", reason, metadata["name"], error)
