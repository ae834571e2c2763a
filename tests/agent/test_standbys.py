"""A process that starts from a standby cannot be told from one that starts from scratch, and standbys never hurt.

What is imported ahead here is a small module that is called torch, so that none of this takes long.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from resile.agent.options import RunOptions
from resile.agent.standby import pool as standbys_module
from resile.agent.standby import standby as standby_module
from resile.agent.standby.pool import NO_STANDBYS, StandbyPool
from resile.agent.standby.preload import cold_because
from resile.agent.workers import kernel_calls
from resile.agent.workers.env import worker_environment
from resile.agent.workers.output import Outlet, Output
from resile.agent.workers.worker_group import Ended, Spawn, WorkerGroup
from resile.api.ids import Rank, Round
from resile.common.backoff import Backoff
from resile.protocol.reports import RendezvousConfig, RoundAssignment

PLACE = RoundAssignment(
    group_rank=Rank(0), group_world_size=1, first_rank=0, world_size=1, master_addr="h", master_port=5
)
PATIENCE = 60.0


@pytest.fixture
def output() -> Iterator[Output]:
    output = Output()
    yield output
    output.close()


async def until(found: Callable[[], bool], what: str = "") -> None:
    deadline = time.monotonic() + PATIENCE
    while not found():
        assert time.monotonic() < deadline, what
        await asyncio.sleep(0.005)


def children() -> set[int]:
    return {int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()}


class Node:
    """Processes of one script, started from standbys or from scratch."""

    def __init__(self, directory: Path, output: Output, script: str, *, torch: str = "", **more: Any) -> None:
        self.directory = directory
        (directory / "torch.py").write_text(torch)
        (directory / "train.py").write_text("import torch\n" + script)
        self.command = more.pop("command", (sys.executable, "-u", str(directory / "train.py"), "word"))
        self.environ = os.environ | {"TMPDIR": str(directory)} | more.pop("environ", {})
        self.options = RunOptions(
            command=self.command,
            nproc=1,
            rendezvous=RendezvousConfig(max_restarts=3),
            run_id="id",
            job_name="job",
            **{"standbys": 2, **more},
        )
        self.output = output
        self.standbys = StandbyPool(self.options, self.environ)
        self.ends: list[Ended] = []
        self.group: WorkerGroup
        self._starts = 0

    def close(self) -> None:
        self.standbys.close()

    async def warm(self, number: int = 2) -> None:
        self.standbys.warm()
        await until(lambda: self.standbys.facts.ready == number, f"{number} standbys")

    @property
    def ready(self) -> list[int]:
        return [standby.pid for standby in self.standbys._ready]

    def pid_of(self, rank: int) -> int:
        """The pid of the process that has begun as a local rank; 0 if the rank waits for one."""
        worker = self.group._alive.get(rank)
        return worker.process.pid if worker is not None else 0

    def start(self, *, warm: bool = True, environ: dict[str, str] | None = None, words: tuple[str, ...] = ()) -> int:
        """Start a process, with other words than usual if there are some; its pid."""
        self.group = WorkerGroup(self.output, self.ends.append, self.standbys if warm else None)
        self.group.start([self.spawn(environ, words)])
        return self.pid_of(0)

    def start_all(self, number: int) -> None:
        """Start so many processes together."""
        self.group = WorkerGroup(self.output, self.ends.append, self.standbys)
        self.group.start([self.spawn() for _ in range(number)])

    def said(self) -> list[str]:
        """What the processes have printed, in the order in which they were started."""
        return [(self.directory / f"stdout.{number}").read_text() for number in range(self._starts)]

    def spawn(self, environ: dict[str, str] | None = None, words: tuple[str, ...] = ()) -> Spawn:
        number, self._starts = self._starts, self._starts + 1
        environment = worker_environment(
            self.environ | (environ or {}),
            options=self.options,
            place=PLACE,
            local_rank=0,
            round_=Round(3),
            restart_count=0,
            error_file="/none",
            agent_socket="/none",
            worker="w",
        )
        files = [Outlet(self.directory / f"{name}.{number}") for name in ("stdout", "stderr")]
        command = (*self.command[:3], *words) if words else self.command
        return Spawn(command, environment, *files)

    async def run(self, **how: Any) -> tuple[int, str, str]:
        """Run a process to its end: its exit code and what it said."""
        number = self._starts
        self.start(**how)
        await until(lambda: self.group.alive == 0, "the end of a process")
        said = ((self.directory / f"{name}.{number}").read_text() for name in ("stdout", "stderr"))
        return (self.ends[-1].returncode, *said)  # type: ignore[return-value]


@pytest_asyncio.fixture
async def node(tmp_path: Path, output: Output) -> AsyncIterator[Callable[..., Node]]:
    nodes: list[Node] = []

    def make(script: str = "", **more: Any) -> Node:
        nodes.append(Node(tmp_path, output, script, **more))
        return nodes[-1]

    before = children()
    yield make

    def gone() -> bool:
        for each in nodes:
            each.close()
        return children() == before

    await until(gone, "the end of all standbys")


TELL = """
import builtins, importlib.util, json, os, random, resource, signal, sys, threading
def lines(path, *names):
    with open(path, errors="replace") as file:
        return [line for line in file if not names or line.split(":")[0] in names]
