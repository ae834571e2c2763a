"""Copies of another node's checkpoints, in this node's memory: so that losing a node costs no shard of a sharded state.

Two buffers for each process of that node, like its own: while one is being filled the other holds the copy before it,
so a node that is lost in mid-copy has still a whole one here. Whoever brings a copy must hold the job's token, and know
of no older round than this agent. Copies come in on threads of their own; the agent's event loop has no part in it.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import ssl
import tempfile
import threading
import time
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path

from resile.api.ids import NO_ROUND, Round
from resile.api.reports import Door
from resile.checkpoint.buffer import MAX_LAYOUT, Buffer, places_of
from resile.checkpoint.line import BUFFERS, MAX_LOCAL_RANKS
from resile.wire.handshake import NotWelcome
from resile.wire.messages import Copy, CopyAnswer
from resile.wire.stream import Stream, admit, fingerprint
from resile.wire.tls import OLDEST

log = logging.getLogger("resile.agent")

CALLERS = 4
"""At a time: one node, and those that it took over from."""
BACKLOG = 16
SLOWEST = 8 << 20
"""Bytes a second below which a copy is given up."""
PATIENCE = 15.0
"""Seconds that a copy has in any case."""


def copy_deadline(data: int) -> float:
    """Until when a copy of so many bytes must be through."""
    return time.monotonic() + PATIENCE + data / SLOWEST


class Copies:
    """What this node keeps for another."""

    def __init__(self, room: Callable[[int], str]) -> None:
        """Nothing comes in before `open`.

        Args:
            room: why there is no memory for so many more bytes; empty if there is. Called from any thread.
        """
        self._room = room
        self._buffers: dict[int, list[Buffer]] = {}
        self._locks: dict[int, threading.Lock] = {}
        self._arrivals: dict[Buffer, int] = {}
        """When each was filled: senders' own numbers do not tell, as their clocks may differ."""
        self._guard = threading.Lock()
        self._round: Round = NO_ROUND
        self._listener: socket.socket | None = None
        self._fingerprint = ""
        self._token: Callable[[], bytes] = bytes
        self._tls: ssl.SSLContext | None = None
        self._places = threading.BoundedSemaphore(CALLERS)

    @property
    def buffers(self) -> list[Buffer]:
        """All of them, whether they hold something or not."""
        with self._guard:
            return [buffer for pair in self._buffers.values() for buffer in pair]

    def open(self, host: str, token: Callable[[], bytes], *, tls: bool) -> None:
        """Let copies in.

        Args:
            host: the address to listen on.
            token: the job's secret, asked for at every call.
            tls: whether the job speaks TLS: then so does this door, with a certificate made here and now.

        Raises:
            OSError: there is no port to listen on.
        """
        listener = socket.create_server((host, 0), backlog=BACKLOG)
        if tls:
            self._tls, self._fingerprint = _own_identity()
        self._token, self._listener = token, listener
        threading.Thread(target=self._serve, args=(listener,), name="resile-copies", daemon=True).start()

    def door(self, address: str) -> Door | None:
        """Where others bring their copies, if they reach this node by that address; None: they cannot."""
        if self._listener is None:
            return None
        return Door(address=address, port=self._listener.getsockname()[1], fingerprint=self._fingerprint)

    def enter(self, round_: Round) -> None:
        """From now on nothing is taken of who knows only older rounds."""
        self._round = round_

    def close(self) -> None:
        """Let nobody in any more. The memory goes with this process: somebody may be writing to it."""
        if self._listener is not None:
            with contextlib.suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
            self._listener.close()
            self._listener = None

    def _serve(self, listener: socket.socket) -> None:
        while True:
            self._places.acquire()
            try:
                sock, peer = listener.accept()
            except OSError:
                return  # closed
            threading.Thread(target=self._welcome, args=(sock, peer[0]), name="resile-copy-in", daemon=True).start()

    def _welcome(self, sock: socket.socket, peer: str) -> None:
        try:
            with contextlib.closing(admit(sock, peer, self._token(), self._tls)) as stream:
                self._take(stream)
        except (OSError, NotWelcome) as error:
            log.warning("no copy of a checkpoint was taken from %s: %s", peer, error)
        except Exception:  # the thread of one caller: the next must not suffer from what this one sent
            log.exception("no copy of a checkpoint was taken from %s", peer)
        finally:
            self._places.release()

    def _take(self, stream: Stream) -> None:
        copy = stream.hear(Copy, time.monotonic() + PATIENCE)
        deadline = copy_deadline(copy.data)
        with self._turn(copy.local_rank) as mine:
            error = self._refusal(copy) if mine else "another copy of this rank is coming in"
            stream.say(CopyAnswer(error=error), deadline)
            if not error:
                self._fill(stream, copy, deadline)
        if not error:  # only now: who hears of it may send the next one at once
            stream.say(CopyAnswer(), deadline)

    @contextlib.contextmanager
    def _turn(self, local_rank: int) -> Iterator[bool]:
        """Whether the buffers of this rank are free; they are this thread's meanwhile."""
        with self._guard:
            lock = self._locks.setdefault(local_rank, threading.Lock())
        mine = lock.acquire(blocking=False)
        try:
            yield mine
        finally:
            if mine:
                lock.release()

    def _refusal(self, copy: Copy) -> str:
        """Why a copy is not taken; empty: there is a buffer for it."""
        if copy.round < self._round:
            return f"it is of round {copy.round}, and this node is in round {self._round}"
        if not 0 <= copy.local_rank < MAX_LOCAL_RANKS or not 0 < copy.layout <= MAX_LAYOUT or copy.data < 0:
            return "it is no checkpoint"
        buffer = self._oldest(copy.local_rank)
        size = places_of(copy.layout, copy.data)[2]
        if size > buffer.size and (why := self._room(size - buffer.size)):
            return why
        try:
            buffer.resize(size)
        except OSError as error:
            return f"no memory for copies of checkpoints: {error.strerror}"
        return ""

    def _oldest(self, local_rank: int) -> Buffer:
        with self._guard:
            pair = self._buffers.get(local_rank)
            if pair is None:
                pair = self._buffers[local_rank] = [
                    Buffer.make(f"resile-copy-{local_rank}-{n}") for n in range(BUFFERS)
                ]
            return min(pair, key=lambda buffer: self._arrivals.get(buffer, 0) if buffer.record() is not None else -1)

    def _fill(self, stream: Stream, copy: Copy, deadline: float) -> None:
        buffer = self._oldest(copy.local_rank)
        text, table = bytearray(copy.layout), bytearray(copy.sums)
        buffer.void()
        stream.read(memoryview(text), deadline)
        stream.read(memoryview(table), deadline)
        _, data_at = buffer.begin(bytes(text), copy.data)
        with memoryview(buffer.map()) as memory, memory[data_at : data_at + copy.data] as target:
            stream.read(target, deadline)
        record = buffer.commit(copy.sequence, copy.step, bytes(text), copy.data)
        buffer.seal(record, array("q", bytes(table)))
        with self._guard:
            self._arrivals[buffer] = max(self._arrivals.values(), default=0) + 1


def _own_identity() -> tuple[ssl.SSLContext, str]:
    """A certificate that this process alone has the key of, and what it is known by."""
    from resile.certificates import self_signed

    pair = self_signed("resile-agent", ["resile-agent"])
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = OLDEST
    context.num_tickets = 0
    with tempfile.TemporaryDirectory() as directory:  # mode 0700; OpenSSL reads keys from files alone
        certificate, key = Path(directory) / "crt", Path(directory) / "key"
        certificate.write_bytes(pair.certificate)
        key.write_bytes(pair.key)
        context.load_cert_chain(certificate, key)
    return context, fingerprint(ssl.PEM_cert_to_DER_cert(pair.certificate.decode()))
