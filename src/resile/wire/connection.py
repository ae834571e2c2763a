"""Listening and connecting: the ways to a `Connection` whose two sides have proved that they hold the job's token."""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
from typing import Any

from resile.api.ids import Seconds
from resile.wire.handshake import HANDSHAKE_DEADLINE, HandshakeRefused
from resile.wire.transport import (
    LINGER,
    CallingConnection,
    CannotConnect,
    Connection,
    Endpoint,
    OnBadMessage,
    OnClose,
    OnMessage,
    OnRefused,
    address,
    nothing,
)

BACKLOG = 8192
"""Connections that the kernel holds until they are accepted (capped by net.core.somaxconn), since all agents connect at
once."""

KEEPALIVE_IDLE = Seconds(15)
KEEPALIVE_PROBES = 4
KEEPALIVE_INTERVAL = Seconds(5)
"""The kernel's own check, for connections without heartbeats: a peer is gone after 15 s and 4 probes of 5 s."""


class CannotListen(OSError):
    """This process cannot listen on an address; the text is one sentence."""


class Server:
    def __init__(self, endpoint: Endpoint, listener: asyncio.Server, port: int = 0) -> None:
        self._endpoint = endpoint
        self._listener = listener
        self.port = port
        self.connections = endpoint.connections
        """The open connections whose handshake is finished. This is the server's own set, so do not change it."""

    def close(self) -> None:
        """Stop listening and close every connection; `on_close` is called for each."""
        self._listener.close()
        for stranger in tuple(self._endpoint.opening):
            stranger.abort("the server stopped")
        for connection in tuple(self.connections):
            connection.close("the server stopped")


async def serve(
    host: str,
    port: int,
    *,
    token: bytes,
    decode: Any,
    on_message: OnMessage,
    on_close: OnClose = nothing,
    on_refused: OnRefused = nothing,
    on_bad_message: OnBadMessage = nothing,
    tls: ssl.SSLContext | None = None,
) -> Server:
    """Listen on `host:port` (port 0 takes a free one, an empty host all IPv4 addresses).

    When a peer has proved that it holds `token`, `on_message(connection, message)` is called for every message, even a
    heartbeat. `on_close(connection, because)` is called once, however the connection ends. `on_refused(peer, because)`
    is called if a peer does not prove that it holds `token`. If a TLS handshake fails, nothing is called, because
    asyncio does not report it. `on_bad_message(connection, body)` is called for bytes that are no message of `decode`.
    The owner can answer them before the connection ends.

    `decode` is the message type, or union of types, that peers may send. `tls` comes from `resile.wire.tls`.

    Raises:
        CannotListen: the address is in use, not ours or not resolvable.
    """
    endpoint = Endpoint(token, decode, on_message, on_close, on_refused, on_bad_message)
    try:
        found = await endpoint.loop.getaddrinfo(
            host or "0.0.0.0", port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        # One socket for the name, IPv4 first, as most addresses in manifests and environments are.
        family, kind, proto, _, place = min(found, key=lambda entry: entry[0] != socket.AF_INET)
        listener = socket.socket(family, kind, proto)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a restarted master takes its port at once
            _look_after(listener)  # Linux hands these options on to every accepted connection
            listener.bind(place)
            server = await endpoint.loop.create_server(
                lambda: Connection(endpoint),
                sock=listener,
                backlog=BACKLOG,
                ssl=tls,
                ssl_handshake_timeout=HANDSHAKE_DEADLINE if tls else None,
                ssl_shutdown_timeout=LINGER if tls else None,  # a silent peer does not answer the shutdown
            )
        except BaseException:
            listener.close()
            raise
    except OSError as error:
        raise CannotListen(f"cannot listen on {address(host, port)}: {_reason(error)}") from None
    return Server(endpoint, server, listener.getsockname()[1])


async def connect(
    host: str,
    port: int,
    *,
    token: bytes,
    decode: Any,
    on_message: OnMessage,
    on_close: OnClose = nothing,
    tls: ssl.SSLContext | None = None,
    server_name: str | None = None,
    timeout: float = HANDSHAKE_DEADLINE,  # noqa: ASYNC109 (it raises CannotConnect with a sentence, not a bare TimeoutError)
) -> Connection:
    """Connect to `host:port` and return once both sides have proved that they hold `token`. Tries once.

    A message that the server sends at once may reach `on_message` before this returns.

    Arguments are those of `serve` and two more. `server_name` is the name in the server's certificate; None for `host`.
    `timeout` limits name resolution, connection, TLS and handshake together, in seconds. If this raises, `on_close` is
    not called.

    Raises:
        CannotConnect: no server there, or no answer in time; trying again may help.
        HandshakeRefused: wrong token, or not a resile server; trying again will not help.
    """
    endpoint = Endpoint(token, decode, on_message, on_close)
    where = address(host, port)
    connection = CallingConnection(endpoint, where)
    try:
        async with asyncio.timeout(timeout):
            transport, _ = await endpoint.loop.create_connection(
                lambda: connection,
                host,
                port,
                ssl=tls,
                server_hostname=(server_name or host) if tls else None,
                ssl_shutdown_timeout=LINGER if tls else None,
            )
            _look_after(transport.get_extra_info("socket"))
            return await connection.done
    except TimeoutError:
        connection.abort()
        raise CannotConnect(f"the server at {where} did not answer within {timeout:g} s") from None
    except ssl.SSLCertVerificationError as error:
        raise HandshakeRefused(
            f"the server at {where} showed a certificate that fails: {error.verify_message}"
        ) from None
    except ssl.SSLError as error:
        raise HandshakeRefused(f"the server at {where} does not speak TLS with us: {error.reason or error}") from None
    except (CannotConnect, HandshakeRefused):
        raise
    except OSError as error:
        raise CannotConnect(f"cannot connect to {where}: {_reason(error)}") from None
    except asyncio.CancelledError:
        connection.abort()
        raise


def _look_after(sock: socket.socket) -> None:
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, int(KEEPALIVE_IDLE))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, int(KEEPALIVE_INTERVAL))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, KEEPALIVE_PROBES)


def _reason(error: OSError) -> str:
    words = error.strerror or str(error)
    if error.errno is not None and not isinstance(error, socket.gaierror):
        words = os.strerror(error.errno)
    return words[:1].lower() + words[1:]
