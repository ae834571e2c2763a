"""One round's process group, made in a process that has been in others before, and broken off from another thread.

A collective that waits for a lost peer has to end at once. With NCCL torch's own abort does that. With gloo it does not
(seen with torch 2.13: `abort()` leaves a collective with a frozen peer waiting), but a collective raises within 2 ms
when the connections below it come to their end. So a group remembers which sockets came up while it, or another group
after it, was made: breaking it off ends exactly those, and whether a peer is gone can be seen on them. The price: a
connection that another thread of the script opens in those milliseconds is taken for one of the group's, and ends with
the round.

Even then gloo forgets a message of which a part is still to be sent or received when its connection ends, and waits for
it until the time-out of the collective. So nobody here waits in gloo itself: `wait` leaves when the round is over, and
what is left of a group that still waits is left to a thread of its own.

Nothing of an older round can reach a group: its store is a new one on a port of its own, hosted by rank 0 of the round.
"""

from __future__ import annotations

import contextlib
import logging
import math
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from resile.api.ids import Round
from resile.protocol.worker_to_agent import WorkerAssignment
from resile.torch._loop import sockets

log = logging.getLogger(__name__)

FIRST_CONNECT, LONGEST_CONNECT = 2.0, 30.0
"""Seconds for the members to connect to each other once all are there, which takes milliseconds; doubled after each
meeting in vain."""
PROBE = 0.002
LONGEST_PROBE = 0.05
"""Seconds between two looks for the round's store. torch's own client would try again after a whole second."""
BREAK_AGAIN = 0.005
"""Seconds between two looks for new connections of a group that is broken off while it is made."""
LOOK = 0.05
"""Seconds between two looks whether the round is over, in a wait for a collective."""
GRACE = 0.05
"""Seconds for a collective to raise once its group is broken off; it takes milliseconds, or it never does."""

T = TypeVar("T")


class GroupLost(RuntimeError):
    """The group is broken, or could not be made: somebody was lost, or the round is over."""


