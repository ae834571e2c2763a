"""Taking items from a task that puts them into a queue, without losing its last ones, and ending tasks."""

from __future__ import annotations

import asyncio
from typing import Any, TypeVar

T = TypeVar("T")


async def take(queue: asyncio.Queue[T], producer: asyncio.Task[Any]) -> list[T]:
    """Wait until the queue has an item, and return all items that are then in it.

    If the queue is empty and the producer has ended, returns [], or raises the producer's exception if it failed.
    """
    if queue.empty() and not producer.done():
        getting = asyncio.create_task(queue.get())
        await asyncio.wait({getting, producer}, return_when=asyncio.FIRST_COMPLETED)
        if getting.done():
            return [getting.result(), *_rest(queue)]
        getting.cancel()  # before it runs again: an item that was put last stays in the queue
    items = _rest(queue)
    if not items:
        producer.result()
    return items


async def end(*tasks: asyncio.Task[Any]) -> None:
    """Cancel tasks and wait until they have ended. Their failures are not raised."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _rest(queue: asyncio.Queue[T]) -> list[T]:
    return [queue.get_nowait() for _ in range(queue.qsize())]
