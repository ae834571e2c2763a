"""Training processes start together, are seen to end within milliseconds, and leave nothing behind."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from resile.agent.workers.output import Output
from resile.agent.workers.worker_group import CannotStart, Ended, Spawn, WorkerGroup


@pytest.fixture
def output() -> Iterator[Output]:
    output = Output()
    yield output
    output.close()


def python(text: str) -> Spawn:
    return Spawn([sys.executable, "-Suc", text], dict(os.environ))


async def until(found: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not found():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.005)


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


async def test_ends_are_told_with_code_signal_and_last_words(output: Output) -> None:
    ends: list[Ended] = []
    group = WorkerGroup(output, ends.append)
    group.start(
        [
            python("print('well')"),
            python("import sys; sys.stderr.write('badly'); sys.exit(3)"),
            python("import os; os.kill(os.getpid(), 9)"),
        ]
    )
    assert group.alive == 3
    await until(lambda: group.alive == 0)
    found = {ended.local_rank: (ended.returncode, ended.tail) for ended in ends}
    assert found == {0: (0, b"well\n"), 1: (3, b"badly"), 2: (-signal.SIGKILL, b"")}


async def test_a_killed_process_is_noticed_at_once(output: Output, tmp_path: Path) -> None:
    ends: list[Ended] = []
    group = WorkerGroup(output, ends.append)
    waits = []
    for number in range(5):
        group.start(
            [python(f"import os, time; os.symlink(str(os.getpid()), '{tmp_path / str(number)}'); time.sleep(60)")]
        )
        await until((tmp_path / str(number)).is_symlink)
        killed = time.time()
        os.kill(int(os.readlink(tmp_path / str(number))), signal.SIGKILL)
        await until(lambda: group.alive == 0)
        waits.append(ends[-1].at - killed)
    assert min(waits) < 0.05


async def test_stopping_ends_those_that_ignore_it_and_what_they_forked(output: Output, tmp_path: Path) -> None:
    child = tmp_path / "child"
    text = (
        "import os, signal, time\nsignal.signal(15, signal.SIG_IGN)\npid = os.fork()\n"
        f"if pid: os.symlink(str(pid), {str(child)!r})\n"
        "while True: time.sleep(1)\n"
    )
    group = WorkerGroup(output, lambda _: None)
    group.start([python(text)])
    await until(child.is_symlink)
    began = time.monotonic()
    await group.stop(0.2)
    assert time.monotonic() - began >= 0.2
    assert group.alive == 0
    await until(lambda: gone(int(os.readlink(child))))


SAVES = """
import os, signal, sys, time
def save(number, frame):
    time.sleep(0.5)
    os.symlink(str(number), sys.argv[1] + "/saved")
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
os.symlink(str(os.getpid()), sys.argv[1] + "/started")
while True:
    time.sleep(1)
