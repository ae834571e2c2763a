"""One start of all processes of a node: their environment and files, and which of them failed by their own fault.

Processes that restart serve one round and end with it. Those of an elastic script stay from round to round, and one
that fails is replaced without its siblings.

When one process fails, its siblings are stopped, and how they end is no failure. But a sibling may have failed first
and taken longer to die (a long traceback, a slow exit). If its error was recorded before it was asked to stop, it is a
failure too, and the earliest one is the cause. The comparison only needs the clock of one machine.
"""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import msgspec

from resile.agent.failures.evidence import oom_kills, read_failure
from resile.agent.options import RunOptions, Std
from resile.agent.standby.pool import StandbyPool
from resile.agent.workers.env import NoDeviceError, worker_environment
from resile.agent.workers.output import Outlet, Output, console
from resile.agent.workers.worker_group import CANNOT_RUN, CannotStart, Ended, Spawn, WorkerGroup
from resile.api.ids import Round
from resile.protocol.reports import RoundAssignment, WorkerFailure


class LogDirectory:
    """Where the files of an agent's processes go: DIR/RUN_ID_xxxxxxxx/attempt_N/LOCAL_RANK/, as torchrun has it."""

    def __init__(self, options: RunOptions, private: Path) -> None:
        """Make the directory. If no flag asks for log files, it is in `private`, which is removed at exit.

        May raise OSError.
        """
        self.kept = bool(options.log_dir) or any(options.to_file(rank) for rank in range(options.nproc))
        base = options.log_dir or (tempfile.mkdtemp(prefix="resile_logs_") if self.kept else private / "logs")
        os.makedirs(base, exist_ok=True)
        self.path = Path(tempfile.mkdtemp(prefix=f"{options.run_id.replace('/', '_')}_", dir=base))

    def of(self, attempt: int, local_rank: int) -> Path:
        return self.path / f"attempt_{attempt}" / str(local_rank)


class NodeContext(NamedTuple):
    options: RunOptions
    logs: LogDirectory
    socket: Path
    """The socket by which processes reach the agent."""
    owner: str
    """The first part of the names of this agent's processes."""
    output: Output
    standbys: StandbyPool


