"""The connection between an agent and its master: opened at the start, opened again when it breaks.

The end of the connection tells the master that the agent is gone, so the agent keeps it open all its life. When it
breaks, training goes on, and the session connects again: first at once, then at most once a second. Messages on a
broken connection may be lost, so all that an agent sends is repeated after the next Hello or replaced by a later one.
If another server answers at the master's address, a session that never reached its master ends; later the session goes
on trying, because the master may come back.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import ssl
from collections.abc import Callable
from typing import Protocol

from resile.agent.options import Endpoint
from resile.common.backoff import Backoff
from resile.protocol.agent_to_master import Heartbeat, Hello
from resile.protocol.master_to_agent import MasterMessage
from resile.protocol.message import Message
from resile.wire.connection import connect
from resile.wire.frames import encode
from resile.wire.handshake import HandshakeRefused
from resile.wire.job_directory import DirectoryError
from resile.wire.tls import BadTLS
from resile.wire.transport import CannotConnect, Connection

log = logging.getLogger("resile.agent")

BACKOFF = Backoff(first=0.02, limit=1.0)
CALL_TIMEOUT = 5.0

_HEARTBEAT = encode(Heartbeat())


class MasterListener(Protocol):
    """Callbacks of a session; the agent implements them."""

    def hello(self, local_address: str, /) -> Hello:
        """The first message to send on a new connection. `local_address` is this agent's address on that connection."""

    def on_message(self, message: MasterMessage, /) -> None: ...

    def on_away(self, seconds: float, why: str, /) -> None:
        """Called when connecting fails, `seconds` after the last connection or the start; `why` is one sentence."""


class Session:
    def __init__(
        self,
        endpoint: Endpoint,
        token: Callable[[], bytes],
        tls: Callable[[], ssl.SSLContext | None],
        server_name: str | None = None,
    ) -> None:
        """`token` and `tls` are called at each attempt to connect, because their files may change or not exist yet.

        If `token` raises `DirectoryError`, the session tries again. `server_name` defaults to the endpoint's host.
        """
        self._endpoint = endpoint
        self._token = token
        self._tried = b""
        self._tls = tls
        self._server_name = server_name
        self._connection: Connection | None = None
        self._heartbeat: asyncio.TimerHandle | None = None
        self._interval = 0.0

    def send(self, message: Message) -> None:
        """Send a message to the master. Without a connection it is lost; a later message repeats or replaces it."""
        if self._connection is not None:
            self._connection.send(message)

    def beat(self, interval: float) -> None:
        self._interval = interval
        if self._heartbeat is None:
            self._tick()

    async def run(self, listener: MasterListener) -> None:
        """Stay connected until cancelled, and call the methods of `listener`.

        Raises:
            HandshakeRefused: the first server that answered refused the token, or is no resile server.
            BadTLS: a certificate or a key cannot be used, and no server has answered before.
        """
        loop = asyncio.get_running_loop()
        last, pauses = loop.time(), BACKOFF.pauses()
        known = False
        try:
            while True:
                closed = asyncio.Event()
                try:
                    connection = await self._call(listener, closed)
                except (CannotConnect, DirectoryError, HandshakeRefused, BadTLS) as error:
                    if isinstance(error, HandshakeRefused) and not known and self._tried == self._token():
                        raise
                    if isinstance(error, BadTLS) and not known:
                        raise
                    log.debug("%s", error)
                    listener.on_away(loop.time() - last, str(error))
                    await asyncio.sleep(next(pauses))
                    continue
                self._connection, known = connection, True
                connection.send(listener.hello(connection.local))
                since = loop.time()
                await closed.wait()
                self._connection, last = None, loop.time()
                if last - since > BACKOFF.limit:
                    pauses = BACKOFF.pauses()
                else:  # a server that hangs up at once must not be called in a tight loop
                    await asyncio.sleep(next(pauses))
        finally:
            if self._heartbeat is not None:
                self._heartbeat.cancel()
            if self._connection is not None:
                connection, self._connection = self._connection, None
                connection.close()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(1.0):
                        await connection.wait_closed()

    async def _call(self, listener: MasterListener, closed: asyncio.Event) -> Connection:
        self._tried = self._token()
        return await connect(
            self._endpoint.host,
            self._endpoint.port,
            token=self._tried,
            decode=MasterMessage,
            on_message=lambda _, message: listener.on_message(message),
            on_close=lambda _, because: self._closed(closed, because),
            tls=self._tls(),
            server_name=self._server_name,
            timeout=CALL_TIMEOUT,
        )

    def _closed(self, closed: asyncio.Event, because: str) -> None:
        if self._connection is not None:
            log.info("the connection to the master ended: %s", because)
        closed.set()

    def _tick(self) -> None:
        if self._connection is not None:
            self._connection.send_frame(_HEARTBEAT)
        self._heartbeat = asyncio.get_running_loop().call_later(self._interval, self._tick)
