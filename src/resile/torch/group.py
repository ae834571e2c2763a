"""One round's process group, made in a process that has been in others before, and broken off from another thread.

A collective that waits for a lost peer has to end at once. With NCCL torch's own abort does that. With gloo it does not
(seen with torch 2.13: `abort()` leaves a collective with a frozen peer waiting), but a collective raises within 2 ms
when the sockets below it are shut down. So a group remembers which TCP connections came up while it was made: breaking
it off shuts exactly those down, and whether a peer is gone can be seen on them. The price: a connection that another
thread of the script opens in those milliseconds is taken for one of the group's, and ends with the round.

Nothing of an older round can reach a group: its store is a new one on a port of its own, hosted by rank 0 of the round.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from datetime import timedelta

import torch
import torch.distributed as dist

from resile.api.ids import Round
from resile.wire.messages import Placed

FIRST_CONNECT, LONGEST_CONNECT = 2.0, 30.0
"""Seconds for the members to connect to each other once all are there, which takes milliseconds; doubled after each
meeting in vain. One who waits to be connected to has no socket that could be shut down, so a loss in that very moment
costs all of it."""
PROBE = 0.002
LONGEST_PROBE = 0.05
"""Seconds between two looks for the round's store. torch's own client would try again after a whole second."""
BREAK_AGAIN = 0.005
"""Seconds between two looks for new connections of a group that is broken off while it is made."""


class GroupLost(RuntimeError):
    """The group is broken, or could not be made: somebody was lost, or the round is over."""


class Group:
    """The process group of one round: torch's default group between `form` and `destroy`."""

    def __init__(self, placed: Placed, backend: str, timeout: float, connect: float = LONGEST_CONNECT) -> None:
        """Nothing happens before `form`.

        Args:
            placed: this process's place in the round.
            backend: as for torch's `init_process_group`.
            timeout: seconds for peers to come, and for a collective.
            connect: seconds for all to connect to each other once they have come.
        """
        self.placed = placed
        self.round: Round = placed.round
        self.over = False
        """Whether it was broken off."""
        self._backend = backend
        self._timeout = timeout
        self._connect = connect
        self._lock = threading.Lock()
        self._before: set[tuple[int, str]] | None = None
        self._own: set[tuple[int, str]] | None = None
        self._lines: set[tuple[int, str]] = set()
        """Of its own sockets, those to other members."""
        self._store: dist.Store | None = None
        self._excepthook = sys.excepthook
        """torch puts its own around it with every group, and never takes it away."""

    def form(self) -> None:
        """Meet the other members.

        Raises:
            GroupLost: they cannot all be met, or the round is over.
        """
        placed = self.placed
        self._before = _sockets()
        try:
            self._store = self._meet()
            dist.init_process_group(
                self._backend,
                store=dist.PrefixStore(f"round{placed.round}", self._store),
                rank=placed.rank,
                world_size=placed.world_size,
                timeout=timedelta(seconds=self._connect),
            )
            dist.barrier() if placed.world_size > 1 else None
            dist.distributed_c10d._set_pg_timeout(timedelta(seconds=self._timeout))
        except (RuntimeError, OSError, ValueError) as error:
            raise GroupLost(f"round {placed.round} did not come together: {_first_line(error)}") from None
        finally:
            with self._lock:
                self._own = _sockets() - self._before
        self._lines = {each for each in self._own if _is_connected(*each)}
        if self.over:
            raise GroupLost(f"round {placed.round} is over")

    @property
    def broken(self) -> bool:
        """Whether it is over, or a member has hung up: how an error of a peer's loss differs from any other one.

        With NCCL, whose connections are others, it may be neither although a peer is lost.
        """
        return self.over or not all(_is_connected(*each) for each in self._lines)

    def abort(self) -> None:
        """Make every collective of this group raise, now and from now on. For any thread; returns when it is done."""
        self.over = True
        if self._backend == "nccl" and self._own is not None:  # not tried here: no GPU
            dist.distributed_c10d._abort_process_group()
            return
        deadline = time.monotonic() + self._connect
        while time.monotonic() < deadline:
            with self._lock:
                made = self._own is not None
                own = self._own if self._own is not None else _sockets() - (self._before or _sockets())
                for descriptor, name in own:
                    _shut(descriptor, name)
            if made:
                return
            time.sleep(BREAK_AGAIN)

    def destroy(self, *, in_peace: bool = False) -> None:
        """Leave the group; a process that has left can form another one.

        Args:
            in_peace: nothing is under way. Otherwise the group is broken off first, which frees its other members.
        """
        if dist.is_initialized():
            if not self.over and not in_peace and self._backend == "gloo":
                self.abort()
            dist.destroy_process_group()
            sys.excepthook = self._excepthook
        self._store = None

    def _meet(self) -> dist.Store:
        """The store of the round, when all members have come to it."""
        placed = self.placed
        if placed.rank != 0:
            self._await_store()
        store = dist.TCPStore(
            placed.master_addr,
            placed.master_port,
            is_master=placed.rank == 0,
            wait_for_workers=False,
            timeout=timedelta(seconds=self._timeout),
        )
        store.set(f"here{placed.rank}", "1")
        store.wait([f"here{rank}" for rank in range(placed.world_size)], timedelta(seconds=self._timeout))
        return store

    def _await_store(self) -> None:
        deadline, pause = time.monotonic() + self._timeout, PROBE
        while True:
            if self.over:
                raise GroupLost(f"round {self.round} is over")
            try:
                with socket.create_connection((self.placed.master_addr, self.placed.master_port), timeout=1.0):
                    return
            except OSError:
                if time.monotonic() > deadline:
                    raise
            time.sleep(pause)
            pause = min(pause * 1.5, LONGEST_PROBE)


def time_to_connect(in_vain: int) -> float:
    """Seconds for the members to connect to each other, after so many meetings that came to nothing."""
    return min(LONGEST_CONNECT, FIRST_CONNECT * 2.0**in_vain)


def default_backend() -> str:
    """What a process with and without a GPU would take."""
    return "nccl" if torch.cuda.is_available() else "gloo"


def _sockets() -> set[tuple[int, str]]:
    """The sockets of this process: descriptor, and the name that tells a reused descriptor."""
    found = set()
    for entry in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            name = os.readlink(f"/proc/self/fd/{entry}")
            if name.startswith("socket:"):
                found.add((int(entry), name))
    return found


def _is_connected(descriptor: int, name: str) -> bool:
    """Whether this is a TCP connection whose other side has not hung up."""
    with contextlib.suppress(OSError), _copy(descriptor, name) as line:
        if line is None or line.type != socket.SOCK_STREAM:
            return False
        line.getpeername()
        try:
            return bool(line.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT))
        except BlockingIOError:
            return True
    return False


def _shut(descriptor: int, name: str) -> None:
    """End a TCP connection under whoever uses it. The descriptor stays its owner's to close."""
    with contextlib.suppress(OSError), _copy(descriptor, name) as line:
        if line is not None and line.type == socket.SOCK_STREAM:
            line.getpeername()  # not for a listener, which has none
            line.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def _copy(descriptor: int, name: str) -> Iterator[socket.socket | None]:
    """A second descriptor of an internet socket; None if the number is another file's by now.

    Raises:
        OSError: there is no such descriptor.
    """
    with contextlib.ExitStack() as stack:
        copy = os.dup(descriptor)
        stack.callback(os.close, copy)
        if os.readlink(f"/proc/self/fd/{copy}") != name:
            yield None
            return
        line = stack.enter_context(socket.socket(fileno=os.dup(copy)))
        yield line if line.family in (socket.AF_INET, socket.AF_INET6) else None


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__