class Attempt:
    """One start of all processes of a node. They serve one round, or many if the script is elastic."""

    def __init__(
        self,
        node: NodeContext,
        round_: Round,
        assignment: RoundAssignment,
        *,
        number: int,
        on_end: Callable[[int | None, str, list[WorkerFailure]], None],
    ) -> None:
        """If the processes start before there is a round, `round_` is NO_ROUND and `assignment` is a stand-in.

        `number` counts the attempts before this one on this node. `on_end` is called for every process that ends, with
        its local rank, its name and the failures that its end shows. The rank is None if no process could be started.
        """
        self.round = round_
        self.assignment = assignment
        self.number = number
        self.names = {rank: f"{node.owner}.{number}.{rank}" for rank in range(node.options.nproc)}
        self.failures: list[WorkerFailure] = []
        """Failures of processes that were not replaced."""
        self.ranks = {rank: assignment.first_rank + rank for rank in self.names}
        """The global rank of each local rank that is in the round."""
        self._numbers = dict.fromkeys(self.names, number)
        self._node = node
        self._dismissed: set[int] = set()
        self._on_end = on_end
        self._group = WorkerGroup(node.output, self._ended, node.standbys)
        self._stopped_at: float | None = None
        self._stop_signal: int = signal.SIGTERM
        self._oom_kills = oom_kills()

    @property
    def is_running(self) -> bool:
        return self._group.alive > 0

    @property
    def is_sound(self) -> bool:
        return self.is_running and not self.is_stopped

    @property
    def is_stopped(self) -> bool:
        """True if the processes were asked to stop, or could not be started."""
        return self._stopped_at is not None

    @property
    def has_finished(self) -> bool:
        return not self.is_running and not self.is_stopped and not self.failures

    def log_of(self, failure: WorkerFailure) -> str:
        """The path of the log of the process that failed; empty if no log was kept."""
        if not self._node.logs.kept or all(own.pid != failure.pid for own in self.failures):
            return ""
        directory = self._node.logs.of(self._numbers[failure.local_rank], failure.local_rank)
        return next((str(file) for n in ("stderr", "stdout") if (file := directory / f"{n}.log").exists()), "")

    def start(self) -> None:
        """Start all processes. If that fails, `on_end` is called with the failure."""
        try:
            self._group.start([self._spawn(rank) for rank in range(self._node.options.nproc)])
        except (CannotStart, NoDeviceError, OSError) as error:
            self._stopped_at = time.time()
            self.failures.append(
                WorkerFailure(
                    global_rank=self.assignment.first_rank,
                    local_rank=0,
                    pid=0,
                    at=self._stopped_at,
                    exit_code=CANNOT_RUN,
                    error=str(error),
                )
            )
            self._on_end(None, "", self.failures[-1:])

    async def stop(self, grace: float, number: int = signal.SIGTERM) -> None:
        """Send all processes signal `number` and kill them after `grace` seconds. Returns when all are gone."""
        self._stopped_at = self._stopped_at or time.time()
        self._stop_signal = number
        await self._group.stop(grace, number)

    def enter(self, round_: Round, assignment: RoundAssignment, local_ranks: list[int]) -> None:
        """Record that the processes `local_ranks` are in `round_` now. They are in the order of their global ranks."""
        self.round, self.assignment = round_, assignment
        self.ranks = {local_rank: assignment.first_rank + number for number, local_rank in enumerate(local_ranks)}

    def replace(self, local_rank: int, number: int) -> str:
        """Start attempt `number` of a local rank whose process failed, and return the name of the new process.

        Raises CannotStart if no process can be started.
        """
        self._numbers[local_rank] = number
        self.names[local_rank] = f"{self._node.owner}.{number}.{local_rank}"
        try:
            self._group.start_one(local_rank, self._spawn(local_rank))
        except (NoDeviceError, OSError) as error:
            raise CannotStart(str(error)) from error
        self.failures = [failure for failure in self.failures if failure.local_rank != local_rank]
        return self.names[local_rank]

    def runs(self, local_rank: int) -> bool:
        return self._group.runs(local_rank)

    def kill_one(self, local_rank: int) -> None:
        """Kill one process. Its end counts as a failure."""
        self._group.kill_one(local_rank)

    def dismiss(self, local_rank: int) -> None:
        """Kill one process that is not needed any more. Its end does not count as a failure."""
        self._dismissed.add(local_rank)
        self._group.kill_one(local_rank)

    def kill(self) -> None:
        self._stopped_at = self._stopped_at or time.time()
        self._group.kill()

    def _ended(self, ended: Ended) -> None:
        found: list[WorkerFailure] = []
        if ended.returncode and ended.local_rank not in self._dismissed:
            failure = self._failure(ended)
            if self._stopped_at is None:
                found.append(failure)
            elif failure.at < self._stopped_at:
                found.append(_without_signal(failure, self._stop_signal))
        self.failures += found
        self._on_end(ended.local_rank, self.names[ended.local_rank], found)

    def _failure(self, ended: Ended) -> WorkerFailure:
        kills = oom_kills()
        by_kernel, self._oom_kills = kills > self._oom_kills, kills
        return read_failure(
            returncode=ended.returncode,
            global_rank=self.ranks.get(ended.local_rank, self.assignment.first_rank + ended.local_rank),
            local_rank=ended.local_rank,
            pid=ended.pid,
            ended_at=ended.at,
            error_file=str(self._node.logs.of(self._numbers[ended.local_rank], ended.local_rank) / "error.json"),
            log_tail=ended.tail,
            oom_killed=by_kernel and ended.returncode == -signal.SIGKILL,
        )

    def _spawn(self, local_rank: int) -> Spawn:
        options = self._node.options
        number = self._numbers[local_rank]
        directory = self._node.logs.of(number, local_rank)
        directory.mkdir(parents=True, exist_ok=True)
        environment = worker_environment(
            os.environ,
            options=options,
            place=self.assignment,
            local_rank=local_rank,
            round_=self.round,
            restart_count=number,
            error_file=str(directory / "error.json"),
            agent_socket=str(self._node.socket),
            worker=self.names[local_rank],
        )
        return Spawn(
            options.command_of(local_rank),
            environment,
            self._outlet(local_rank, Std.OUT, directory),
            self._outlet(local_rank, Std.ERR, directory),
            self._prefix(local_rank) if options.tee.get(local_rank, Std.NONE) else b"",
        )

    def _outlet(self, local_rank: int, which: Std, directory: Path) -> Outlet:
        name = "stdout" if which is Std.OUT else "stderr"
        return Outlet(
            directory / f"{name}.log" if self._node.options.to_file(local_rank) & which else None,
            console(name) if self._node.options.to_console(local_rank) & which else None,
        )

    def _prefix(self, local_rank: int) -> bytes:
        template = self._node.options.log_prefix or "[${role_name}${rank}]:"
        rank = self.assignment.first_rank + local_rank
        words = {"${role_name}": self._node.options.role, "${rank}": str(rank), "${local_rank}": str(local_rank)}
        for word, value in words.items():
            template = template.replace(word, value)
        return template.encode()


def _without_signal(failure: WorkerFailure, asked: int) -> WorkerFailure:
    """Replace the signal of `failure` by exit code 1, if the agent may have sent that signal (`asked` or SIGKILL).

    Call this only if the process recorded its error before the agent sent a signal, because the signal would mislead
    then. A failure for lack of memory is returned unchanged.
    """
    if failure.oom or failure.signal not in (asked, signal.SIGKILL):
        return failure
    return msgspec.structs.replace(failure, signal=0, exit_code=1)
