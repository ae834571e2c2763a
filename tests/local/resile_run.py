"""Real `resile run` commands for tests: started with a state directory of their own, and never left behind."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from resile.agent.workers.ports import free_port
from resile.api.job_view import JobEvent
from resile.core.engine import Engine
from resile.core.state import JobState
from resile.master.journal.sqlite import SQLiteJournal

RESILE = str(Path(sys.executable).parent / "resile")
PATIENCE = 60.0
LINES = 80  # of what a command wrote, shown if its test fails

T = TypeVar("T")

PROBE = '''
import json, os, sys, time

HERE = os.path.dirname(os.path.abspath(__file__))
RANK = int(os.environ.get("RANK", "-1"))
ATTEMPT = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "-1"))


def note(what, **more):
    """Append one line to the log that the test reads."""
    line = {"what": what, "rank": RANK, "world": int(os.environ.get("WORLD_SIZE", "0")), "pid": os.getpid(),
            "attempt": ATTEMPT, "agent": os.getppid(), "at": time.time(), **more}
    with open(os.path.join(HERE, "notes"), "a") as file:
        file.write(json.dumps(line) + "\\n")


def there(name):
    return os.path.exists(os.path.join(HERE, name))


def wait_for(name):
    while not there(name):
        time.sleep(0.01)
'''

UNTIL_RELEASED = """
from probe import *
note("start", round=int(os.environ["RESILE_ROUND"]), group=int(os.environ["GROUP_RANK"]))
wait_for("release")
note("end")
"""


def wait_until(found: Callable[[], T], what: str, patience: float = PATIENCE) -> T:
    """The first true value of `found`; fails with `what` after `patience` seconds."""
    deadline = time.monotonic() + patience
    while True:
        value = found()
        if value:
            return value
        assert time.monotonic() < deadline, f"waited {patience:g} s in vain for: {what}"
        time.sleep(0.01)


def alive(pid: int) -> bool:
    """Whether a process is there and not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def kill(pid: int, number: int = signal.SIGKILL) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


class Run:
    """One `resile run` command."""

    def __init__(self, process: subprocess.Popen[bytes], out: Path, err: Path) -> None:
        self.process = process
        self.pid = process.pid
        self._out, self._err = out, err

    @property
    def name(self) -> str:
        return self._err.name

    @property
    def out(self) -> str:
        return self._out.read_text(errors="replace")

    @property
    def err(self) -> str:
        return self._err.read_text(errors="replace")

    @property
    def running(self) -> bool:
        return self.process.poll() is None

    def signal(self, number: int) -> None:
        kill(self.pid, number)

    def wait(self, patience: float = PATIENCE) -> int:
        try:
            return self.process.wait(patience)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"it did not end within {patience:g} s; its stderr:\n{self.err}") from None

    def says(self, words: str, patience: float = PATIENCE) -> None:
        wait_until(lambda: words in self.err, f"{words!r} on stderr; it says:\n{self.err}", patience)


