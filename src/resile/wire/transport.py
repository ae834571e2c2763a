"""Connections over asyncio: one small object each, no task and no stream, so 10,000 idle ones stay cheap.

Everything runs on the event loop's thread: callbacks are plain functions called on it, and `send` never waits. A peer's
mistake ends its own connection with one sentence and nothing else. An exception out of a callback is a defect of the
owner. It ends that connection too, and goes to the loop's exception handler.

Measured with 10,000 agents and a heartbeat each every 0.625 s: 0.1 to 0.3 of a core and 44 MB for the whole process
(benchmarks/rpc.py, docs/decisions/0001-rpc.md).
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import socket
import struct
from collections.abc import Callable
from typing import Any, cast

from resile.api.ids import Bytes, MiB, Seconds
from resile.protocol.message import Message
from resile.wire.frames import HEARTBEAT, MAX_ANSWER, MAX_FRAME, BadFrame, FrameDecoder, MessageDecoder, encode
from resile.wire.handshake import HANDSHAKE_DEADLINE, REFUSAL, ClientHandshake, HandshakeRefused, ServerHandshake

RECEIVE_BUFFER = Bytes(32 * 1024)
"""Size of the one buffer that all connections of a server receive into. What arrives is copied at once."""

UNSENT_LIMIT = Bytes(MiB)
"""A peer that leaves this much unread is stuck, and is disconnected to save memory."""

LINGER = Seconds(2.0)
"""How long a closed connection may take to send its last messages."""


class CannotConnect(ConnectionError):
    """The peer did not answer, and trying again may help; the text is one sentence."""


OnMessage = Callable[["Connection", Any], None]
OnClose = Callable[["Connection", str], None]
OnRefused = Callable[[str, str], None]
OnBadMessage = Callable[["Connection", bytes], None]


def nothing(*_: object) -> None:
    """Do nothing: the default of callbacks that an owner does not need."""


@dataclasses.dataclass(eq=False, repr=False)  # the token must not get into a traceback
class Endpoint:
    """Settings and callbacks that all connections of one server share. A client has one for its only connection.

    The callbacks are those of `resile.wire.connection.serve`.
    """

    token: bytes | None
    """If it is None, there is no handshake. Then the credentials of the peer on its Unix socket are checked."""
    decode: dataclasses.InitVar[Any]
    on_message: OnMessage
    on_close: OnClose
    on_refused: OnRefused = nothing
    on_bad_message: OnBadMessage = nothing

    def __post_init__(self, decode: Any) -> None:
        if self.token == b"":
            raise ValueError("the job token is empty")
        self.loop = asyncio.get_running_loop()
        self.decoder = MessageDecoder(decode)
        self.buffer = memoryview(bytearray(RECEIVE_BUFFER))
        self.connections: set[Connection] = set()
        self.opening: set[Connection] = set()
        """Connections whose peers have not yet proved that they hold the token."""


class Connection(asyncio.BufferedProtocol):
    """One connection to a peer, from the handshake on. Made by `serve`, `connect` and `serve_local`, not by hand."""

    __slots__ = ("_because", "_closed", "_decoder", "_endpoint", "_handshake", "_timer", "_transport", "owner", "peer")

    _max_receive, _max_send = MAX_FRAME, MAX_ANSWER

    def __init__(self, endpoint: Endpoint) -> None:
        self.peer = "nowhere"
        """Where the peer is: `address:port`, or `pid N` on a Unix socket."""
        self.owner: Any = None
        """Free for the owner of the connection, to keep what it knows of this peer."""
        self._endpoint = endpoint
        self._decoder = FrameDecoder(self._max_receive)
        self._handshake: ServerHandshake | ClientHandshake | None = None
        self._timer: asyncio.TimerHandle | None = None
        """Ends a slow handshake. None on the client's side, where `connect` has a time-out."""
        self._transport: asyncio.Transport | None = None
        self._because: str | None = None
        self._closed: asyncio.Future[None] | None = None

    # what an owner uses -----------------------------------------------------------------------------------------------

    @property
    def closed(self) -> bool:
        """True if the connection has ended or is ending. Then nothing more will be sent or received."""
        return self._because is not None

    @property
    def local(self) -> str:
        """The IP address of this side of the connection; empty on a Unix socket.

        The peer sees the same address, unless a router translates it.
        """
        name = self._transport.get_extra_info("sockname") if self._transport is not None else None
        return str(name[0]) if isinstance(name, tuple) else ""

    def send(self, message: Message) -> None:
        """Send without waiting. Does nothing if the connection has ended. Raises BadFrame if `message` is too long."""
        self.send_frame(encode(message, self._max_send))

    def send_frame(self, frame: bytes) -> None:
        """Like `send`, but for a frame that `encode` has made. The same frame can go to many peers."""
        if self._because is not None or self._transport is None or self._transport.is_closing():
            return
        if self._transport.get_write_buffer_size() > UNSENT_LIMIT:
            self.abort(f"{self._who} does not read what it is sent")
            return
        self._transport.write(frame)

    def close(self, because: str = "closed here") -> None:
        """End the connection once all messages are sent, or after LINGER seconds. `on_close` is called then."""
        if self._because is None and self._transport is not None:
            self._because = because
            unsent = self._transport.get_write_buffer_size()  # before `close`, after which a TLS connection forgets it
            self._transport.close()
            if unsent:
                self._endpoint.loop.call_later(LINGER, self._transport.abort)

    def abort(self, because: str = "closed here") -> None:
        """End the connection at once; what was not sent yet is lost. `on_close` is called then."""
        if self._transport is not None:
            self._because = self._because or because
            self._transport.abort()

    async def wait_closed(self) -> None:
        """Return once `on_close` has been called."""
        if self._transport is None:
            return
        if self._closed is None:
            self._closed = self._endpoint.loop.create_future()
        await asyncio.shield(self._closed)

    # what asyncio calls -----------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        endpoint = self._endpoint
        self._transport = cast("asyncio.Transport", transport)
        self.peer = _peer_of(transport)
        if endpoint.token is not None:
            self._handshake = ServerHandshake(endpoint.token, self.peer)
            too_late = f"{self._who} did not finish the handshake within {HANDSHAKE_DEADLINE:g} s"
            self._timer = endpoint.loop.call_later(HANDSHAKE_DEADLINE, self.abort, too_late)
            endpoint.opening.add(self)
        elif stranger := _stranger(transport):
            self.abort(stranger)
            endpoint.on_refused(self.peer, stranger)
        else:
            self._open()

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._endpoint.buffer

    def buffer_updated(self, nbytes: int) -> None:
        # the hot path of a master
        endpoint = self._endpoint
        data = bytes(endpoint.buffer[:nbytes])
        if data == endpoint.decoder.heartbeat and self._handshake is None and not self._decoder.partial:
            if self._because is None:
                endpoint.on_message(self, HEARTBEAT)
        elif self._handshake is not None:
            self._shake(self._handshake, data)
        else:
            self._receive(data)

    def connection_lost(self, exc: Exception | None) -> None:
        because = self._because = self._because or self._why_lost(exc)
        self._transport = None
        if self._handshake is not None:
            self._handshake = None
            self._not_opened(CannotConnect(because))
        elif self in self._endpoint.connections:
            self._endpoint.connections.discard(self)
            self._endpoint.on_close(self, because)
        if self._closed is not None:
            self._closed.set_result(None)

    # inside -----------------------------------------------------------------------------------------------------------

    @property
    def _who(self) -> str:
        return f"the {'peer at' if self._endpoint.token else 'process with'} {self.peer}"

    def _shake(self, handshake: ServerHandshake | ClientHandshake, data: bytes) -> None:
        if self._because is not None or self._transport is None:
            return
        try:
            answer = handshake.feed(data)
        except HandshakeRefused as refusal:
            self._because = str(refusal)
            self._handshake = None
            if isinstance(handshake, ServerHandshake):
                self._transport.write(REFUSAL)
            self._transport.close()
            self._not_opened(refusal)
            return
        if answer:
            self._transport.write(answer)
        if handshake.finished:
            self._handshake = None
            self._open()
            if handshake.rest:
                self._receive(handshake.rest)

    def _open(self) -> None:
        self._end_opening()
        self._endpoint.connections.add(self)

    def _not_opened(self, error: ConnectionError) -> None:
        self._end_opening()
        self._endpoint.on_refused(self.peer, str(error))

    def _end_opening(self) -> None:
        self._endpoint.opening.discard(self)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _receive(self, data: bytes) -> None:
        endpoint = self._endpoint
        decode = endpoint.decoder.decode
        body: bytes | memoryview = b""
        try:
            for body in self._decoder.feed(data):
                message = decode(body)
                if self._because is not None:
                    return
                endpoint.on_message(self, message)
        except BadFrame as bad:
            if self._because is None:
                endpoint.on_bad_message(self, bytes(body))
            self.close(f"{self._who} sent {bad}")

    def _why_lost(self, exc: Exception | None) -> str:
        if isinstance(exc, OSError):
            return f"the connection to {self._who} broke: {exc.strerror or exc}"
        if exc is not None:
            return f"the connection to {self._who} was given up after an error here: {exc!r}"
        if self._handshake is not None:
            return f"{self._who} closed the connection during the handshake"
        middle = " in the middle of a message" if self._decoder.partial else ""
        return f"{self._who} closed the connection{middle}"


