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
    """The answer of `call`, which is repeated with growing pauses, and `trouble` logged, while it raises `KubeError`.

    Raises:
        KubeError: there was no answer `within` that time, if one is given.
    """
    loop = asyncio.get_running_loop()
    begun = loop.time()
    failures = 0
    while True:
        try:
            return await call()
        except KubeError as error:
            if within is not None and loop.time() - begun > within:
                raise
            log.warning("%s now: %s", trouble, error)
        failures += 1
        await asyncio.sleep(BACKOFF.after(failures))