class Group:
    """The process group of one round: torch's default group between `form` and `destroy`."""

    def __init__(
        self, assignment: WorkerAssignment, backend: str, timeout: float, connect: float = LONGEST_CONNECT
    ) -> None:
        """Nothing happens before `form`.

        Args:
            assignment: this process's rank in the round, and where its members meet.
            backend: as for torch's `init_process_group`.
            timeout: seconds for peers to come, and for a collective.
            connect: seconds for all to connect to each other once they have come.
        """
        self.assignment = assignment
        self.round: Round = assignment.round
        self._backend = backend
        self._timeout = timeout
        self._connect = connect
        self._lock = threading.Lock()
        self._over_since = math.inf
        self._ended = threading.Event()
        self._timer: threading.Timer | None = None
        """It is broken off when that is over."""
        self._before: list[set[sockets.Known]] = []
        """The sockets there were before a group was made, while one is being made."""
        self._own: set[sockets.Known] = set()
        self._peer_connections: set[sockets.Known] = set()
        """Of its own sockets, those to other members."""
        self._store: dist.Store | None = None
        self._excepthook = sys.excepthook
        """torch puts its own around it with every group, and never takes it away."""
        self._new_group: Callable[..., Any] | None = None
        """What torch makes every group with, as it was before this one."""

    @property
    def over(self) -> bool:
        """Whether it was broken off."""
        return self._over_since < math.inf

    def form(self) -> None:
        """Meet the other members.

        Raises:
            GroupLost: they cannot all be met, or the round is over.
        """
        assignment = self.assignment
        try:
            with self._making():
                self._store = self._meet()
                dist.init_process_group(
                    self._backend,
                    store=dist.PrefixStore(f"round{assignment.round}", self._store),
                    rank=assignment.rank,
                    world_size=assignment.world_size,
                    timeout=timedelta(seconds=self._connect),
                )
                if assignment.world_size > 1:
                    self.wait(dist.barrier(async_op=True))
            dist.distributed_c10d._set_pg_timeout(timedelta(seconds=self._timeout))
        except (RuntimeError, OSError, ValueError) as error:
            raise GroupLost(f"round {assignment.round} did not come together: {_first_line(error)}") from None
        _forget_meshes()
        self._peer_connections = {each for each in self._own if sockets.is_connected(each)}
        self._notice_more()
        if self.over:
            raise GroupLost(f"round {assignment.round} is over")

    @property
    def broken(self) -> bool:
        """Whether it is over, or a member has hung up: how an error of a peer's loss differs from any other one.

        With NCCL, whose connections are others, it may be neither although a peer is lost.
        """
        return self.over or not all(sockets.is_connected(each) for each in self._peer_connections)

    def wait(self, work: Any) -> None:
        """Wait for a collective, or for the end of the round.

        Raises:
            GroupLost: the round is over.
            RuntimeError: the collective failed.
        """
        if self._backend != "gloo":
            work.wait()
            return
        while not _ends(work, LOOK):
            if time.monotonic() > self._over_since + GRACE:
                raise GroupLost(f"round {self.round} is over, and a collective of it does not end")

    def wait_for_one(self, work: Any) -> None:
        """Wait for a message to or from one rank, or for the end of the round.

        Raises:
            GroupLost: the round is over.
            RuntimeError: the message failed.
        """
        if self._backend != "gloo":
            work.wait()
        else:  # gloo hangs up when such a wait takes longer than it was given, so no short one can be repeated
            self._unless_over(work.wait)

    def pause(self, seconds: float) -> None:
        """Do nothing for so long.

        Raises:
            GroupLost: the round is over, maybe long before.
        """
        if self._ended.wait(seconds):
            raise GroupLost(f"round {self.round} is over")

    def abort(self) -> None:
        """Make every collective of this group raise, now and from now on. For any thread; waits for nobody."""
        with self._lock:
            self._over_since = min(self._over_since, time.monotonic())
            making = bool(self._before)
        self._ended.set()
        if self._backend == "nccl" and not making:  # not tried here: no GPU
            if dist.is_initialized():
                dist.distributed_c10d._abort_process_group()
            return
        if making:
            threading.Thread(target=self._break_until_made, name="resile-break", daemon=True).start()
        else:
            self._break()

    def abort_in(self, seconds: float) -> None:
        """The same after a while, unless it is left before. Does not keep the process from ending."""
        if self._timer is None:
            self._timer = threading.Timer(seconds, self.abort)
            self._timer.daemon = True
            self._timer.start()

    def destroy(self, *, in_peace: bool = False) -> None:
        """Leave the group; a process that has left can form another one.

        Args:
            in_peace: nothing is under way. Otherwise the group is broken off first, which frees its other members.
        """
        if self._timer is not None:
            self._timer.cancel()
            self._timer.join()  # it may have begun, and what it breaks off must not be the next group
        if self._new_group is not None:
            dist.distributed_c10d._new_process_group_helper, self._new_group = self._new_group, None
        if dist.is_initialized():
            if not self.over and not in_peace and self._backend == "gloo":
                self.abort()
            groups = list(dist.distributed_c10d._world.pg_map) if self.over else []
            dist.destroy_process_group()
            sys.excepthook = self._excepthook
            if groups:  # the last reference to a group waits for all that is under way in it
                last = threading.Thread(target=groups.clear, name="resile-left-group", daemon=True)
                last.start()
                last.join(GRACE)
                if last.is_alive():
                    log.info("something of round %d does not end: it is left behind", self.round)
        self._store = None

    # making -----------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _making(self) -> Iterator[None]:
        """Whatever sockets come up meanwhile are the group's, and end at once if it is broken off."""
        with self._lock:
            if self.over:
                raise GroupLost(f"round {self.round} is over")
            before = sockets.opened()
            self._before.append(before)
        try:
            yield
        finally:
            with self._lock:
                self._before.remove(before)
                self._own |= sockets.opened() - before

    def _notice_more(self) -> None:
        """Have the sockets of groups that the script makes in this round, those of a device mesh, say, broken off too.

        torch has no hook for that, but one function that makes them all.
        """
        self._new_group = make = dist.distributed_c10d._new_process_group_helper

        def noticed(*args: Any, **more: Any) -> Any:
            with self._making():
                return make(*args, **more)

        dist.distributed_c10d._new_process_group_helper = noticed

    def _break_until_made(self) -> None:
        deadline = time.monotonic() + LONGEST_CONNECT
        while self._break() and time.monotonic() < deadline:
            time.sleep(BREAK_AGAIN)

    def _break(self) -> bool:
        """End all connections there are; returns whether more may come."""
        with self._lock:
            making = bool(self._before)
            new = sockets.opened() - self._before[0] if self._before else set()
            for each in self._own | new:
                sockets.hang_up(each)
        sockets.turn_up(new, self.assignment.world_size, but=self.assignment.master_port)
        return making

    def _meet(self) -> dist.Store:
        """The store of the round, when all members have come to it."""
        assignment = self.assignment
        if assignment.rank != 0:
            self._await_store()
        store = self._unless_over(
            lambda: dist.TCPStore(
                assignment.master_addr,
                assignment.master_port,
                is_master=assignment.rank == 0,
                wait_for_workers=False,
                timeout=timedelta(seconds=min(self._timeout, LONGEST_CONNECT)),
            )
        )
        store.set_timeout(timedelta(seconds=self._timeout))
        store.set(f"here{assignment.rank}", "1")
        store.wait([f"here{rank}" for rank in range(assignment.world_size)], timedelta(seconds=self._timeout))
        return store

    def _unless_over(self, make: Callable[[], T]) -> T:
        """What a function gives; if the round is over first, it is left alone.

        torch's client of a store calls again and again where nobody listens any more, mostly without a socket.
        """
        found: list[T] = []
        errors: list[Exception] = []
        done = threading.Event()

        def run() -> None:
            try:
                found.append(make())
            except Exception as error:
                errors.append(error)
            done.set()

        threading.Thread(target=run, name="resile-store", daemon=True).start()
        while not done.wait(LOOK):
            if self.over:
                raise GroupLost(f"round {self.round} is over")
        if errors:
            raise errors[0]
        return found[0]

    def _await_store(self) -> None:
        deadline, pause = time.monotonic() + self._timeout, PROBE
        while True:
            if self.over:
                raise GroupLost(f"round {self.round} is over")
            try:
                with socket.create_connection((self.assignment.master_addr, self.assignment.master_port), timeout=1.0):
                    return
            except OSError:
                if time.monotonic() > deadline:
                    raise
            time.sleep(pause)
            pause = min(pause * 1.5, LONGEST_PROBE)