def files():
    listed = {name: f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")}
    return sorted((name, os.path.exists(path) and os.fstat(int(name)).st_mode) for name, path in listed.items()
                  if os.path.exists(path))
main = sys.modules["__main__"]
print(json.dumps({
    "environ": list(os.environ.items()),
    "proc": [lines(f"/proc/self/{name}") for name in ("cmdline", "environ", "comm")] + [os.readlink("/proc/self/exe")],
    "words": [sys.argv, sys.orig_argv, sys.executable, sys.path, list(sys.flags), sys.warnoptions, sys._xoptions],
    "main": {name: str(getattr(main, name)) for name in ("__name__", "__file__", "__doc__", "__package__",
             "__cached__", "__annotations__")} | {"same": vars(main) is globals(), "builtins": __builtins__ is builtins,
             "loader": type(__loader__).__name__, "spec": str(__spec__).replace(hex(id(__loader__)), "")[:40],
             "names": sorted(name for name in vars(main))},
    "family": [os.getppid(), os.getpgid(0) == os.getpid(), os.getsid(0)],
    "thread": threading.current_thread() is threading.main_thread(),
    "limits": [resource.getrlimit(kind) for kind in range(16)],
    "state": lines("/proc/self/status", "Umask", "SigBlk", "SigIgn", "SigCgt", "Threads", "CapEff", "Seccomp"),
    "signals": [str(signal.getsignal(number)) for number in range(1, 32) if number not in (9, 19)],
    "files": files(),
    "priority": [os.getpriority(os.PRIO_PROCESS, 0), lines("/proc/self/oom_score_adj"), os.sched_getscheduler(0)],
    "place": [os.getcwd(), os.readlink("/proc/self/fd/0"), sys.stdout.line_buffering, sys.stdout.write_through],
    "streams": [os.path.basename(os.readlink(f"/proc/self/fd/{n}")).split(".")[0] for n in (1, 2)],
    "hooks": [sys.excepthook is sys.__excepthook__, type(os.environ).__name__],
    "random": random.random(),
}))
"""


@pytest.mark.parametrize("module", [False, True], ids=["script", "module"])
async def test_a_process_from_a_standby_has_all_that_a_cold_one_has(
    node: Callable[..., Node], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    command = (sys.executable, "-u", *(("-m", "train") if module else ("train.py",)), "word", "--x=y z")
    made = node(TELL, command=command, environ={"ODD": "a\nb=ü", "RANK": "7", "RESILE_TOKEN": "secret"})
    cold = json.loads((await made.run(warm=False))[1])
    await made.warm()
    first, second = made.ready
    tells = []
    for pid in (first, second):
        code, out, err = await made.run()
        assert (code, err) == (0, "")
        assert made.ends[-1].pid == pid, "it was the standby"
        tells.append(json.loads(out))
    drawn = {tell.pop("random") for tell in (cold, *tells)}
    assert len(drawn) == 3, "each draws its own numbers"
    for tell in tells:
        assert tell == cold
    assert cold["family"][0] == os.getpid()


ENDS = """
import atexit, os, signal, sys, threading, time
atexit.register(print, "at exit")
how = sys.argv[1]
def inner():
    raise ValueError("no such batch")
def outer():
    try:
        inner()
    except ValueError as error:
        raise RuntimeError("it went wrong") from error
match how:
    case "well": pass
    case "code": sys.exit(3)
    case "words": sys.exit("some words")
    case "nested": outer()
    case "group": raise ExceptionGroup("several", [ValueError(1)])
    case "interrupted": raise KeyboardInterrupt
    case "hard": os._exit(7)
    case "segv": os.kill(os.getpid(), signal.SIGSEGV)
    case "thread": threading.Thread(target=lambda: (time.sleep(0.05), print("thread"))).start()
    case "hook":
        sys.excepthook = lambda kind, error, trace: print(kind, error, trace.tb_lineno, trace.tb_frame.f_code.co_name)
        inner()
    case "fork":
        if not os.fork():
            sys.exit(5)
        print(os.wait()[1])
    case "spawn":
        import multiprocessing
        if __name__ == "__main__":
            process = multiprocessing.get_context("spawn").Process(target=inner)
            process.start()
            process.join()
            print(process.exitcode)
"""


async def test_it_ends_as_a_cold_one_does(node: Callable[..., Node]) -> None:
    hows = [
        "well",
        "code",
        "words",
        "nested",
        "group",
        "interrupted",
        "hard",
        "segv",
        "thread",
        "hook",
        "fork",
        "spawn",
    ]
    expected: dict[str, int] = {
        "well": 0,
        "code": 3,
        "words": 1,
        "nested": 1,
        "interrupted": -2,
        "hard": 7,
        "segv": -11,
    }
    made = node(ENDS, standbys=len(hows))
    await made.warm(len(hows))
    for how in hows:
        cold, pid = await made.run(warm=False, words=(how,)), made.ready[0]
        assert await made.run(words=(how,)) == cold, how
        assert made.ends[-1].pid == pid
        assert cold[0] == expected.get(how, cold[0])


async def test_a_script_that_cannot_be_compiled_is_shown_as_python_shows_it(node: Callable[..., Node]) -> None:
    made = node("if True print()", preload=("torch",))
    cold = await made.run(warm=False)
    await made.warm()
    assert await made.run() == cold
    assert "SyntaxError" in cold[2]


async def test_what_imports_print_is_printed_by_every_process(node: Callable[..., Node]) -> None:
    made = node("print('ran')", torch="import sys\nprint('loaded')\nprint('a warning', file=sys.stderr)")
    await made.warm()
    assert await made.run() == (0, "loaded\nran\n", "a warning\n")
    assert await made.run() == (0, "loaded\nran\n", "a warning\n")


async def test_garbage_is_collected_in_a_standby_but_not_in_the_memory_that_it_shares(
    node: Callable[..., Node],
) -> None:
    made = node("import gc; print(gc.isenabled(), gc.get_threshold()[0] > 0, gc.get_freeze_count() > 0)")
    await made.warm()
    assert (await made.run())[1] == "True True True\n"


async def test_a_module_that_switches_collections_off_is_heeded_in_a_standby(node: Callable[..., Node]) -> None:
    made = node(
        "import gc; print(gc.isenabled(), gc.get_threshold()[0])",
        torch="import gc\ngc.disable()\ngc.set_threshold(123)",
    )
    await made.warm()
    assert (await made.run())[1] == "False 123\n"


async def test_used_standbys_are_made_again_and_nothing_is_lost(node: Callable[..., Node]) -> None:
    made = node("import time; time.sleep(0.05)")
    await made.warm()
    used, before = set(), len(os.listdir("/proc/self/fd"))
    for _ in range(4):
        used.add(made.start())
        await until(lambda: made.group.alive == 0)
        await until(lambda: made.standbys.facts.ready == 2, "another standby")
    assert len(used) == 4
    assert len(os.listdir("/proc/self/fd")) <= before  # a thread of an earlier test may close its own meanwhile
    assert made.standbys.facts.memory > 0
    assert not children() & used, "no zombie"


@pytest.mark.parametrize(
    ("torch", "left"),
    [
        ("import threading, time\nthreading.Thread(target=time.sleep, args=(60,), daemon=True).start()", "1 thread"),
        ("import os\nheld = os.open('/dev/zero', os.O_RDONLY)", "/dev/zero open"),
    ],
)
async def test_interpreters_that_cannot_be_forked_are_good_for_one_start_each(
    node: Callable[..., Node], caplog: pytest.LogCaptureFixture, torch: str, left: str
) -> None:
    caplog.set_level(logging.INFO)
    made = node("import os; print(os.getpid())", torch=torch)
    await made.warm(2)
    pids = made.ready
    assert f"imports left {left}" in caplog.text
    assert [int((await made.run())[1]) for _ in range(2)] == pids
    assert made.ready == []
    assert (await made.run())[0] == 0, "from scratch"
    await made.warm(2)
    assert not set(made.ready) & set(pids)


async def test_orphans_that_were_adopted_by_the_way_are_collected(node: Callable[..., Node]) -> None:
    made = node("import os, subprocess; print(subprocess.Popen(['sleep', '60'], stdout=subprocess.DEVNULL).pid)")
    kernel_calls.adopt_orphans(True)  # as while a standby is on its way
    try:
        orphan = int((await made.run(warm=False))[1])
    finally:
        kernel_calls.adopt_orphans(False)
    assert orphan in children()
    await until(lambda: Path(f"/proc/{orphan}/stat").read_text().split()[2] == "Z", "it is ended with its group")
    await made.warm()
    assert orphan not in children()


async def test_killed_standbys_and_templates_cost_nothing(node: Callable[..., Node], monkeypatch: Any) -> None:
    monkeypatch.setattr(standbys_module, "BACKOFF", Backoff(0.01, 0.01))
    made = node("print('ran')")
    await made.warm()
    first = made.ready
    assert made.standbys._template is not None
    template = made.standbys._template.pid
    os.kill(first[0], signal.SIGKILL)
    await until(lambda: made.standbys.facts.ready == 2 and first[0] not in made.ready, "another in its place")
    os.kill(template, signal.SIGKILL)
    for pid in made.ready:
        os.kill(pid, signal.SIGKILL)
    assert await made.run() == (0, "ran\n", ""), "from scratch, whatever was lost"
    await until(lambda: made.standbys.facts.ready == 2, "all of them made anew")
    assert await made.run() == (0, "ran\n", "")


IMPORT_UNTIL = """import os, time
deadline = time.monotonic() + {patience}
open({here!r} + "/importing", "a").close()
while not os.path.exists({here!r} + "/go"):
    assert time.monotonic() < deadline
    time.sleep(0.005)
"""


@pytest.mark.parametrize("ending", ["finished", "frozen", "killed", "broken", "broken, slow to end"])
async def test_a_process_that_is_wanted_during_the_import_begins_in_that_interpreter(
    node: Callable[..., Node], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: str
) -> None:
    monkeypatch.setattr(standbys_module, "ASIDE_FOR", 0.01)
    monkeypatch.setattr(standbys_module, "BACKOFF", Backoff(0.01, 0.01))
    monkeypatch.setattr(standby_module, "IMPORT_WITHIN", PATIENCE if ending != "frozen" else 0.2)
    if "slow" in ending:
        ended, due = standby_module.Standby._ended, dict[int, float]()

        def late(standby: standby_module.Standby) -> None:
            if time.monotonic() > due.setdefault(standby.pid, time.monotonic() + 0.2):
                ended(standby)

        monkeypatch.setattr(standby_module.Standby, "_ended", late)
    made = node("print(torch.__name__)", torch=IMPORT_UNTIL.format(patience=PATIENCE, here=str(tmp_path)))
    before = children()
    made.standbys.warm()
    await until((tmp_path / "importing").exists, "an import that takes long")
    [importing] = children() - before
    ran = asyncio.ensure_future(made.run())
    await asyncio.sleep(0)
    assert made.pid_of(0) == importing
    if ending == "frozen":
        os.kill(importing, signal.SIGSTOP)
        await until(lambda: made.pid_of(0) != importing, "a start from scratch")
    elif ending == "killed":
        os.kill(importing, signal.SIGKILL)
    elif "broken" in ending:
        (tmp_path / "torch.py").write_text("changed = True")
    (tmp_path / "go").touch()
    assert await ran == (0, "torch\n", "")
    assert (made.ends[-1].pid == importing) == (ending == "finished")
    await until(lambda: made.standbys.facts.ready == 2, "standbys, when there is time for them")


COUNT_IMPORTS = "import os\nwith open({here!r} + '/imports', 'a') as file: file.write(f'{{os.getpid()}}\\n')\n"


def imports(made: Node) -> list[int]:
    """The processes that have imported what is called torch here."""
    return [int(pid) for pid in (made.directory / "imports").read_text().split()]


async def test_the_first_processes_of_a_node_and_its_standbys_share_one_import(
    node: Callable[..., Node], tmp_path: Path
) -> None:
    slow = IMPORT_UNTIL.format(patience=PATIENCE, here=str(tmp_path)) + COUNT_IMPORTS.format(here=str(tmp_path))
    made = node("import os; print(os.getpid(), os.getppid())", torch=slow)
    made.standbys.ahead()
    await until((tmp_path / "importing").exists, "an import before anybody asked for a process")
    made.start_all(3)
    assert made.group.alive == 3
    assert [made.pid_of(rank) > 0 for rank in range(3)] == [True, False, False]
    (tmp_path / "go").touch()
    await until(lambda: made.group.alive == 0, "the end of three processes")
    assert [ended.returncode for ended in made.ends] == [0, 0, 0]
    pids = {ended.local_rank: ended.pid for ended in made.ends}
    assert made.said() == [f"{pids[rank]} {os.getpid()}\n" for rank in range(3)]
    await until(lambda: made.standbys.facts.ready == 2, "standbys")
    assert imports(made) == [pids[0]]
    assert await made.run() == (0, f"{made.ends[-1].pid} {os.getpid()}\n", "")
    assert imports(made) == [pids[0]], "the next one started from a standby, too"


@pytest.mark.parametrize("template", ["ready", "frozen", "lost"])
async def test_more_processes_than_there_are_standbys_share_the_import_as_well(
    node: Callable[..., Node], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, template: str
) -> None:
    monkeypatch.setattr(standbys_module, "WAIT_WITHIN", PATIENCE if template != "frozen" else 0.2)
    monkeypatch.setattr(standbys_module, "BACKOFF", Backoff(PATIENCE, PATIENCE))
    made = node("import os; print(os.getpid())", torch=COUNT_IMPORTS.format(here=str(tmp_path)), standbys=1)
    await made.warm(1)
    [imported], [ready] = imports(made), made.ready
    if template != "ready":
        os.kill(imported, signal.SIGSTOP)
    made.start_all(3)
    assert [made.pid_of(rank) for rank in range(3)] == [ready, 0, 0]
    if template == "lost":
        os.kill(imported, signal.SIGKILL)
    await until(lambda: made.group.alive == 0, "the end of three processes")
    assert [ended.returncode for ended in made.ends] == [0, 0, 0]
    pids = {ended.local_rank: ended.pid for ended in made.ends}
    assert made.said() == [f"{pids[rank]}\n" for rank in range(3)]
    from_scratch = set() if template == "ready" else {pids[1], pids[2]}
    assert set(imports(made)) == {imported} | from_scratch
    if template != "lost":
        os.kill(imported, signal.SIGCONT)
        await until(lambda: made.standbys.facts.ready > 0 and not made.standbys._forks, "another standby")
        assert len(made.ready) == made.standbys.facts.ready == 1, "also when more were forked, and came too late"


async def test_an_agent_that_leaves_starts_none_of_those_who_wait(node: Callable[..., Node], tmp_path: Path) -> None:
    made = node("", torch=IMPORT_UNTIL.format(patience=PATIENCE, here=str(tmp_path)))
    made.standbys.ahead()
    await until((tmp_path / "importing").exists, "an import")
    made.start_all(3)
    importing = made.pid_of(0)
    made.standbys.close()
    assert [made.pid_of(rank) for rank in range(3)] == [importing, 0, 0]
    await made.group.stop(PATIENCE)
    assert {(ended.pid, ended.returncode) for ended in made.ends} == {(importing, -15), (0, -15)}
    assert len(made.ends) == 3


@pytest.mark.parametrize("ending", ["killed", "threads", "ranked", "no room", "no line"])
async def test_processes_that_wait_for_an_import_start_from_scratch_when_nothing_comes_of_it(
    node: Callable[..., Node], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: str
) -> None:
    monkeypatch.setattr(standbys_module, "ASIDE_FOR", 0.01)
    monkeypatch.setattr(standbys_module, "BACKOFF", Backoff(0.01, 0.01))
    more = {
        "threads": "import threading\nthreading.Thread(target=time.sleep, args=(60,), daemon=True).start()\n",
        "ranked": "os.environ.get('RANK')\n",
    }.get(ending, "")
    slow = IMPORT_UNTIL.format(patience=PATIENCE, here=str(tmp_path)) + more
    made = node("import os; print('ran', flush=True); os._exit(0)", torch=slow)
    made.standbys.ahead()
    await until((tmp_path / "importing").exists, "an import")
    made.start_all(3)
    importing = made.pid_of(0)
    if ending == "killed":
        os.kill(importing, signal.SIGKILL)
    elif ending == "no room":
        made.environ["RESILE_STANDBY_MEMORY"] = "1Ki"
    elif ending == "no line":
        lines = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)]  # for the next template, and none after it

        def last_line(*_: int) -> tuple[socket.socket, socket.socket]:
            if not lines:
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            return lines.pop()

        monkeypatch.setattr(socket, "socketpair", last_line)
    (tmp_path / "go").touch()
    await until(lambda: made.group.alive == 0, "the end of three processes")
    assert [ended.returncode for ended in made.ends] == [0, 0, 0]
    assert made.said() == ["ran\n"] * 3
    assert (importing in {ended.pid for ended in made.ends}) == (ending in ("threads", "no room", "no line"))


@pytest.mark.parametrize("how", ["stopped", "killed", "one by one"])
async def test_processes_that_wait_for_an_import_can_be_ended(
    node: Callable[..., Node], tmp_path: Path, how: str
) -> None:
    made = node("print('ran')", torch=IMPORT_UNTIL.format(patience=PATIENCE, here=str(tmp_path)))
    made.standbys.ahead()
    await until((tmp_path / "importing").exists, "an import")
    made.start_all(2)
    if how == "stopped":
        await made.group.stop(PATIENCE)
    elif how == "killed":
        made.group.kill()
    else:
        for rank in (1, 0):
            made.group.kill_one(rank)
    await until(lambda: made.group.alive == 0, "the end of both")
    number = -signal.SIGTERM if how == "stopped" else -signal.SIGKILL
    assert sorted((ended.local_rank, ended.returncode) for ended in made.ends) == [(0, number), (1, number)]
    (tmp_path / "go").touch()
    await asyncio.sleep(0.1)
    assert made.group.alive == 0, "nothing starts that was ended"


async def test_threads_that_end_before_a_fork_are_no_hindrance(node: Callable[..., Node]) -> None:
    sleeper = """import os, threading
woken = threading.Event()
thread = threading.Thread(target=woken.wait, args=(60,))
thread.start()
os.register_at_fork(before=lambda: (woken.set(), thread.join()))
"""
    made = node("import os; print(os.getpid())", torch=sleeper)
    await made.warm(2)
    assert made.standbys._template is not None, "it goes on making standbys"


@pytest.mark.parametrize(
    ("source", "more"),
    [
        ("print('ran')", {}),
        ("import os; os.environ['A'] = 'b'; import torch", {}),
        ("import torch", {"preload": ("x",)}),
    ],
    ids=["no torch", "sets variables", "preload"],
)
async def test_nothing_is_imported_ahead_of_the_first_start_that_might_delay_it(
    node: Callable[..., Node], source: str, more: dict[str, Any]
) -> None:
    before = children()
    made = node(**more)
    (made.directory / "train.py").write_text(source)
    made.standbys.ahead()
    await until(lambda: made.standbys._reading is None, "the source is read")
    assert children() == before
    assert (await made.run())[0] == 0


async def test_a_standby_that_hangs_is_killed_and_the_process_starts_from_scratch(
    node: Callable[..., Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(standby_module, "BEGIN_WITHIN", 0.2)
    made = node("print('ran')")
    await made.warm()
    hung = made.ready[0]
    os.kill(hung, signal.SIGSTOP)
    assert await made.run() == (0, "ran\n", "")
    assert made.ends[-1].pid != hung


async def test_a_process_that_is_stopped_while_it_begins_is_not_started_again(node: Callable[..., Node]) -> None:
    made = node("import time; time.sleep(60)")
    await made.warm()
    for stop in (lambda: made.group.stop(5.0), lambda: _at_once(made.group.kill)):
        hung = made.ready[0]
        os.kill(hung, signal.SIGSTOP)
        assert made.start() == hung
        ended = asyncio.ensure_future(stop())
        await asyncio.sleep(0)
        os.kill(hung, signal.SIGCONT)
        await ended
        await until(lambda: made.group.alive == 0)
        assert made.ends[-1].pid == hung
        assert made.ends[-1].returncode < 0
        await made.warm()


async def _at_once(do: Callable[[], None]) -> None:
    do()


async def test_what_changed_on_disk_is_never_run_from_memory(
    node: Callable[..., Node], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    made = node("print(torch.answer)", torch="answer = 1")
    await made.warm()
    (made.directory / "torch.py").write_text("answer = 42")
    assert await made.run() == (0, "42\n", "")
    assert "torch.py has changed since it was read" in caplog.text
    await made.warm()
    assert await made.run() == (0, "42\n", "")


async def test_many_that_turn_out_stale_at_once_do_not_end_it_for_good(node: Callable[..., Node]) -> None:
    made = node("print(torch.answer)", torch="answer = 1", standbys=8)
    await made.warm(8)
    (made.directory / "torch.py").write_text("answer = 42")
    groups = []
    for _ in range(8):
        made.start()
        groups.append(made.group)
    await until(lambda: all(group.alive == 0 for group in groups))
    assert {ended.returncode for ended in made.ends} == {0}
    assert {(made.directory / f"stdout.{number}").read_text() for number in range(8)} == {"42\n"}
    await made.warm(8)


async def test_another_environment_is_never_served(node: Callable[..., Node]) -> None:
    made = node("import os; print(os.environ.get('NEW'))")
    await made.warm()
    pids = made.ready
    assert await made.run(environ={"NEW": "1"}) == (0, "1\n", "")
    assert made.ends[-1].pid not in pids
    assert made.ready == []


@pytest.mark.parametrize(
    ("torch", "more", "why"),
    [
        ("import os; os.environ.get('LOCAL_RANK')", {}, "torch reads LOCAL_RANK when it is imported"),
        ("import os; 'RANK' in os.environ", {}, "torch reads RANK when it is imported"),
        ("", {"preload": ("no_such_module",)}, "cannot import no_such_module: No module named 'no_such_module'"),
        ("", {"environ": {"RESILE_STANDBY_MEMORY": "1Mi"}}, "RESILE_STANDBY_MEMORY allows 1 MiB"),
        ("", {"environ": {"RESILE_STANDBY_MEMORY": "much"}}, "such as 500m, 2, 0.5 or 4Gi, not 'much'"),
    ],
)
async def test_why_there_are_none_is_one_sentence(
    node: Callable[..., Node], caplog: pytest.LogCaptureFixture, torch: str, more: Any, why: str
) -> None:
    caplog.set_level(logging.INFO)
    made = node(torch=torch, **more)
    made.standbys.warm()
    await until(lambda: "start from scratch" in caplog.text)
    assert caplog.text.count("start from scratch") == 1
    assert why in caplog.text
    assert await made.run() == (0, "", "")


async def test_a_script_without_torch_has_none_and_nobody_is_told(
    node: Callable[..., Node], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    made = node()
    (made.directory / "train.py").write_text("print('ran')")
    made.standbys.warm()
    await until(lambda: made.standbys._off_because != "")
    assert "its source imports no torch" in made.standbys._off_because
    assert "standby" not in caplog.text
    assert await made.run() == (0, "ran\n", "")


async def test_a_module_that_wants_to_know_its_rank_is_left_to_the_script(
    node: Callable[..., Node], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    made = node("import ranked; print(ranked.rank)", preload=("ranked",))
    (made.directory / "ranked.py").write_text("import os\nrank = os.environ.get('RANK')")
    await made.warm()
    assert "ranked is not imported ahead: ranked reads RANK when it is imported" in caplog.text
    assert await made.run() == (0, "0\n", "")


async def test_memory_is_given_back_to_whoever_needs_it_more(node: Callable[..., Node]) -> None:
    made = node("print('ran')")
    assert not made.standbys.yield_memory()
    await made.warm()
    pids = [*made.ready, made.standbys._template.pid]  # type: ignore[union-attr]
    assert made.standbys.yield_memory()
    assert made.standbys.facts == NO_STANDBYS
    assert not children() & set(pids)
    assert await made.run() == (0, "ran\n", "")


async def test_modules_that_are_named_are_imported_ahead(node: Callable[..., Node]) -> None:
    made = node("import sys; print('extra' in sys.modules)", preload=("extra",))
    (made.directory / "extra.py").touch()
    await made.warm()
    assert await made.run() == (0, "True\n", "")


async def test_they_are_given_up_after_failures_in_a_row(
    node: Callable[..., Node], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(standbys_module, "BACKOFF", Backoff(0.001, 0.001))
    made = node(torch="import os; os.kill(os.getpid(), 9)")
    made.standbys.warm()
    await until(lambda: "and so it went 5 times" in caplog.text)
    made.standbys.warm()
    assert made.standbys._template is None


@pytest.mark.parametrize(
    ("command", "more", "why"),
    [
        (("/bin/sh", "-c", "x"), {}, "not run by the interpreter"),
        (("/other/python", "-u", "train.py"), {}, "not run by the interpreter"),
        ((sys.executable, "-O", "train.py"), {}, "not run by the interpreter"),
        ((sys.executable, "-u", "train-${local_rank}.py"), {}, "depends on the process"),
        ((sys.executable, "-u", "/"), {}, "not a plain file"),
        ((sys.executable, "-u", __file__), {"virtual_local_rank": True}, "--virtual-local-rank"),
        ((sys.executable, "-u", __file__), {"rendezvous": RendezvousConfig(max_restarts=0)}, "--max-restarts is 0"),
        ((sys.executable, "-u", __file__), {}, ""),
        ((sys.executable, "-u", "-m", "train"), {}, ""),
    ],
)
def test_what_always_starts_from_scratch(command: tuple[str, ...], more: dict[str, Any], why: str) -> None:
    rendezvous = RendezvousConfig(max_restarts=1)
    options = RunOptions(
        **{"command": command, "nproc": 1, "rendezvous": rendezvous, "run_id": "", "job_name": "", **more}
    )
    found = cold_because(options)
    assert why in found
    assert bool(why) == bool(found)


AGENT = """
import asyncio, os, sys
from tests.agent.test_standbys import Node, Output
from pathlib import Path
async def main():
    made = Node(Path(sys.argv[1]), Output(), "")
    await made.warm()
    print(*made.ready, made.standbys._template.pid, flush=True)
    await asyncio.sleep(60)
asyncio.run(main())
"""


async def test_an_agent_killed_with_sigkill_leaves_none_behind(tmp_path: Path) -> None:
    agent = await asyncio.create_subprocess_exec(
        sys.executable, "-c", AGENT, str(tmp_path), stdout=asyncio.subprocess.PIPE
    )
    assert agent.stdout is not None
    pids = [int(word) for word in (await agent.stdout.readline()).split()]
    assert len(pids) == 3
    agent.kill()
    await agent.wait()

    def gone(pid: int) -> bool:
        with contextlib.suppress(OSError):
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
        return True

    await until(lambda: all(map(gone, pids)))
