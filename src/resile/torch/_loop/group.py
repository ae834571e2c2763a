"""The process group of one round. One process forms several in turn, and another thread can abort them.

A collective that waits for a lost peer must end at once. With NCCL, torch's own abort does that. With gloo it does not
(torch 2.13: `abort()` leaves a collective with a frozen peer waiting). But most gloo collectives raise within 2 ms when
their connections end, and `waits` abandons the others. So a group notes which sockets were opened while torch made it,
or made another group in the same round. Aborting ends exactly these sockets. They also show whether a peer is gone. The
price: a connection that another thread of the script opens in those milliseconds counts as the group's and ends with
the round.

A group in which a collective still waits is disposed of on a separate thread. Nothing of an older round can reach a
group, because each round has a new store on a port of its own, hosted by its rank 0.
"""

from __future__ import annotations

import contextlib
import logging
import math
import socket
import sys
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from resile.common.backoff import Backoff
from resile.protocol.worker_to_agent import WorkerAssignment
from resile.torch._loop import sockets, waits
from resile.torch._loop.waits import GroupLost as GroupLost
from resile.torch._support.error_file import in_brief

log = logging.getLogger(__name__)

CONNECT = Backoff(2.0, limit=30.0)
"""Seconds for the members to connect to each other once all have come, which normally takes milliseconds. The time
doubles after each failed meeting."""
PROBES = Backoff(0.002, limit=0.05, factor=1.5)
"""Seconds between two tries to reach the round's store. Torch's own client would wait a whole second."""
BREAK_AGAIN = 0.005
"""Seconds between two searches for new connections of a group that is aborted while it is being made."""


