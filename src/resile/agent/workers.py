"""The training processes of one node in one round: started together, watched by pidfd, stopped together.

The end of a process is known within a millisecond (its pidfd becomes readable; nothing polls). A process and
whatever it forked form a process group, so stopping it leaves nothing behind; the agent's own death ends it too.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import subprocess
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO

from resile.agent.output import Output, Stream

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


class Ended:
    """How one process ended."""

    __slots__ = ("at", "local_rank", "pid", "returncode", "tail")

    def __init__(self, local_rank: int, pid: int, returncode: int, at: float, tail: bytes) -> None:
        self.local_rank = local_rank
        self.pid = pid
        self.returncode = returncode
        self.at = at
        self.tail = tail

    @property
    def well(self) -> bool:
        """Whether it ended as it should."""
        return self.returncode == 0


class Spawn:
    """What one process is started with."""

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        stdout: Sequence[IO[bytes]],
        stderr: Sequence[IO[bytes]],
        prefix: bytes = b"",
    ) -> None:
        self.command = command
        self.environment = environment
        self.stdout = stdout
        self.stderr = stderr
        self.prefix = prefix


class _Worker:
    def __init__(self, process: subprocess.Popen[bytes], pidfd: int, streams: list[Stream], tail: deque[bytes]) -> None:
        self.process = process
        self.pidfd = pidfd
        self.streams = streams
        self.tail = tail


class CannotStart(Exception):
    """A process could not be started; the text is one sentence."""


class WorkerGroup:
    """All training processes of this node in one round."""

    def __init__(self, output: Output, on_end: Callable[[Ended], None]) -> None:
        self._output = output
        self._on_end = on_end
        self._alive: dict[int, _Worker] = {}
        self._loop = asyncio.get_running_loop()
        self._empty = asyncio.Event()
        self._empty.set()

    @property
    def alive(self) -> int:
        """How many processes run."""
        return len(self._alive)

    @property
    def pids(self) -> dict[int, int]:
        """The pid of each local rank that runs."""
        return {rank: worker.process.pid for rank, worker in self._alive.items()}

    def start(self, spawns: Sequence[Spawn]) -> None:
        """Start one process per entry, local rank 0 first.

        Raises:
            CannotStart: the program cannot be run; those already started are killed.
        """
        try:
            for local_rank, spawn in enumerate(spawns):
                self._start(local_rank, spawn)
        except OSError as error:
            self.kill()
            why = os.strerror(error.errno or 0)
            raise CannotStart(f"cannot start {spawns[0].command[0]}: {why[:1].lower()}{why[1:]}") from error

    def _start(self, local_rank: int, spawn: Spawn) -> None:
        tail: deque[bytes] = deque()
        out_read, out_write = os.pipe()
        err_read, err_write = os.pipe()
        try:
            process = subprocess.Popen(
                spawn.command,
                env=spawn.environment,
                stdout=out_write,
                stderr=err_write,
                process_group=0,
                preexec_fn=_die_with_parent,
            )
        except BaseException:
            os.close(out_read)
            os.close(err_read)
            raise
        finally:
            os.close(out_write)
            os.close(err_write)
        streams = [
            self._output.add(out_read, spawn.stdout, spawn.prefix, tail),
            self._output.add(err_read, spawn.stderr, spawn.prefix, tail),
        ]
        pidfd = os.pidfd_open(process.pid)
        self._alive[local_rank] = _Worker(process, pidfd, streams, tail)
        self._empty.clear()
        self._loop.add_reader(pidfd, self._ended, local_rank)

    def signal(self, number: int) -> None:
        """Send a signal to every process, but not to what they forked: a data loader must live until the last save."""
        for worker in self._alive.values():
            worker.process.send_signal(number)

    async def stop(self, grace: float) -> None:
        """SIGTERM, and after `grace` seconds SIGKILL; returns when all are gone."""
        self.signal(signal.SIGTERM)
        await self.gone(grace)

    async def gone(self, grace: float) -> None:
        """Wait for all processes to end; after `grace` seconds they are killed."""
        try:
            async with asyncio.timeout(grace):
                await self._empty.wait()
        except TimeoutError:
            self.kill()
            await self._empty.wait()

    def kill(self) -> None:
        """SIGKILL to every process and what it forked."""
        for worker in self._alive.values():
            _kill_group(worker.process.pid)

    def _ended(self, local_rank: int) -> None:
        worker = self._alive.pop(local_rank)
        at = time.time()
        self._loop.remove_reader(worker.pidfd)
        os.close(worker.pidfd)
        returncode = worker.process.wait()
        _kill_group(worker.process.pid)
        self._output.collect(worker.streams)
        if not self._alive:
            self._empty.set()
        self._on_end(Ended(local_rank, worker.process.pid, returncode, at, b"".join(worker.tail)))


def _die_with_parent() -> None:
    """Runs in the new process before the program: if the agent dies, so does it."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _kill_group(group: int) -> None:
    try:
        os.killpg(group, signal.SIGKILL)
    except ProcessLookupError:
        return  # all gone already, which is what was wanted


class LogFiles:
    """The files that `--redirects` and `--tee` ask for: DIR/RUN_ID/attempt_N/LOCAL_RANK/stdout.log, as torchrun's."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._open: list[IO[bytes]] = []

    def attempt(self, number: int, local_rank: int) -> Path:
        """The directory of one process, made if need be."""
        path = self._directory / f"attempt_{number}" / str(local_rank)
        path.mkdir(parents=True, exist_ok=True)
        return path

    def open(self, path: Path) -> IO[bytes]:
        """A file to append to; closed by `close`."""
        file = path.open("ab", buffering=0)
        self._open.append(file)
        return file

    def close(self) -> None:
        """Close all files."""
        for file in self._open:
            file.close()
        self._open.clear()
