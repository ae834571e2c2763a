"""The training processes of one node in one round: started together, watched by pidfd, stopped together.

The end of a process is known within a millisecond, because its pidfd becomes readable; nothing polls. A process and
its children form a process group, so stopping it leaves nothing behind. The agent's own death ends the process too (but
not its children, if the agent was killed with SIGKILL). If the program runs in a shell and the stop signal ends the
shell, the signal is passed on to the rest of its group, which then has the rest of the grace period.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from resile.agent.standby.pool import StandbyPool
from resile.agent.standby.standby import Standby, die_with_agent
from resile.agent.workers.output import Outlet, Output, Stream, Tail

log = logging.getLogger("resile.agent")

CANNOT_RUN = 127
"""A shell's exit code for a program that cannot be started."""


class Ended(NamedTuple):
    local_rank: int
    pid: int
    returncode: int
    at: float
    """Wall-clock seconds when the agent saw the end of the process."""
    tail: bytes


class Spawn(NamedTuple):
    command: Sequence[str]
    environment: Mapping[str, str]
    stdout: Outlet = Outlet()
    stderr: Outlet = Outlet()
    prefix: bytes = b""

    @property
    def outlets(self) -> tuple[Outlet, Outlet]:
        return self.stdout, self.stderr


class CannotStart(Exception):
    """A process could not be started; the text is one sentence."""


class _Worker(NamedTuple):
    process: subprocess.Popen[bytes] | Standby
    pidfd: int
    streams: list[Stream]
    tail: Tail
    fallen: bool = False
    """True if the stop signal ended the process. It is kept as a zombie while others of its group save."""


class WorkerGroup:
    def __init__(self, output: Output, on_end: Callable[[Ended], None], standbys: StandbyPool | None = None) -> None:
        self._output = output
        self._on_end = on_end
        self._standbys = standbys
        self._beginning: set[int] = set()
        """Local ranks whose standby was asked to begin and has not confirmed it."""
        self._awaited: dict[int, Callable[[], None]] = {}
        """For each local rank that waits for a standby, the function that cancels the wait."""
        self._alive: dict[int, _Worker] = {}
        self._loop = asyncio.get_running_loop()
        self._empty = asyncio.Event()
        self._empty.set()
        self._asked: int | None = None
        """The signal that asked all processes to stop; None before."""

    @property
    def alive(self) -> int:
        return len(self._alive) + len(self._awaited)

    def start(self, spawns: Sequence[Spawn]) -> None:
        """Start a process for each of `spawns`. If one cannot be started, kills the others and raises CannotStart."""
        try:
            for local_rank, spawn in enumerate(spawns):
                self.start_one(local_rank, spawn)
        except CannotStart:
            self.kill()
            raise

    def start_one(self, local_rank: int, spawn: Spawn) -> None:
        try:
            standby = None
            if self._standbys is not None:
                standby = self._standbys.take(spawn.environment)
                if standby is None:
                    start_late = functools.partial(self._start_late, local_rank, spawn)
                    call_off = self._standbys.wait_for(spawn.environment, start_late)
                    if call_off is not None:
                        self._awaited[local_rank] = call_off
                        self._empty.clear()
                        return
            self._start_from(standby, local_rank, spawn)
        except OSError as error:
            raise CannotStart(_cannot_start(spawn, error)) from error

    def kill_one(self, local_rank: int) -> None:
        worker = self._alive.get(local_rank)
        if worker is None:
            self._call_off([local_rank], signal.SIGKILL)
        else:
            self._beginning.discard(local_rank)
            _signal_group(worker.process.pid, signal.SIGKILL)

    def runs(self, local_rank: int) -> bool:
        return local_rank in self._alive or local_rank in self._awaited

    def _start_late(self, local_rank: int, spawn: Spawn, standby: Standby | None) -> None:
        self._awaited.pop(local_rank, None)
        try:
            self._start_from(standby, local_rank, spawn)
        except OSError as error:
            log.error("%s", _cannot_start(spawn, error))
            self._tell_end(Ended(local_rank, 0, CANNOT_RUN, time.time(), b""))

    def _start_from(self, standby: Standby | None, local_rank: int, spawn: Spawn) -> None:
        tail = Tail(*(o.file for o in spawn.outlets if o.file is not None and o.console is None))
        descriptors: list[int] = []
        streams: list[Stream] = []
        try:
            try:
                for outlet in spawn.outlets:
                    descriptor, stream = self._output.open(outlet, spawn.prefix, tail)
                    descriptors.append(descriptor)
                    streams += [stream] if stream is not None else []
            except OSError:
                if standby is not None and self._standbys is not None:
                    self._standbys.discard(standby)
                raise
            if standby is not None:
                self._alive[local_rank] = _Worker(standby, standby.pidfd, streams, tail)
                self._empty.clear()
                self._begin(local_rank, spawn, standby, descriptors)
                return
            process = subprocess.Popen(
                spawn.command,
                env=spawn.environment,
                stdin=stdin(),
                stdout=descriptors[0],
                stderr=descriptors[1],
                process_group=0,
                preexec_fn=die_with_agent(os.getpid()),
            )
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        self._alive[local_rank] = _Worker(process, self._pidfd_of(process, streams), streams, tail)
        self._empty.clear()
        self._watch(local_rank)

    def _pidfd_of(self, process: subprocess.Popen[bytes], streams: list[Stream]) -> int:
        try:
            return os.pidfd_open(process.pid)
        except OSError:  # too many open files: a process that is not watched must not run
            _signal_group(process.pid, signal.SIGKILL)
            process.wait()
            self._output.collect(streams)
            raise

    def _watch(self, local_rank: int) -> None:
        self._loop.add_reader(self._alive[local_rank].pidfd, self._ended, local_rank)

    def _begin(self, local_rank: int, spawn: Spawn, standby: Standby, streams: Sequence[int]) -> None:
        def begun() -> None:
            self._beginning.discard(local_rank)
            log.info("local rank %d began in a standby (pid %d)", local_rank, standby.pid)
            self._watch(local_rank)

        def lost(returncode: int) -> None:
            worker = self._alive.pop(local_rank)
            self._output.collect(worker.streams)
            if local_rank not in self._beginning or self._asked is not None:
                self._tell_end(Ended(local_rank, standby.pid, returncode, time.time(), worker.tail.read()))
                return
            self._beginning.discard(local_rank)
            log.warning("a standby (pid %d) was lost; local rank %d starts from scratch", standby.pid, local_rank)
            self._start_late(local_rank, spawn, None)

        self._beginning.add(local_rank)
        assert self._standbys is not None
        self._standbys.begin(standby, spawn.command, spawn.environment, streams, begun, lost)

    def pass_on(self, number: int) -> None:
        """Send a signal to every process, but not to its children, as data loaders must live until the last save."""
        for worker in self._alive.values():
            if worker.fallen:
                _signal_group(worker.process.pid, number)
            else:  # by its pidfd: Popen would reap a dead process, and another one could get its group's number
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    signal.pidfd_send_signal(worker.pidfd, number)

    async def stop(self, grace: float, number: int = signal.SIGTERM) -> None:
        """Send signal `number` to all, and SIGKILL after `grace` s. Returns when all and their children are gone."""
        self._asked = number
        self.pass_on(number)
        self._call_off(list(self._awaited), number)
        try:
            async with asyncio.timeout(grace):
                await self._empty.wait()
        except TimeoutError:
            self.kill()
            await self._empty.wait()

    def kill(self) -> None:
        self._beginning.clear()
        self._call_off(list(self._awaited), signal.SIGKILL)
        for worker in self._alive.values():
            _signal_group(worker.process.pid, signal.SIGKILL)

    def _call_off(self, local_ranks: list[int], number: int) -> None:
        """For each of `local_ranks` that waits for a standby, cancel the wait and report an end by signal `number`."""
        for local_rank in local_ranks:
            call_off = self._awaited.get(local_rank)
            if call_off is not None:
                call_off()
                self._awaited[local_rank] = lambda: None
                self._loop.call_soon(self._never_began, local_rank, number)

    def _never_began(self, local_rank: int, number: int) -> None:
        if self._awaited.pop(local_rank, None) is not None:
            self._tell_end(Ended(local_rank, 0, -number, time.time(), b""))

    def _ended(self, local_rank: int) -> None:
        """Handle the end of the process that is watched for a local rank.

        If the stop signal ended a training process, the rest of its process group gets the signal too and is watched.
        The end of the local rank is then reported only when no process of the group is left.
        """
        worker = self._alive[local_rank]
        self._loop.remove_reader(worker.pidfd)
        os.close(worker.pidfd)
        if self._asked is not None and not worker.fallen and _fell_to(self._asked, worker.process.pid):
            worker = worker._replace(fallen=True)
            _signal_group(worker.process.pid, self._asked)
        pidfd = _rest_of_group(worker.process.pid) if worker.fallen else None
        if pidfd is None:
            self._over(local_rank, worker)
            return
        self._alive[local_rank] = worker._replace(pidfd=pidfd)
        self._watch(local_rank)

    def _over(self, local_rank: int, worker: _Worker) -> None:
        del self._alive[local_rank]
        # Before its pid is free again, so that no other process can have it yet.
        _signal_group(worker.process.pid, signal.SIGKILL)
        returncode, at = worker.process.wait(), time.time()
        self._output.collect(worker.streams)
        self._tell_end(Ended(local_rank, worker.process.pid, returncode, at, worker.tail.read()))

    def _tell_end(self, ended: Ended) -> None:
        if not self.alive:
            self._empty.set()
        self._on_end(ended)


