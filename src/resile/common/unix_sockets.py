"""Binds and connects Unix sockets at paths of any length.

The kernel allows 107 bytes for a socket's address, and the path of a job's directory or TMPDIR may be longer. A longer
path is passed as /proc/self/fd/N/NAME, where N is a descriptor of its directory. Only the kernel sees that: logs and
environment variables have the real path.
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
    with _address(path) as address:
        sock.bind(address)


def connect(sock: socket.socket, path: str | Path) -> None:
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
