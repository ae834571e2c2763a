"""The TCP sockets of this process, found and ended under whoever uses them.

gloo and torch's stores keep theirs to themselves, so they are looked for in /proc. A socket is known by its descriptor
and by the name that tells a reused descriptor.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from collections.abc import Iterable, Iterator

Known = tuple[int, str]
"""Descriptor and name."""
KNOCK = 0.5
"""Seconds for a connection within this machine."""


def opened() -> set[Known]:
    """All sockets of this process."""
    found = set()
    for entry in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            name = os.readlink(f"/proc/self/fd/{entry}")
            if name.startswith("socket:"):
                found.add((int(entry), name))
    return found


def is_connected(known: Known) -> bool:
    """Whether this is a TCP connection whose other side has not hung up."""
    with contextlib.suppress(OSError), _copy(known) as copy:
        if copy is None or copy.type != socket.SOCK_STREAM:
            return False
        copy.getpeername()
        try:
            return bool(copy.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT))
        except BlockingIOError:
            return True
    return False


def hang_up(known: Known) -> None:
    """Let whoever reads from a TCP connection see its end. The descriptor stays its owner's to close.

    What is written still goes out: of a send that fails before gloo has seen the end, nobody is told (torch 2.13).
    """
    with contextlib.suppress(OSError), _copy(known) as copy:
        if copy is not None and copy.type == socket.SOCK_STREAM and not _listens(copy):
            copy.shutdown(socket.SHUT_RD)


def turn_up(known: Iterable[Known], members: int, but: int) -> None:
    """Connect to gloo's listeners among these sockets in the place of members who do not, and hang up at once.

    gloo waits for each of them with no socket that could be shut down, and shutting the listener down ends the process.
    A connection begins with 8 bytes: the number of the member that it is for.

    Args:
        known: sockets.
        members: of the group.
        but: a port that is somebody else's.
    """
    for each in known:
        with contextlib.suppress(OSError), _copy(each) as copy:
            if copy is None or copy.type != socket.SOCK_STREAM or not _listens(copy) or copy.getsockname()[1] == but:
                continue
            for number in range(members):
                with socket.create_connection(copy.getsockname()[:2], timeout=KNOCK) as knock:
                    knock.sendall(struct.pack("=q", number))


def _listens(copy: socket.socket) -> bool:
    return bool(copy.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


@contextlib.contextmanager
def _copy(known: Known) -> Iterator[socket.socket | None]:
    """A second descriptor of an internet socket; None if the number is another file's by now.

    Raises:
        OSError: there is no such descriptor.
    """
    descriptor, name = known
    with contextlib.ExitStack() as stack:
        duplicate = os.dup(descriptor)
        stack.callback(os.close, duplicate)
        if os.readlink(f"/proc/self/fd/{duplicate}") != name:
            yield None
            return
        copy = stack.enter_context(socket.socket(fileno=os.dup(duplicate)))
        yield copy if copy.family in (socket.AF_INET, socket.AF_INET6) else None
