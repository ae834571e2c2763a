"""What every benchmark stands on: rows of the table, a place to work in, real jobs, and a way to ask their masters.

Everything runs under one temporary directory. What a benchmark starts names that directory in its command line, so at
the end whatever is left of it is found and ended by its pid, and nothing else is touched.
"""

from __future__ import annotations

import contextlib
import math
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Self, TypeVar

import msgspec

from resile.client.local.master_client import MasterClient, MasterUnreachable
from resile.protocol.commands import Events, Status
from resile.wire.job_directory import JobDirectory

BIN = Path(sys.executable).parent
PATIENCE = 60.0
"""Seconds that anything may take before a benchmark gives up on it."""


class GaveUp(Exception):
    """Something did not happen in time, so there is no figure; the text is one sentence."""


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the table. A figure passes when it is not above its bar."""

    measure: str
    value: float
    unit: str = ""
    bar: float | None = None
    median: float | None = None
    """Where `value` is the longest of several."""
    peer: float | None = None
    """The same measure of the peer that the table names."""
    others: dict[str, float] = {}
    """The same measure of further peers, by their names: each has a column of its own."""
    unfinished: tuple[str, ...] = ()
    """Peers that had not come to an end when their figure was reached: it is a lower bound."""
    note: str = ""

    @property
    def passed(self) -> bool | None:
        """Whether the bar is met; None where there is none."""
        return None if self.bar is None else self.value <= self.bar

    @property
    def ratio(self) -> float | None:
        """How many times our figure the peer's is."""
        return None if self.peer is None or self.value <= 0 else self.peer / self.value


def say(words: str) -> None:
    """Say on standard error what is being done."""
    sys.stderr.write(f"{time.strftime('%H:%M:%S')}  {words}\n")
    sys.stderr.flush()


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least this share of the values does not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def listed(seconds: Sequence[float], digits: int = 2) -> str:
    """All samples of a figure, as a note says them."""
    return ", ".join(f"{each:.{digits}f}" for each in seconds) + " s"


T = TypeVar("T")


def wait_for(what: str, found: Callable[[], T | None], seconds: float = PATIENCE, every: float = 0.005) -> T:
    """Look until `found` gives something true, and return that.

    Raises:
        GaveUp: it did not within `seconds`.
    """
    until = time.monotonic() + seconds
    while True:
        got = found()
        if got:
            return got
        if time.monotonic() > until:
            raise GaveUp(f"{what} did not happen within {seconds:g} s")
        time.sleep(every)


def file_limit() -> int:
    """How many files the system lets one process open, if the process asks for it."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[1]


def free_port() -> int:
    """A port without a listener."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


# processes ------------------------------------------------------------------------------------------------------------


def cpu_seconds(pid: int) -> float:
    """User and system time that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def memory_mb(pid: int, field: str) -> float:
    """A line of /proc/PID/status, such as VmRSS (now) or VmHWM (the most it ever was), in MB."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(field)).split()[1]) / 1024


def descendants(pid: int) -> list[int]:
    """A process and everything it started that has not lost its parent."""
    children: dict[int, list[int]] = {}
    for entry in _processes():
        with contextlib.suppress(OSError, IndexError, ValueError):
            parent = int(Path(f"/proc/{entry}/stat").read_text().rsplit(")", 1)[1].split()[1])
            children.setdefault(parent, []).append(entry)
    found, look = [pid], [pid]
    while look:
        born = children.get(look.pop(), [])
        found += born
        look += born
    return found


