"""The operator's part of a job's story."""

from __future__ import annotations

import logging

from resile.kube.client import Client
from resile.kube.errors import KubeError
from resile.kube.events import event
from resile.kube.kinds import EVENTS, Kind, Object
from resile.operator import settings

log = logging.getLogger("resile.operator")


async def emit(
    client: Client, kind: Kind, about: Object, reason: str, message: str, *, warning: bool, now: float
) -> None:
    """Write an Event; one that cannot be written is logged and keeps nothing from being done."""
    written = event(
        kind, about["metadata"], reason, message, warning=warning, now=now, component=settings.FIELD_MANAGER
    )
    try:
        await client.create(EVENTS, written)
    except KubeError as error:
        log.warning("the event %s of %s was not written: %s", reason, about["metadata"]["name"], error)
