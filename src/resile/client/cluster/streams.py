"""Handing on what tasks produce, without losing what they produced last."""

from __future__ import annotations

import asyncio
from typing import Any, TypeVar

T = TypeVar("T")


async def take(queue: asyncio.Queue[T], producer: asyncio.Task[Any]) -> list[T]:
    """Everything in the queue, after a wait for the first item; nothing once the producer has ended.

    Raises:
        Exception: the producer's own, after its last item was taken.
    """
    if queue.empty() and not producer.done():
        getting = asyncio.create_task(queue.get())
        await asyncio.wait({getting, producer}, return_when=asyncio.FIRST_COMPLETED)
        if getting.done():
            return [getting.result(), *_rest(queue)]
        getting.cancel()  # before it runs again: what was put last stays in the queue
    items = _rest(queue)
    if not items:
        producer.result()
    return items


def _rest(queue: asyncio.Queue[T]) -> list[T]:
    return [queue.get_nowait() for _ in range(queue.qsize())]
