"""What tasks produce for a blocking caller: every item, in order, and then the failure."""

from __future__ import annotations

import asyncio

import pytest

from resile.client.cluster.streams import take


async def taken(queue: asyncio.Queue[int], producer: asyncio.Task[None]) -> list[int]:
    items: list[int] = []
    while batch := await take(queue, producer):
        items += batch
    return items


@pytest.mark.parametrize("room", [1, 2, 100])
@pytest.mark.parametrize("pauses", [0, 1, 3])
async def test_the_last_item_is_taken_although_its_producer_ends_at_once(room: int, pauses: int) -> None:
    queue: asyncio.Queue[int] = asyncio.Queue(room)

    async def produce() -> None:
        for item in range(5):
            for _ in range(pauses):
                await asyncio.sleep(0)
            await queue.put(item)

    async with asyncio.timeout(10):
        assert await taken(queue, asyncio.create_task(produce())) == list(range(5))


async def test_a_failure_comes_after_what_was_produced_before_it() -> None:
    queue: asyncio.Queue[int] = asyncio.Queue(10)

    async def produce() -> None:
        await queue.put(1)
        raise RuntimeError("out of the blue")

    producer = asyncio.create_task(produce())
    async with asyncio.timeout(10):
        assert await take(queue, producer) == [1]
        with pytest.raises(RuntimeError, match="out of the blue"):
            await take(queue, producer)