class Group:
    """The process group of one round: torch's default group between `form` and `destroy`."""

    def __init__(
        self, assignment: WorkerAssignment, backend: str, timeout: float, connect: float = CONNECT.limit
    ) -> None:
        """Store the settings. `form` makes the group.

        All peers must come within `timeout` seconds, and must then connect within `connect` seconds. Each collective
        may take `timeout` seconds.
        """
        self.assignment = assignment
        self.round = assignment.round
        self._backend = backend
        self._timeout = timeout
        self._connect = connect
        self._lock = threading.Lock()
        self._over_since = math.inf
        self._ended = threading.Event()
        self._abort_timer: threading.Timer | None = None
        self._before: list[set[sockets.Known]] = []
        """For each group that torch is making at this moment: the sockets that this process had before."""
        self._own: set[sockets.Known] = set()
        self._peer_connections: set[sockets.Known] = set()
        self._store: dist.Store | None = None
        self._excepthook = sys.excepthook
        """The hook before this group, which `destroy` restores. Torch wraps the hook with every group."""
        self._patches = contextlib.ExitStack()
        """Undoes the replacements of torch's functions when this group is destroyed."""

    @property
    def over(self) -> bool:
        """True after the group was aborted."""
        return self._over_since < math.inf

    def form(self) -> None:
        """Connect to the other members. Raises GroupLost if a member does not come, or the round is over."""
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
            raise GroupLost(f"round {assignment.round} did not come together: {in_brief(error)}") from None
        _forget_meshes()
        self._peer_connections = {each for each in self._own if sockets.is_connected(each)}
        self._notice_more()
        if self._backend == "gloo":
            self._patches.enter_context(waits.end_with_round(lambda: self._over_since))
        if self.over:
            raise GroupLost(f"round {assignment.round} is over")

    @property
    def broken(self) -> bool:
        """True if the group was aborted or a member has disconnected.

        If this is True, an error in a step may come from the loss of the group. With NCCL this may be False although a
        peer is lost, because NCCL's connections are not known here.
        """
        return self.over or not all(sockets.is_connected(each) for each in self._peer_connections)

    def wait(self, work: Any) -> None:
        """Wait for a collective. Raises GroupLost when the round is over, and RuntimeError if the collective failed."""
        if self._backend == "gloo":
            waits.wait(work, lambda: self._over_since)
        else:
            work.wait()

    def pause(self, seconds: float) -> None:
        """Sleep. Raises GroupLost as soon as the round is over."""
        if self._ended.wait(seconds):
            raise GroupLost(f"round {self.round} is over")

    def abort(self) -> None:
        """Make every pending and future collective of this group raise. Any thread may call this; it does not block."""
        with self._lock:
            self._over_since = min(self._over_since, time.monotonic())
            making = bool(self._before)
        self._ended.set()
        if self._backend == "nccl" and not making:  # untested, as there was no GPU
            if dist.is_initialized():
                dist.distributed_c10d._abort_process_group()
            return
        if making:
            threading.Thread(target=self._break_until_made, name="resile-break", daemon=True).start()
        else:
            self._break()

    def abort_in(self, seconds: float) -> None:
        """Abort after so many seconds, unless the group is destroyed or the process ends before. Does not block.

        If an abort is planned already, nothing changes.
        """
        if self._abort_timer is None:
            self._abort_timer = threading.Timer(seconds, self.abort)
            self._abort_timer.daemon = True
            self._abort_timer.start()

    def destroy(self, *, in_peace: bool = False) -> None:
        """Leave the group, so that the process can form another one.

        Give `in_peace` if no collective is under way. Otherwise a gloo group is aborted first, so that no member is
        left waiting in a collective.
        """
        if self._abort_timer is not None:
            self._abort_timer.cancel()
            self._abort_timer.join()  # it may be running already, and must not abort the next group
        self._patches.close()
        if dist.is_initialized():
            if not self.over and not in_peace and self._backend == "gloo":
                self.abort()
            groups = list(dist.distributed_c10d._world.pg_map) if self.over else []
            dist.destroy_process_group()
            if getattr(sys.excepthook, "__module__", "") == dist.distributed_c10d.__name__:  # no later hook
                sys.excepthook = self._excepthook
            if groups:  # dropping the last reference to a group waits for everything pending in it
                last = threading.Thread(target=groups.clear, name="resile-left-group", daemon=True)
                last.start()
                last.join(waits.GRACE)
                if last.is_alive():
                    log.info("something of round %d does not end: it is left behind", self.round)
        self._store = None

    @contextlib.contextmanager
    def _making(self) -> Iterator[None]:
        """Note the sockets that are opened within this context. If the group is aborted, their connections are ended.

        Raises GroupLost if the round is over.
        """
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
        """Until `destroy`, note the sockets of all process groups that the script makes, as `_making` does.

        Torch has no hook for new groups, so torch's function that makes them is replaced.
        """
        make = dist.distributed_c10d._new_process_group_helper

        def noticed(*args: Any, **more: Any) -> Any:
            with self._making():
                return make(*args, **more)

        self._patches.enter_context(waits.replaced(dist.distributed_c10d, "_new_process_group_helper", noticed))

    def _break_until_made(self) -> None:
        deadline = time.monotonic() + CONNECT.limit
        while self._break() and time.monotonic() < deadline:
            time.sleep(BREAK_AGAIN)

    def _break(self) -> bool:
        """End the connections of this round's groups. Returns True if torch is still making a group.

        Then call this again, because that group may open more connections.
        """
        with self._lock:
            making = bool(self._before)
            new = sockets.opened() - self._before[0] if self._before else set()
            for each in self._own | new:
                sockets.hang_up(each)
        sockets.turn_up(new, self.assignment.world_size, but=self.assignment.master_port)
        return making

    def _meet(self) -> dist.Store:
        assignment = self.assignment
        if assignment.rank != 0:
            self._await_store()
        store = waits.call(  # while nothing listens, torch's client retries, mostly without a socket to end
            lambda: dist.TCPStore(
                assignment.master_addr,
                assignment.master_port,
                is_master=assignment.rank == 0,
                wait_for_workers=False,
                timeout=timedelta(seconds=min(self._timeout, CONNECT.limit)),
            ),
            lambda: self._over_since,
        )
        store.set_timeout(timedelta(seconds=self._timeout))
        store.set(f"here{assignment.rank}", "1")
        store.wait([f"here{rank}" for rank in range(assignment.world_size)], timedelta(seconds=self._timeout))
        return store

    def _await_store(self) -> None:
        deadline = time.monotonic() + self._timeout
        for pause in PROBES.pauses():
            if self.over:
                raise GroupLost(f"round {self.round} is over")
            try:
                with socket.create_connection((self.assignment.master_addr, self.assignment.master_port), timeout=1.0):
                    return
            except OSError:
                if time.monotonic() > deadline:
                    raise
            time.sleep(pause)


def wait(work: Any, group: Group | None) -> None:
    """Wait for a collective. Raises GroupLost when the round of `group` is over. Without rounds, `group` is None."""
    work.wait() if group is None else group.wait(work)


def default_backend() -> str:
    return "nccl" if torch.cuda.is_available() else "gloo"


def _forget_meshes() -> None:
    """Empty torch's caches of device meshes, because they do not tell meshes of the same size apart.

    A tensor derived from a sharded one, such as a `state_dict` entry, gets its mesh from such a cache. The mesh of an
    older round has this process's old rank, so a shard would be saved and loaded as another rank's.
    """
    if "torch.distributed.tensor" not in sys.modules:  # nothing was ever sharded, and the import takes long
        return
    from torch.distributed.tensor import DTensor, _redistribute

    DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache.cache_clear()
    _redistribute._gen_transform_infos.cache_clear()
    for owner, name in (
        (torch._C, "_clear_DTensor_sharding_propagator_cache"),
        (_redistribute, "clear_redistribute_planner_cache"),
    ):
        getattr(owner, name, lambda: None)()  # older releases have no such cache
