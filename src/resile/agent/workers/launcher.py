"""Starts and stops the processes of a node, one attempt after the other.

An attempt ends before the next one begins: two sets of processes would compete for the same GPUs. So a change of rounds
first stops the old processes, which takes up to the grace period, and then starts new ones in the newest round.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import time
from collections.abc import Callable, Coroutine

from resile.agent.wait_log import WaitLog
from resile.agent.worker_relay import Relay
from resile.agent.workers.attempt import Attempt, NodeContext
from resile.agent.workers.ports import free_port
from resile.api.ids import NO_ROUND, Rank, Round, Seconds
from resile.protocol.reports import RoundAssignment, WorkerFailure

log = logging.getLogger("resile.agent")

IDLE_FOR = Seconds(1.0)
"""How long a node waits for a round before it uses the time to warm up standbys."""


class RestartCount:
    """Counts failures of this node's processes as the master does: all failures of one round count as one.

    The master's own count decides. It measures `budget_window` in training time, which never passes faster than the
    clock. So if the budget is spent by this count, it is spent by the master's too, unless a new master has forgotten
    failures. The agent therefore uses this count for its log and its pauses only, and refuses nothing because of it.
    """

    def __init__(self, allowed: int, window: Seconds, clock: Callable[[], float] = time.monotonic) -> None:
        """Allow `allowed` failures (`--max-restarts`) in any `window` seconds."""
        self._allowed = allowed
        self._window = window
        self._clock = clock
        self._failures: list[float] = []
        self._last_round: Round = NO_ROUND

    def count(self, placed: Round) -> None:
        """Count a failure of a process; `placed` is its round, or NO_ROUND if it was in none."""
        if placed == NO_ROUND or placed != self._last_round:
            self._failures.append(self._clock())
        self._last_round = placed or self._last_round

    @property
    def is_spent(self) -> bool:
        """True if the window holds more failures than are allowed. The master will then end the job."""
        since = self._clock() - self._window
        return sum(at > since for at in self._failures) > self._allowed

    def __str__(self) -> str:
        used = len(self._failures)
        if used > self._allowed:  # older failures left the window
            return f"of {self._allowed} restarts some older ones do not count any more"
        return f"{used} of {self._allowed} restarts used"


class WorkerLauncher:
    """Starts and stops the processes of one node. At most one attempt runs."""

    def __init__(
        self,
        node: NodeContext,
        *,
        relay: Relay,
        waits: WaitLog,
        in_background: Callable[[Coroutine[None, None, None]], asyncio.Task[None]],
        on_end: Callable[[int | None, list[WorkerFailure]], None],
        on_stopped: Callable[[tuple[Round, RoundAssignment] | None], None],
    ) -> None:
        """`on_end` gets the local rank and failures of each process that ends. The rank is None if the start failed.

        `on_stopped` is called when all processes are gone. It gets the round to start in, or None if none was formed.
        """
        self._node = node
        self._relay = relay
        self._waits = waits
        self._in_background = in_background
        self._on_end = on_end
        self._on_stopped = on_stopped
        timeouts = node.options.timeouts
        self.kill_grace: float = timeouts.kill_grace
        """Seconds that processes have to end when their round is over; the master may change this."""
        self.restarts = RestartCount(node.options.rendezvous.max_restarts, timeouts.budget_window)
        self.attempt: Attempt | None = None
        self._attempts = 0
        self._next: tuple[Round, RoundAssignment] | None = None
        self._stopping: asyncio.Task[None] | None = None
        self._closed = False
        self._has_stepped = False

    @property
    def is_running(self) -> bool:
        return self.attempt is not None and self.attempt.is_running

    @property
    def has_next(self) -> bool:
        """True if processes will be started in a round as soon as those of the last round are gone."""
        return self._next is not None

    def owns(self, worker: str) -> bool:
        """True if the present attempt started a process of this name and is not being stopped."""
        attempt = self.attempt
        return attempt is not None and not attempt.is_stopped and worker in attempt.names.values()

    # changing rounds --------------------------------------------------------------------------------------------------

    def move_to(self, round_: Round, assignment: RoundAssignment) -> None:
        """Stop the processes, then start new ones in `round_`, or in a newer round if one is formed meanwhile."""
        self._next = (round_, assignment)
        self.restart()

    def leave_round(self) -> None:
        self._next = None
        self.restart()

    def restart(self) -> None:
        """Stop the processes and call `on_stopped`, which may start new ones. Does nothing if this is under way."""
        if self._stopping is None and not self._closed:
            self._stopping = self._in_background(self._stop_and_go_on())

    async def _stop_and_go_on(self) -> None:
        if self.attempt is not None:
            await self.attempt.stop(self.kill_grace)
        self._stopping = None
        following, self._next = self._next, None
        self._on_stopped(following)

    async def stop(self, grace: float, number: int = signal.SIGTERM) -> None:
        """Stop the processes for good: signal `number`, SIGKILL after `grace` seconds. Returns when all are gone."""
        self.close()
        if self.attempt is not None:
            await self.attempt.stop(grace, number)

    def close(self) -> None:
        self._closed = True
        if self._stopping is not None:
            self._stopping.cancel()

    def kill(self) -> None:
        if self.attempt is not None:
            self.attempt.kill()

    # starting ---------------------------------------------------------------------------------------------------------

    def start(self, round_: Round, assignment: RoundAssignment) -> Attempt:
        if self.attempt is not None and self.attempt.failures:
            log.info("restarting (%s)", self.restarts)
        elif self.attempt is not None:
            log.info("restarting with the new round; this node uses up no restart for that")
        attempt = self._new_attempt(round_, assignment)
        self.entered_round()
        self._set_off(attempt)
        return attempt

    def start_ahead(self) -> Attempt:
        """Start elastic processes before there is a round, so that other nodes need not wait for their start."""
        log.info("starting processes ahead of the next round")
        nproc = self._node.options.nproc
        nowhere = RoundAssignment(
            group_rank=Rank(0),
            group_world_size=1,
            first_rank=0,
            world_size=nproc,
            master_addr="127.0.0.1",
            master_port=free_port(),
            nproc=nproc,
        )
        attempt = self._new_attempt(NO_ROUND, nowhere)
        for name in attempt.names.values():
            self._relay.expect(name)
        self._set_off(attempt)
        return attempt

    def replace(self, local_rank: int) -> None:
        """Start a new process for a local rank whose process failed. Raises CannotStart if that is impossible."""
        assert self.attempt is not None
        log.info("starting another process for local rank %d, ahead of the next round", local_rank)
        self._relay.expect(self.attempt.replace(local_rank, self._attempts))
        self._attempts += 1

    def idle(self) -> None:
        """Use the wait for a round to warm up standbys, and log after a while that the node waits."""
        self._waits.joined(again=self._attempts > 0)
        self._node.standbys.later(IDLE_FOR)

    def entered_round(self) -> None:
        attempt = self.attempt
        assert attempt is not None
        self._waits.over()
        role = self._node.options.role
        log.info("[%s] Rendezvous complete for workers. Result:%s\n", role, _rendezvous_result(attempt))
        self._relay.begin(attempt.round, set(attempt.names.values()), leads=attempt.assignment.group_rank == 0)

    def on_step(self) -> None:
        """Warm up standbys after the first step of an attempt, because training has begun."""
        if not self._has_stepped:
            self._has_stepped = True
            self._node.standbys.warm()

    def _new_attempt(self, round_: Round, assignment: RoundAssignment) -> Attempt:
        self.attempt = Attempt(self._node, round_, assignment, number=self._attempts, on_end=self._ended)
        self._attempts += 1
        return self.attempt

    def _set_off(self, attempt: Attempt) -> None:
        self._has_stepped = False
        # A script that reports no steps has finished its imports by then, and trains.
        self._node.standbys.later(self._node.options.timeouts.recovery_budget)
        attempt.start()

    def _ended(self, local_rank: int | None, name: str, failures: list[WorkerFailure]) -> None:
        self._relay.gone(name)
        for failure in failures:
            log.error("%s", failure)
        self._on_end(local_rank, failures)


def _rendezvous_result(attempt: Attempt) -> str:
    """The outcome of a rendezvous as torchrun logs it; people search logs for these words."""
    assignment, local = attempt.assignment, list(attempt.ranks)
    ranks = list(attempt.ranks.values())
    worlds = [assignment.world_size] * len(local)
    fields: dict[str, object] = {
        "restart_count": attempt.number,
        "master_addr": assignment.master_addr,
        "master_port": assignment.master_port,
        "group_rank": assignment.group_rank,
        "group_world_size": assignment.group_world_size,
        "local_ranks": local,
        "role_ranks": ranks,
        "global_ranks": ranks,
        "role_world_sizes": worlds,
        "global_world_sizes": worlds,
    }
    return "".join(f"\n  {name}={value}" for name, value in fields.items())