class Runs:
    """All commands of one test, the notes of their scripts and the jobs' directories."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.state = directory / "state"
        self.port = free_port()
        self._runs: list[Run] = []
        (directory / "probe.py").write_text(PROBE)

    def script(self, text: str, name: str = "train.py") -> str:
        path = self.directory / name
        path.write_text(text)
        return str(path)

    def start(self, *words: str, env: dict[str, str] | None = None, **more: Any) -> Run:
        """Start `resile run WORDS`."""
        number = len(self._runs)
        out, err = self.directory / f"{number}.out", self.directory / f"{number}.err"
        with out.open("wb") as stdout, err.open("wb") as stderr:
            process = subprocess.Popen(
                [RESILE, "run", *words],
                **{"stdout": stdout, "stderr": stderr, "stdin": subprocess.DEVNULL, "cwd": self.directory, **more},
                env=os.environ | {"RESILE_STATE_DIR": str(self.state), "TMPDIR": str(self.temp)} | (env or {}),
            )
        run = Run(process, out, err)
        self._runs.append(run)
        return run

    def run(self, *words: str, env: dict[str, str] | None = None) -> Run:
        """Run `resile run WORDS` to its end."""
        run = self.start(*words, env=env)
        run.wait()
        return run

    def node(self, *words: str, nnodes: str = "2:3", env: dict[str, str] | None = None) -> Run:
        """Start one of several nodes that meet at this test's port."""
        endpoint = f"127.0.0.1:{self.port}"
        return self.start(f"--nnodes={nnodes}", f"--rdzv-endpoint={endpoint}", *words, env=env)

    @property
    def temp(self) -> Path:
        path = self.directory / "tmp"
        path.mkdir(exist_ok=True)
        return path

    # what scripts say ----------------------------------------------------------------------------------------------

    def notes(self, what: str | None = None) -> list[dict[str, Any]]:
        try:
            text = (self.directory / "notes").read_text()
        except FileNotFoundError:
            return []
        whole = text[: text.rfind("\n") + 1]  # the last line may be on its way
        notes = [json.loads(line) for line in whole.splitlines()]
        return [note for note in notes if what is None or note["what"] == what]

    def await_world(self, world: int, after: int = 0) -> dict[int, dict[str, Any]]:
        """The first complete round of that size whose number is above `after`: its starts by rank."""

        def complete() -> dict[int, dict[str, Any]]:
            rounds: dict[int, dict[int, dict[str, Any]]] = {}
            for note in self.notes("start"):
                if note["world"] == world and note["round"] > after:
                    rounds.setdefault(note["round"], {})[note["rank"]] = note
            return next((starts for _, starts in sorted(rounds.items()) if len(starts) == world), {})

        return wait_until(complete, f"a round with {world} processes after round {after}; heard: {self.notes()}")

    def release(self, name: str = "release") -> None:
        (self.directory / name).touch()

    # the master ----------------------------------------------------------------------------------------------------

    @property
    def job(self) -> Path:
        """The directory of the one job of this test that has had a master."""
        (announced,) = (self.state / "runs").glob("*/master.json")
        return announced.parent

    def living_master(self, other_than: int = 0) -> int:
        """The pid of the master that lives now; 0 if none does."""
        try:
            pid = int(json.loads((self.job / "master.json").read_text())["pid"])
        except (OSError, ValueError):
            return 0
        return pid if pid != other_than and alive(pid) else 0

    def master(self, other_than: int = 0) -> int:
        """The pid of the living master, as soon as there is one."""
        return wait_until(lambda: self.living_master(other_than), "a master")

    def supervisor(self) -> int:
        return parent_of(self.master())

    @property
    def master_log(self) -> str:
        return (self.job / "master.log").read_text()

    def ledger(self) -> JobState:
        journal = SQLiteJournal(self.job / "journal.db", read_only=True)
        history = journal.load()
        journal.close()
        assert history is not None
        return Engine.replay(history.state, history.events).state

    def story(self, reason: str | None = None) -> list[JobEvent]:
        journal = SQLiteJournal(self.job / "journal.db", read_only=True)
        lines = journal.story()
        journal.close()
        return [line for line in lines if reason is None or line.reason == reason]

    # the end -------------------------------------------------------------------------------------------------------

    def left_over(self) -> dict[int, str]:
        """Living processes of this test: each has its directory among its words, its variables or its cwd."""
        found: dict[int, str] = {}
        mark = str(self.directory).encode()
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and int(entry.name) != os.getpid() and alive(int(entry.name)):
                with contextlib.suppress(OSError):
                    words = (entry / "cmdline").read_bytes()
                    if mark in words or mark in (entry / "environ").read_bytes():
                        found[int(entry.name)] = words.replace(b"\0", b" ").decode(errors="replace").strip()
        return found

    def nothing_is_left(self, patience: float = 10.0) -> None:
        wait_until(lambda: not self.left_over(), f"the end of {self.left_over()}", patience)

    def close(self) -> None:
        for run in self._runs:
            if run.running:
                kill(run.pid, signal.SIGCONT)
                kill(run.pid)
            run.process.wait(PATIENCE)
            for pipe in (run.process.stdout, run.process.stderr):
                if pipe is not None:
                    pipe.close()
        while found := self.left_over():
            for pid in found:
                kill(pid)
            time.sleep(0.02)
        for run in self._runs:  # pytest shows this with a failed test alone
            print(f"the last lines of {run.name}:", *run.err.splitlines()[-LINES:], sep="\n")


@contextlib.contextmanager
def opened(directory: Path) -> Iterator[Runs]:
    runs = Runs(directory)
    try:
        yield runs
    finally:
        runs.close()
