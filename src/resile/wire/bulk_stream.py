"""Bulk data from one agent to another: a connection for a blocking thread, whose two sides hold the job's token.

`Connection` is made for small messages on an event loop. A checkpoint is a few messages and a gigabyte between them,
which goes straight from one mapping to the other and must not keep an event loop busy. The same handshake decides which
peers may talk. With TLS the called side shows a certificate that it made itself. The caller knows it by the fingerprint
that came over the master's own TLS. Every wait has a deadline, and a peer that takes or gives nothing for a while is
given up long before the deadline of a large checkpoint.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import socket
import ssl
import time
from collections.abc import Iterator
from typing import TypeVar, cast

from resile.protocol.message import Message
from resile.protocol.reports import ReplicaEndpoint
from resile.wire.frames import PREFIX, BadFrame, MessageDecoder, encode
from resile.wire.handshake import HANDSHAKE_DEADLINE, REFUSAL, ClientHandshake, HandshakeRefused, ServerHandshake
from resile.wire.tls import OLDEST
from resile.wire.transport import CannotConnect, address

MAX_MESSAGE = 64 * 1024
STALL = 15.0
"""Seconds without a single byte after which a peer is given up: it is frozen, or the network to it is gone."""
_PIECE = 1 << 20
M = TypeVar("M", bound=Message)


class BulkStream:
    """A connection to a peer that holds the token. It is for one thread only. `call` and `admit` make it."""

    def __init__(self, sock: socket.socket, peer: str) -> None:
        self._socket = sock
        self.peer = peer

    def close(self) -> None:
        self._socket.close()

    def cut(self) -> None:
        """Shut the connection down. A thread that waits on it gets an error. Other threads call only this method."""
        with contextlib.suppress(OSError):
            # TLS's own `shutdown` may be called only by its own thread
            socket.socket.shutdown(self._socket, socket.SHUT_RDWR)

    def say(self, message: Message, deadline: float) -> None:
        """Send one message. Raises OSError as `write` does."""
        self.write(memoryview(encode(message, MAX_MESSAGE)), deadline)

    def hear(self, kind: type[M], deadline: float) -> M:
        """Receive the next message. Raises OSError as `read` does, and if the message is not of type `kind`."""
        head = bytearray(PREFIX)
        self.read(memoryview(head), deadline)
        size = int.from_bytes(head, "big")
        if size > MAX_MESSAGE:
            raise ConnectionError(f"{self.peer} sent a message of {size} bytes, over the limit of {MAX_MESSAGE} bytes")
        body = bytearray(size)
        self.read(memoryview(body), deadline)
        try:
            return cast("M", MessageDecoder(kind).decode(bytes(body)))
        except BadFrame as bad:
            raise ConnectionError(f"{self.peer} sent {bad}") from None

    def write(self, data: memoryview, deadline: float) -> None:
        """Send `data`. Raises OSError if the connection breaks, the deadline passes, or the peer stalls (`STALL`)."""
        at = 0
        while at < len(data):
            with self._progress(deadline, "took"):
                at += self._socket.send(data[at : at + _PIECE])

    def read(self, target: memoryview, deadline: float) -> None:
        """Fill `target` with the next bytes. Raises OSError as `write` does."""
        at = 0
        while at < len(target):
            with self._progress(deadline, "gave"):
                got = self._socket.recv_into(target[at : at + _PIECE])
            if not got:
                raise ConnectionError(f"{self.peer} closed the connection")
            at += got

    @contextlib.contextmanager
    def _progress(self, deadline: float, what: str) -> Iterator[None]:
        """Within this context, a wait ends after STALL seconds or at the deadline. `what` is the verb in the error."""
        left = _left(deadline)
        self._socket.settimeout(min(left, STALL))
        try:
            yield
        except TimeoutError:
            if left <= STALL:
                raise
            raise TimeoutError(f"{self.peer} {what} nothing for {STALL:g} s") from None


def call(replica_endpoint: ReplicaEndpoint, token: bytes) -> BulkStream:
    """Connect to the agent at `replica_endpoint`. Returns once both sides have proved that they hold `token`.

    Raises CannotConnect if no agent answers in time, HandshakeRefused for a wrong token or certificate.
    """
    where = address(replica_endpoint.address, replica_endpoint.port)
    deadline = time.monotonic() + HANDSHAKE_DEADLINE
    try:
        sock = socket.create_connection((replica_endpoint.address, replica_endpoint.port), HANDSHAKE_DEADLINE)
    except OSError as error:
        raise CannotConnect(f"cannot connect to {where}: {error.strerror or error}") from None
    try:
        if replica_endpoint.fingerprint:
            sock = _pinned(sock, replica_endpoint, where)
        client = ClientHandshake(token, where)
        _send(sock, client.hello, deadline)
        _shake(sock, client, deadline)
        return BulkStream(sock, f"the agent at {where}")
    except OSError as error:
        sock.close()
        if isinstance(error, HandshakeRefused):
            raise
        raise CannotConnect(f"the agent at {where} did not finish the handshake: {error}") from None


def admit(
    sock: socket.socket,
    peer: str,
    token: bytes,
    tls: ssl.SSLContext | None,
    timeout: float = HANDSHAKE_DEADLINE,
) -> BulkStream:
    """Return a stream on `sock` once the caller has proved that it holds `token`. On any error, `sock` is closed.

    Raises HandshakeRefused for a wrong token, OSError if the caller hung up or took too long.
    """
    deadline = time.monotonic() + timeout
    try:
        sock.settimeout(_left(deadline))
        if tls is not None:
            sock = tls.wrap_socket(sock, server_side=True)
        try:
            _shake(sock, ServerHandshake(token, peer), deadline)
        except HandshakeRefused:
            _send(sock, REFUSAL, deadline)
            raise
        return BulkStream(sock, f"the agent at {peer}")
    except BaseException:
        sock.close()
        raise


def fingerprint(certificate: bytes) -> str:
    return hashlib.sha256(certificate).hexdigest()


def _pinned(sock: socket.socket, replica_endpoint: ReplicaEndpoint, where: str) -> ssl.SSLSocket:
    """Begin TLS on `sock`. Raises HandshakeRefused if the peer's certificate lacks the endpoint's fingerprint."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = OLDEST
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE  # the fingerprint below is checked instead
    wrapped = context.wrap_socket(sock)
    shown = wrapped.getpeercert(binary_form=True) or b""
    if not hmac.compare_digest(fingerprint(shown), replica_endpoint.fingerprint):
        wrapped.close()
        raise HandshakeRefused(f"the agent at {where} showed another certificate than its own")
    return wrapped


def _shake(sock: socket.socket, handshake: ServerHandshake | ClientHandshake, deadline: float) -> None:
    while not handshake.finished:
        sock.settimeout(_left(deadline))
        data = sock.recv(4096)
        if not data:
            raise ConnectionError("it hung up")
        _send(sock, handshake.feed(data), deadline)
    if handshake.rest:
        raise ConnectionError("it spoke before it was its turn")


def _send(sock: socket.socket, data: bytes, deadline: float) -> None:
    sock.settimeout(_left(deadline))
    sock.sendall(data)


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("it took too long")
    return left
