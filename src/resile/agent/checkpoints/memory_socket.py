"""The socket on which training processes ask their agent for checkpoint memory.

One packet is one message, and an answer may carry descriptors of buffers. Only processes of this user or of root may
connect. Nothing here waits: answers to a process that does not read are dropped, and a process that sends what cannot
be decoded is disconnected.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import struct
from collections.abc import Callable
from pathlib import Path

import msgspec

from resile.checkpoint.memory_client import MAX_PACKET, FromAgent, ToAgent
from resile.common import unix_sockets

log = logging.getLogger("resile.agent")

BACKLOG = 256
_decoder = msgspec.msgpack.Decoder(ToAgent)


class Peer:
    def __init__(self, line: socket.socket) -> None:
        self.line = line
        self.local_rank: int | None = None
        self.fills = False
        """True if the process writes to the buffers, False if it only reads them."""

    def send(self, answer: FromAgent, descriptors: list[int] | None = None) -> None:
        with contextlib.suppress(OSError):
            socket.send_fds(self.line, [msgspec.msgpack.encode(answer)], descriptors or [])


class MemorySocket:
    def __init__(self, path: Path, on_message: Callable[[Peer, ToAgent], None]) -> None:
        self._path = path
        self._on_message = on_message
        self._listener: socket.socket | None = None
        self._peers: dict[int, Peer] = {}

    @property
    def filled_ranks(self) -> set[int]:
        return {peer.local_rank for peer in self._peers.values() if peer.fills and peer.local_rank is not None}

    def start(self) -> None:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        self._path.unlink(missing_ok=True)
        unix_sockets.bind(listener, self._path)
        listener.listen(BACKLOG)
        self._listener = listener
        asyncio.get_running_loop().add_reader(listener, self._accept, listener)

    def close(self) -> None:
        if self._listener is not None:
            asyncio.get_running_loop().remove_reader(self._listener)
            self._listener.close()
            self._path.unlink(missing_ok=True)
        for peer in list(self._peers.values()):
            self._hang_up(peer)

    def _accept(self, listener: socket.socket) -> None:
        try:
            line, _ = listener.accept()
        except OSError:
            return
        line.setblocking(False)
        credentials = line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        if struct.unpack("3i", credentials)[1] not in (os.geteuid(), 0):
            line.close()
            return
        peer = self._peers[line.fileno()] = Peer(line)
        asyncio.get_running_loop().add_reader(line, self._read, peer)

    def _read(self, peer: Peer) -> None:
        try:
            packet = peer.line.recv(MAX_PACKET)
            if not packet:
                self._hang_up(peer)
                return
            self._take(peer, packet)
        except BlockingIOError:
            return
        except OSError:  # the process ended with unread answers
            self._hang_up(peer)

    def _take(self, peer: Peer, packet: bytes) -> None:
        try:
            message = _decoder.decode(packet)
        except ValueError as error:
            log.warning("a process that asked for checkpoint memory was cut off: %s", error)
            self._hang_up(peer)
            return
        self._on_message(peer, message)

    def _hang_up(self, peer: Peer) -> None:
        self._peers.pop(peer.line.fileno(), None)
        asyncio.get_running_loop().remove_reader(peer.line)
        peer.line.close()
