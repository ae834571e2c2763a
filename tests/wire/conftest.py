from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from resile.protocol.commands import ToMaster
from resile.wire.connection import serve
from tests.wire.peers import TOKEN, Ear, Place, Serve


@pytest.fixture
async def serving() -> AsyncIterator[Serve]:
    """Start servers with any options; they are closed at the end."""
    places: list[Place] = []

    async def start(**options: Any) -> Place:
        ear = Ear()
        server = await serve(
            "127.0.0.1",
            0,
            **{"token": TOKEN, "decode": ToMaster, **options},
            on_message=ear.on_message,
            on_close=ear.on_close,
            on_refused=ear.on_refused,
        )
        places.append(Place(server, ear))
        return places[-1]

    yield start
    for place in places:
        await place.close()


@pytest.fixture
async def place(serving: Serve) -> Place:
    started: Place = await serving()
    return started
