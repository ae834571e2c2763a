"""The agent's end of the channel to its own training processes: frames over a Unix socket, no handshake.

The kernel decides which processes may talk. The socket lies in a directory of mode 0700, and a process of another user
except root is refused by its credentials. `resile.wire.agent_client` is the other end.
"""

from __future__ import annotations

import asyncio
import os
import socket
from pathlib import Path

from resile.common import unix_sockets
from resile.protocol.worker_to_agent import WorkerMessage
from resile.wire.connection import CannotListen, Server
from resile.wire.transport import Connection, Endpoint, OnClose, OnMessage, OnRefused, nothing

BACKLOG = 256
"""Connections that wait to be accepted: more than one node's processes with their data loaders."""


class AgentSocket(Server):
    def __init__(self, endpoint: Endpoint, listener: asyncio.Server, path: Path) -> None:
        super().__init__(endpoint, listener)
        self.path = path

    def close(self) -> None:
        super().close()
        self.path.unlink(missing_ok=True)


async def serve_local(
    path: Path,
    *,
    on_message: OnMessage,
    on_close: OnClose = nothing,
    on_refused: OnRefused = nothing,
) -> AgentSocket:
    """Listen on the Unix socket `path`. Makes its directory (mode 0700) if needed. Replaces a stale socket.

    Callbacks are as for `resile.wire.connection.serve`. A process sends messages of `WorkerMessage`. The first one is
    `Attach` or `WorkerReady`. Raises CannotListen if the directory cannot be made, belongs to another user or is open
    to others.
    """
    endpoint = Endpoint(None, WorkerMessage, on_message, on_close, on_refused)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        _make_room(path)
        unix_sockets.bind(listener, path)
        # Not `create_unix_server`: from Python 3.13 on it checks the path itself, which may be too long for it.
        server = await endpoint.loop.create_server(lambda: Connection(endpoint), sock=listener, backlog=BACKLOG)
    except OSError as error:
        listener.close()
        if isinstance(error, CannotListen):
            raise
        raise CannotListen(f"cannot listen on {path}: {error.strerror or error}") from None
    return AgentSocket(endpoint, server, path)


def _make_room(path: Path) -> None:
    directory = path.parent
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = directory.stat()
    if found.st_uid != os.geteuid():
        raise CannotListen(f"cannot listen in {directory}: the directory belongs to another user")
    if found.st_mode & 0o077:
        raise CannotListen(f"cannot listen in {directory}: the directory is open to others (mode must be 0700)")
    path.unlink(missing_ok=True)