def signal_all(pids: Sequence[int], number: signal.Signals) -> None:
    """Signal processes by their pids; those that are gone do not matter."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def _processes() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def _naming(path: Path) -> list[int]:
    """Processes whose command line names something below `path`."""
    needle, found = os.fsencode(path), []
    for pid in _processes():
        with contextlib.suppress(OSError):
            if pid != os.getpid() and needle in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.append(pid)
    return found


class Workplace:
    """A temporary directory, and all processes that were started in it. Leaving it ends them and removes it."""

    def __init__(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix="resile-bench-"))
        self._started: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self._tell_logs()
        self.close()

    def script(self, name: str, text: str) -> Path:
        """Write a program."""
        path = self.path / name
        path.write_text(text)
        return path

    def start(
        self,
        command: Sequence[str | Path],
        *,
        env: Mapping[str, str] | None = None,
        stdin: int = subprocess.DEVNULL,
        stdout: int | IO[bytes] | None = None,
        stderr: int | IO[bytes] | None = None,
    ) -> subprocess.Popen[bytes]:
        """Start a process in a session of its own; what it says goes to a log unless a stream is given."""
        with open(self.path / "output.log", "ab") as log:
            process = subprocess.Popen(
                [str(word) for word in command],
                stdin=stdin,
                stdout=log if stdout is None else stdout,
                stderr=log if stderr is None else stderr,
                cwd=self.path,
                env={**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(self.path), **(env or {})},
                start_new_session=True,
            )
        self._started.append(process)
        return process

    def heard(self, words: str, seconds: float = PATIENCE) -> None:
        """Wait until a process that was started here has written this to its log.

        Raises:
            GaveUp: none did within `seconds`.
        """
        wait_for(f"'{words}'", lambda: words in (self.path / "output.log").read_text(errors="replace"), seconds, 0.1)

    def end(self, process: subprocess.Popen[bytes]) -> None:
        """Kill a process and all it started, and collect it."""
        signal_all(descendants(process.pid) if process.poll() is None else [], signal.SIGKILL)
        process.wait()
        for stream in (process.stdin, process.stdout, process.stderr):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()
        if process in self._started:
            self._started.remove(process)

    def _tell_logs(self, lines: int = 5) -> None:
        """Show the end of every log, since it is about to be removed and something went wrong."""
        for log in sorted(self.path.rglob("*.log")):
            for line in log.read_text(errors="replace").splitlines()[-lines:]:
                say(f"{log.relative_to(self.path)}: {line}")

    def close(self) -> None:
        """End everything and leave nothing behind."""
        for process in list(self._started):
            self.end(process)
        for _ in range(3):  # a supervisor may be starting a master at this very moment
            left = _naming(self.path)
            if not left:
                break
            signal_all(left, signal.SIGKILL)
            time.sleep(0.05)
        shutil.rmtree(self.path, ignore_errors=True)


# jobs -----------------------------------------------------------------------------------------------------------------


class Story:
    """Follows the story that a master tells. Times are on this machine's monotonic clock."""

    def __init__(self, directory: JobDirectory) -> None:
        self.client = MasterClient(directory)
        self._after = 0
        self._lines: list[dict[str, Any]] = []
        self._offset = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.client.close()

    def status(self, seconds: float = PATIENCE) -> dict[str, Any]:
        """What the master says of the job now."""
        answer: dict[str, Any] = msgspec.to_builtins(self.client.insist(Status(), seconds))["job"]
        return answer

    def set_clock(self, rounds: int = 20) -> float:
        """Compare the master's clock with ours by the fastest of some questions; returns by how much we may be off."""
        best = math.inf
        for _ in range(rounds):
            before = time.monotonic()
            at = self.status()["at"]
            after = time.monotonic()
            if after - before < best:
                best = after - before
                self._offset = at - (before + after) / 2
        return best / 2

    def on_our_clock(self, at: float) -> float:
        """A moment of the story as `time.monotonic` would have given it."""
        return at - self._offset

    def read(self) -> list[dict[str, Any]]:
        """All lines so far."""
        while True:
            answer = self.client.insist(Events(after=self._after))
            new: list[dict[str, Any]] = msgspec.to_builtins(answer)["events"]
            if not new:
                return self._lines
            self._lines += new
            self._after = new[-1]["number"]

    def count(self, *reasons: str) -> int:
        """How many lines have one of these reasons."""
        return sum(line["reason"] in reasons for line in self.read())

    def wait(self, reason: str, number: int = 1, seconds: float = PATIENCE) -> dict[str, Any]:
        """The line that is the `number`-th with this reason, once it is told."""

        def found() -> dict[str, Any] | None:
            lines = [line for line in self.read() if line["reason"] == reason]
            return lines[number - 1] if len(lines) >= number else None

        return wait_for(f"'{reason}' number {number}", found, seconds)


class Run:
    """`resile run` on several "machines" of one job: agents that meet at one endpoint of this machine."""

    def __init__(self, place: Workplace, nnodes: str, flags: Sequence[str | Path]) -> None:
        """`flags` end with the script and its arguments."""
        self._place = place
        self._port = free_port()
        self._state = place.path / f"state-{self._port}"
        self._words = ["--nnodes", nnodes, "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{self._port}"]
        self._words += ["--rdzv-id", f"bench-{self._port}", "--state-dir", str(self._state), *map(str, flags)]

    def agent(self, env: Mapping[str, str] | None = None) -> subprocess.Popen[bytes]:
        """Start one more agent; the first also starts the master."""
        return self._place.start([BIN / "resile", "run", *self._words], env=env)

    def story(self) -> Story:
        """The master's story, once there is a master."""

        def announced() -> JobDirectory | None:
            for path in (self._state / "runs").glob("*/master.json"):
                return JobDirectory(path.parent)
            return None

        return Story(wait_for("the master's start", announced))


def load(place: Workplace) -> list[subprocess.Popen[bytes]]:
    """One busy process per core at normal priority; end each with `place.end`."""
    busy = place.script("busy.py", "while True:\n    pass\n")
    return [place.start([sys.executable, busy]) for _ in range(os.cpu_count() or 1)]


@contextlib.contextmanager
def asking(directory: JobDirectory) -> Iterator[Story]:
    """The story of a master that was started by hand, once it answers."""
    with Story(directory) as story:
        try:
            story.status()
        except MasterUnreachable as error:
            raise GaveUp(f"the master does not answer: {error}") from None
        yield story
