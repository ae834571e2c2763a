"""A server that remembers all it was told, and raw peers that may say anything to it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from resile.protocol.agent_to_master import Heartbeat
from resile.protocol.commands import Answer, Ask, Failed, FromMaster
from resile.protocol.job_changes import Stop
from resile.protocol.message import Message
from resile.wire.connection import Server, connect
from resile.wire.handshake import ClientHandshake
from resile.wire.transport import Connection

TOKEN = b"a token that nobody guesses"


class Ear:
    """Callbacks that keep what they hear, and a way to wait for it."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.ended: list[Connection] = []
        self.closed: list[str] = []
        self.refused: list[str] = []
        self._heard = asyncio.Event()

    def on_message(self, connection: Connection, message: Message) -> None:
        self.messages.append(message)
        self._heard.set()
        if isinstance(message, Ask) and isinstance(message.command, Stop):
            connection.send(Answer(request=message.request, result=Failed(error=message.command.because)))

    def on_close(self, connection: Connection, because: str) -> None:
        self.ended.append(connection)
        self.closed.append(because)
        self._heard.set()

    def on_refused(self, peer: str, because: str) -> None:
        self.refused.append(because)
        self._heard.set()

    async def until(self, true: Callable[[], object]) -> None:
        async with asyncio.timeout(10):
            while not true():
                self._heard.clear()
                await self._heard.wait()


async def soon(true: Callable[[], object]) -> None:
    """Wait for what no callback tells."""
    for _ in range(5000):
        if true():
            return
        await asyncio.sleep(0.001)
    raise AssertionError("it did not come true")


class Peer:
    """A raw TCP peer of a server."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    def say(self, data: bytes) -> None:
        self.writer.write(data)

    async def hear(self, size: int) -> bytes:
        return await asyncio.wait_for(self.reader.readexactly(size), 10)

    async def hear_all(self) -> bytes:
        return await asyncio.wait_for(self.reader.read(), 10)

    async def shake(self, token: bytes = TOKEN) -> ClientHandshake:
        """A good handshake, by hand."""
        shake = ClientHandshake(token, "server")
        self.say(shake.hello)
        while not shake.finished:
            self.say(shake.feed(await asyncio.wait_for(self.reader.read(100), 10)))
        return shake

    def hang_up(self) -> None:
        self.writer.close()


class Place:
    """A running server."""

    def __init__(self, server: Server, ear: Ear) -> None:
        self.server, self.ear = server, ear
        self._peers: list[Peer] = []

    @property
    def opened(self) -> list[Connection]:
        """All connections whose peers have proved that they hold the token, even those that have ended."""
        return [*self.ear.ended, *self.server.connections]

    async def raw(self) -> Peer:
        peer = Peer(*await asyncio.open_connection("127.0.0.1", self.server.port))
        self._peers.append(peer)
        return peer

    async def call(self, token: bytes = TOKEN, **options: Any) -> tuple[Connection, Ear]:
        ear = Ear()
        connection = await connect(
            "127.0.0.1",
            self.server.port,
            token=token,
            decode=FromMaster,
            on_message=ear.on_message,
            on_close=ear.on_close,
            **options,
        )
        return connection, ear

    async def check_still_serves(self, **options: Any) -> None:
        """A good peer is heard and answered, whatever happened before."""
        connection, ear = await self.call(**options)
        connection.send(Heartbeat())
        connection.send(Ask(request=1, command=Stop(because="still there?")))
        await ear.until(lambda: ear.messages)
        assert ear.messages == [Answer(request=1, result=Failed(error="still there?"))]
        connection.close()
        await connection.wait_closed()

    async def close(self) -> None:
        self.server.close()
        for peer in self._peers:
            peer.hang_up()
        await asyncio.sleep(0.01)


Serve = Callable[..., Any]
