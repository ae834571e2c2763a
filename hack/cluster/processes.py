"""The cluster's long-running programs: started once, remembered by pid and start time, ended by nothing else.

A pid alone may belong to somebody else by the time it is used; a pid together with the start time the kernel gives it
cannot, until the machine restarts, and then the record says so by its boot id. The record also holds a fingerprint of
the command and its configuration: `ensure` leaves a program alone that runs as it should and restarts any other.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from console import ClusterError, tail
from settings import COMPONENT_DEADLINE, POLL, STATE, STOP_DEADLINE

RECORDS = STATE / "processes"
LOGS = STATE / "logs"
LOG_LIMIT = 64 * 1024 * 1024
SPARING = {"GOGC": "400"}
"""Go's garbage collector runs a fourth as often: the cluster takes more memory, and less of the tests' cores."""


@dataclass(frozen=True)
class Process:
    """A process that was alive when this was made: its pid and when the kernel started it, in ticks since boot."""

    pid: int
    started: int

    @classmethod
    def of(cls, pid: int) -> Process | None:
        """Return the process that has this pid now; zombies count as gone."""
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            return None
        # The first thread of a killed process may be a zombie while others still hold its ports.
        ended = fields[0] in "ZX" and int(fields[17]) <= 1
        return None if ended else cls(pid, int(fields[19]))

    def alive(self) -> bool:
        """Say whether this very process (not another with its pid) still runs."""
        return Process.of(self.pid) == self

    def handles(self, number: signal.Signals) -> bool:
        """Say whether this process has a handler for a signal; one that is just being started has none yet."""
        try:
            status = Path(f"/proc/{self.pid}/status").read_text()
        except OSError:
            return False
        caught = int(status.partition("SigCgt:")[2].split()[0], 16)
        return bool(caught >> (number - 1) & 1)

    def send(self, number: signal.Signals) -> None:
        """Send a signal, if this very process is still there."""
        if self.alive():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)


@dataclass(frozen=True)
class Program:
    """A program of the cluster and how it should run.

    Attributes:
        name: unique; names the record and the log.
        command: the command line.
        files: configuration the program reads at start only; a change in them is a reason to restart it.
        healthy: asks whether the program does its work; must not block for long.
    """

    name: str
    command: tuple[str, ...]
    healthy: Callable[[], bool]
    files: tuple[Path, ...] = field(default=())

    @property
    def log(self) -> Path:
        """Where the program writes what it has to say."""
        return LOGS / f"{self.name}.log"

    @property
    def record(self) -> Path:
        """Where its pid is remembered."""
        return RECORDS / f"{self.name}.json"

    def fingerprint(self) -> str:
        """Return a digest of the command, of what its environment gets, and of the configuration files."""
        digest = hashlib.sha256("\0".join((*self.command, *SPARING, *SPARING.values())).encode())
        for path in self.files:
            digest.update(path.read_bytes())
        return digest.hexdigest()


@dataclass(frozen=True)
class Record:
    """What is remembered of a started program."""

    pid: int
    started: int
    boot: str
    fingerprint: str


def ensure(program: Program) -> bool:
    """Start a program unless it runs with this very command and configuration; return whether it was started."""
    record = _read(program.record)
    if record is not None:
        if record.fingerprint == program.fingerprint():
            return False
        stop([program.name])
    LOGS.mkdir(parents=True, exist_ok=True)
    RECORDS.mkdir(parents=True, exist_ok=True)
    if program.log.exists() and program.log.stat().st_size > LOG_LIMIT:
        program.log.rename(program.log.with_suffix(".log.1"))
    with program.log.open("ab") as log:
        child = subprocess.Popen(
            program.command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            cwd="/",
            env={**os.environ, **SPARING},
        )
    started = Process.of(child.pid)
    if started is None:
        raise ClusterError(f"{program.name} ended as soon as it was started", tail(program.log))
    record = Record(started.pid, started.started, boot(), program.fingerprint())
    scratch = program.record.with_suffix(".part")
    scratch.write_text(json.dumps(asdict(record)))
    scratch.rename(program.record)
    return True


def wait_healthy(programs: Iterable[Program], deadline: float = COMPONENT_DEADLINE) -> None:
    """Return when every program does its work.

    Raises:
        ClusterError: one has ended, or is not healthy in time; its last log lines are in the detail.
    """
    end = time.monotonic() + deadline
    for program in programs:
        while not program.healthy():
            if running(program.name) is None:
                raise ClusterError(f"{program.name} ended soon after its start; log: {program.log}", tail(program.log))
            if time.monotonic() > end:
                raise ClusterError(
                    f"{program.name} did not become healthy within {deadline:.0f} s; log: {program.log}",
                    tail(program.log),
                )
            time.sleep(POLL)


def running(name: str) -> Process | None:
    """Return the process of a program, if the one that was started here is still alive."""
    record = _read(RECORDS / f"{name}.json")
    return Process(record.pid, record.started) if record else None


def recorded() -> list[str]:
    """Return the names of all programs that were started here and not stopped since, alive or not."""
    return sorted(path.stem for path in RECORDS.glob("*.json"))


def stop(names: Sequence[str]) -> None:
    """End programs that were started here: politely, and after a deadline by force; forget them when they are gone."""
    alive = [process for name in names if (process := running(name)) is not None]
    end_processes(alive)
    for name in names:
        (RECORDS / f"{name}.json").unlink(missing_ok=True)


def end_processes(processes: Sequence[Process], polite: bool = True) -> None:
    """End processes and return when they are gone.

    Raises:
        ClusterError: the kernel does not let one go (a process stuck in a system call).
    """
    if polite and not _gone_after(processes, signal.SIGTERM):
        polite = False
    if not polite and not _gone_after(processes, signal.SIGKILL):
        left = ", ".join(str(process.pid) for process in processes if process.alive())
        raise ClusterError(f"processes {left} do not end even when killed")


def _gone_after(processes: Sequence[Process], number: signal.Signals) -> bool:
    for process in processes:
        process.send(number)
    end = time.monotonic() + STOP_DEADLINE
    while any(process.alive() for process in processes):
        if time.monotonic() > end:
            return False
        time.sleep(POLL / 5)
    return True


def boot() -> str:
    """Return an id of the machine's present start."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _read(path: Path) -> Record | None:
    """Return a record whose process is alive."""
    try:
        record = Record(**json.loads(path.read_text()))
    except FileNotFoundError:
        return None
    if record.boot != boot() or not Process(record.pid, record.started).alive():
        return None
    return record