"""


@pytest.mark.parametrize("says", ["", "trap 'exit 143' TERM;"], ids=["dies of it", "says so in its exit code"])
async def test_a_program_behind_a_shell_is_signalled_and_has_the_time_to_save(
    output: Output, tmp_path: Path, says: str
) -> None:
    ends: list[Ended] = []
    group = WorkerGroup(output, ends.append)
    (tmp_path / "saves.py").write_text(SAVES)
    line = f"{says} {sys.executable} -Su {tmp_path}/saves.py {tmp_path} & wait; echo never"
    group.start([Spawn(["bash", "-c", line], dict(os.environ))])
    await until((tmp_path / "started").is_symlink)
    began = time.monotonic()
    await group.stop(20)
    assert os.readlink(tmp_path / "saved") == str(int(signal.SIGTERM))
    assert time.monotonic() - began < 10, "nobody waits longer than it takes to save"
    assert [ended.returncode for ended in ends] == [143 if says else -signal.SIGTERM]
    assert gone(int(os.readlink(tmp_path / "started")))


async def test_what_a_shell_leaves_behind_is_killed_when_the_time_is_up(output: Output, tmp_path: Path) -> None:
    group = WorkerGroup(output, lambda _: None)
    (tmp_path / "saves.py").write_text(SAVES.replace("0.5", "60"))
    group.start([Spawn(["bash", "-c", f"{sys.executable} -Su {tmp_path}/saves.py {tmp_path}; true"], dict(os.environ))])
    await until((tmp_path / "started").is_symlink)
    began = time.monotonic()
    await group.stop(0.3)
    assert 0.3 <= time.monotonic() - began < 10
    assert group.alive == 0
    await until(lambda: gone(int(os.readlink(tmp_path / "started"))))


async def test_a_process_behind_a_shell_that_dies_unasked_has_no_time(output: Output, tmp_path: Path) -> None:
    group = WorkerGroup(output, lambda _: None)
    (tmp_path / "saves.py").write_text(SAVES)
    group.start([Spawn(["bash", "-c", f"{sys.executable} -Su {tmp_path}/saves.py {tmp_path} & kill $$"], {})])
    await until(lambda: group.alive == 0)
    assert not (tmp_path / "saved").is_symlink()


async def test_a_group_that_may_not_be_signalled_does_not_hide_the_end(
    output: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(group: int, number: int) -> None:
        raise PermissionError

    monkeypatch.setattr("resile.agent.workers.worker_group.os.killpg", refuse)
    ends: list[Ended] = []
    group = WorkerGroup(output, ends.append)
    group.start([python("raise SystemExit(4)")])
    await until(lambda: group.alive == 0)
    assert [ended.returncode for ended in ends] == [4]


async def test_a_program_that_cannot_run_takes_back_what_was_started(output: Output) -> None:
    before = len(os.listdir("/proc/self/fd"))
    group = WorkerGroup(output, lambda _: None)
    with pytest.raises(CannotStart, match="no such file or directory"):
        group.start([python("import time; time.sleep(60)"), Spawn(["/no/such/program"], {})])
    await until(lambda: group.alive == 0)
    await until(lambda: len(os.listdir("/proc/self/fd")) == before)


async def test_a_process_that_cannot_be_watched_does_not_run(output: Output, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[int] = []

    def refuse(pid: int) -> int:
        tried.append(pid)
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    group = WorkerGroup(output, lambda _: None)
    monkeypatch.setattr(os, "pidfd_open", refuse)
    with pytest.raises(CannotStart, match="too many open files"):
        group.start_one(0, python("import time; time.sleep(60)"))
    assert [gone(pid) for pid in tried] == [True]
    assert group.alive == 0


async def test_standbys_that_cannot_be_had_take_back_what_was_started(output: Output) -> None:
    class Broken:
        """Has no process for the first start, which is a cold one, and fails at the second."""

        def __init__(self) -> None:
            self.asked = 0

        def take(self, environment: object) -> None:
            self.asked += 1
            if self.asked > 1:
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

        def wait_for(self, environment: object, start_late: object) -> None: ...

    group = WorkerGroup(output, lambda _: None, Broken())  # type: ignore[arg-type]
    with pytest.raises(CannotStart, match="too many open files"):
        group.start([python("import time; time.sleep(60)")] * 2)
    await until(lambda: group.alive == 0)


async def test_processes_die_with_their_agent(tmp_path: Path) -> None:
    """The agent is a process of its own here, killed with SIGKILL."""
    note = tmp_path / "pid"
    text = (
        "import asyncio, os, sys\n"
        "from resile.agent.workers.output import Output\n"
        "from resile.agent.workers.worker_group import Spawn, WorkerGroup\n"
        "async def main():\n"
        "    group = WorkerGroup(Output(), print)\n"
        f"    text = \"import os, time; os.symlink(str(os.getpid()), '{note}'); time.sleep(60)\"\n"
        "    group.start([Spawn([sys.executable, '-Sc', text], dict(os.environ))])\n"
        "    await asyncio.sleep(60)\n"
        "asyncio.run(main())\n"
    )
    agent = await asyncio.create_subprocess_exec(sys.executable, "-c", text)
    await until(note.is_symlink)
    agent.kill()
    await agent.wait()
    await until(lambda: gone(int(os.readlink(note))))
