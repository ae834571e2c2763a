"""Calls that are repeated until the API server answers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

from resile.api.ids import Seconds
from resile.kube.errors import KubeError
from resile.kube.intervals import BACKOFF

log = logging.getLogger("resile.kube")

Answer = TypeVar("Answer")


async def until_answered(
    trouble: str, call: Callable[[], Awaitable[Answer]], *, within: Seconds | None = None
) -> Answer:
    """Repeat `call`, with growing pauses, until it raises no `KubeError`, and return its answer.

    Failures are logged; `trouble` begins the line. If `within` is given, a failure after so many seconds is raised.
    """
    loop = asyncio.get_running_loop()
    begun, pauses = loop.time(), BACKOFF.pauses()
    while True:
        try:
            return await call()
        except KubeError as error:
            if within is not None and loop.time() - begun > within:
                raise
            log.warning("%s now: %s", trouble, error)
        await asyncio.sleep(next(pauses))