def wait(work: Any, group: Group | None) -> None:
    """Wait for a collective, in a round as long as that is not over.

    Raises:
        GroupLost: the round is over.
        RuntimeError: the collective failed.
    """
    work.wait() if group is None else group.wait(work)


def wait_for_one(work: Any, group: Group | None) -> None:
    """The same for a message to or from one rank."""
    work.wait() if group is None else group.wait_for_one(work)


def time_to_connect(in_vain: int) -> float:
    """Seconds for the members to connect to each other, after so many meetings that came to nothing."""
    return min(LONGEST_CONNECT, FIRST_CONNECT * 2.0 ** min(in_vain, 10))


def default_backend() -> str:
    """What a process with and without a GPU would take."""
    return "nccl" if torch.cuda.is_available() else "gloo"


def _ends(work: Any, within: float) -> bool:
    """Whether a collective ends within so many seconds.

    Raises:
        RuntimeError: it ends badly.
    """
    try:
        work.wait(timedelta(seconds=within))
        return True
    except RuntimeError:
        if not work.is_completed():
            return False
    work.wait()  # raises what it came to, unless it ended well just after it was given up
    return True


def _forget_meshes() -> None:
    """Have torch look anew at which shards are this process's.

    What is made of a sharded tensor, a parameter or an entry of a `state_dict`, say, gets its mesh from a cache. Meshes
    of equally many ranks are one and the same there, but an older round's has the rank that this process had in it: a
    shard would be saved, and loaded, as another rank's.
    """
    if "torch.distributed.tensor" not in sys.modules:  # nothing was ever sharded, and it takes long to import
        return
    from torch.distributed.tensor import DTensor, _redistribute

    DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache.cache_clear()
    _redistribute._gen_transform_infos.cache_clear()
    for owner, name in (
        (torch._C, "_clear_DTensor_sharding_propagator_cache"),
        (_redistribute, "clear_redistribute_planner_cache"),
    ):
        getattr(owner, name, lambda: None)()  # older releases have no such cache


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__