def _cannot_start(spawn: Spawn, error: OSError) -> str:
    why = os.strerror(error.errno or 0)
    return f"cannot start {spawn.command[0]}: {why[:1].lower()}{why[1:]}"


def stdin() -> int | None:
    """What training processes get as stdin: the agent's stdin (None), or /dev/null if the agent's is a terminal."""
    # The kernel silently stops a background process group that reads from its terminal.
    terminal = sys.__stdin__ is not None and not sys.__stdin__.closed and sys.__stdin__.isatty()
    return subprocess.DEVNULL if terminal else None


def _signal_group(group: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):  # gone already, or another user's by now
        os.killpg(group, number)


def _fell_to(number: int, pid: int) -> bool:
    """True if child `pid` died of signal `number`, or exited with 128 + `number`, as shells do. Does not reap."""
    end = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    if end is None:
        return False
    return end.si_status == (128 + number if end.si_code == os.CLD_EXITED else number)


def _rest_of_group(group: int) -> int | None:
    """A pidfd of any living process of a process group; None if no process of it lives. Reads all of /proc."""
    for pid in (int(name) for name in os.listdir("/proc") if name.isdigit()):
        if _lives_in(group, pid):
            with contextlib.suppress(ProcessLookupError):
                pidfd = os.pidfd_open(pid)
                if _lives_in(group, pid):  # still there, so the descriptor is of no other process
                    return pidfd
                os.close(pidfd)
    return None


def _lives_in(group: int, pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            state, _, in_group, *_ = file.read().rpartition(b")")[2].split()
    except OSError:
        return False
    return state not in (b"Z", b"X") and int(in_group) == group
