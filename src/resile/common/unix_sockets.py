"""Unix sockets at paths of any length. Used by every layer that has one.

The kernel takes 107 bytes for a socket's address, and a job's directory or TMPDIR may well be longer. A longer path is
given by way of its directory's descriptor, under which it is short. Nobody but the kernel ever sees that: logs and the
environment of a training process have the real path.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from pathlib import Path

LONGEST = 107
"""Bytes in a Unix socket's address, less the closing zero."""


def bind(sock: socket.socket, path: str | Path) -> None:
    """Bind a Unix socket to a path.

    Raises:
        OSError: as of `socket.bind`; its directory is not there, or something else lies at the path.
    """
    with _address(path) as address:
        sock.bind(address)


def connect(sock: socket.socket, path: str | Path) -> None:
    """Connect a Unix socket to the one at a path; waits no longer than the socket's own time-out.

    Raises:
        OSError: as of `socket.connect`.
    """
    with _address(path) as address:
        sock.connect(address)


@contextlib.contextmanager
def _address(path: str | Path) -> Iterator[str]:
    path = os.fspath(path)
    if len(os.fsencode(path)) <= LONGEST:
        yield path
        return
    directory, name = os.path.split(path)
    descriptor = os.open(directory or ".", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{descriptor}/{name}"
    finally:
        os.close(descriptor)
