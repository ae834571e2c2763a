"""Finds the TCP sockets of this process and ends their connections while other code uses them.

Gloo and torch's stores do not expose their sockets, so /proc is searched for them. A socket is identified by its
descriptor and its name, because descriptors are reused.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from collections.abc import Iterable, Iterator

Known = tuple[int, str]
"""The descriptor of a socket, and its name in /proc."""
KNOCK = 0.5
"""Seconds that `turn_up` may take for one connection to a listener of this process."""


def opened() -> set[Known]:
    found = set()
    for entry in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            name = os.readlink(f"/proc/self/fd/{entry}")
            if name.startswith("socket:"):
                found.add((int(entry), name))
    return found


def is_connected(known: Known) -> bool:
    """True for a TCP connection that the other side has not closed."""
    with contextlib.suppress(OSError), _copy(known) as copy:
        copy.getpeername()
        try:
            return bool(copy.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT))
        except BlockingIOError:
            return True
    return False


def hang_up(known: Known) -> None:
    """Shut down the reading side of a TCP connection; leave listeners and other sockets alone.

    The owner of the connection still has to close the descriptor. The writing side stays open, because
    otherwise sends would fail. Gloo overlooks a failed send until it has read the end of the connection (torch 2.13).
    """
    with contextlib.suppress(OSError), _copy(known) as copy:
        if not _listens(copy):
            copy.shutdown(socket.SHUT_RD)


def turn_up(known: Iterable[Known], members: int, but: int) -> None:
    """End gloo's wait for absent members. Connect to gloo's listeners in their place, and disconnect at once.

    Each listener gets one connection for each of the `members` ranks. The connection begins with the rank in 8 bytes,
    as gloo expects. Gloo's listeners are all listening sockets in `known`, except the one on port `but`. Shutting the
    listeners down instead would end the process.
    """
    for each in known:
        with contextlib.suppress(OSError), _copy(each) as copy:
            address = copy.getsockname()[:2]
            if not _listens(copy) or address[1] == but:
                continue
            for number in range(members):
                with socket.create_connection(address, timeout=KNOCK) as knock:
                    knock.sendall(struct.pack("=q", number))


def _listens(copy: socket.socket) -> bool:
    return bool(copy.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


@contextlib.contextmanager
def _copy(known: Known) -> Iterator[socket.socket]:
    """Yield a duplicate of a TCP socket. Raises OSError if its descriptor is closed or reused, or for other sockets."""
    descriptor, name = known
    with contextlib.ExitStack() as stack:
        duplicate = os.dup(descriptor)
        stack.callback(os.close, duplicate)
        if os.readlink(f"/proc/self/fd/{duplicate}") != name:
            raise OSError(f"{name} is closed")
        copy = stack.enter_context(socket.socket(fileno=os.dup(duplicate)))
        if copy.family not in (socket.AF_INET, socket.AF_INET6) or copy.type != socket.SOCK_STREAM:
            raise OSError(f"{name} is no TCP socket")
        yield copy