class CallingConnection(Connection):
    """The client's side of a connection. It begins the handshake. `peer` is the address that `connect` was given."""

    __slots__ = ("done",)
    _max_receive, _max_send = MAX_ANSWER, MAX_FRAME

    def __init__(self, endpoint: Endpoint, where: str) -> None:
        super().__init__(endpoint)
        self.peer = where
        self.done: asyncio.Future[Connection] = endpoint.loop.create_future()

    @property
    def _who(self) -> str:
        return f"the server at {self.peer}"

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._handshake = client = ClientHandshake(self._endpoint.token or b"", self.peer)
        self._transport.write(client.hello)

    def _open(self) -> None:
        super()._open()
        if not self.done.done():
            self.done.set_result(self)

    def _not_opened(self, error: ConnectionError) -> None:
        if not self.done.done():
            self.done.set_exception(error)

    def _why_lost(self, exc: Exception | None) -> str:
        shaking = self._handshake
        if exc is None and shaking is not None and shaking.silent and self._transport is not None:
            # asyncio's servers end a failed TLS handshake without telling the client why, so this is a guess.
            lacks = "a client certificate" if self._transport.get_extra_info("ssl_object") else "TLS"
            return f"{self._who} closed the connection without a word, as one that expects {lacks} does"
        return super()._why_lost(exc)


def address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _credentials(transport: asyncio.BaseTransport) -> tuple[int, int]:
    sock = transport.get_extra_info("socket")
    pid, uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    return pid, uid


def _peer_of(transport: asyncio.BaseTransport) -> str:
    name = transport.get_extra_info("peername")
    if isinstance(name, tuple):
        return address(name[0], name[1])
    return f"pid {_credentials(transport)[0]}"


def _stranger(transport: asyncio.BaseTransport) -> str:
    pid, uid = _credentials(transport)
    return "" if uid in (os.geteuid(), 0) else f"the process with pid {pid} belongs to user {uid}, not to ours"
