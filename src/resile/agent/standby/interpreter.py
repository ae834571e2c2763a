"""A warm interpreter: a process that has imported a script's modules and waits to become a training process.

The *template* does the imports and forks a *standby* whenever the agent asks for one. Both share the memory of the
imported modules, so a standby costs milliseconds. A standby can fork too, so that one of them replaces a template that
becomes a process itself. If imports left threads or open files behind, which a fork would not survive, the template
does not fork and is the only standby, good for one start.

A standby does not know its round. When it begins, it gets its command, environment and streams, undoes what this module
did to the process, seeds its random numbers anew, and runs the script as `python SCRIPT` or `python -m MODULE` would,
with the same variables, arguments, /proc entries, tracebacks and exit codes. If an imported file has changed since the
import, the standby says so and ends, and the agent starts the process from scratch.

The agent is at the other end of a socket. When the agent closes it or dies, template and standbys end. This module
imports nothing but the standard library, so that it leaves no traces in a training process.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import json
import os
import select
import socket
import sys
import time
import types
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib.machinery import SourceFileLoader
from typing import Any

from resile.agent.workers import kernel_calls

BOOT = (
    "import sys; sys.flags.safe_path or sys.path.pop(0); from resile.agent.standby.interpreter import main; "
    "main(int(sys.argv[1]))"
)
"""The program of the template, for `python -u -c`: the same flags as `python -u SCRIPT`."""
NAME = "resile-standby"
ADOPTION = 5.0
"""Seconds that a new standby waits for the agent to adopt it."""
MAX_PACKET = 64 * 1024
BEGIN, FORK = b"begin", b"fork"
"""Messages of the agent: become a training process (with order and streams), or fork a standby (with its socket)."""
STDOUT, STDERR = 1, 2


class Unfit(Exception):
    """No training process of this script can start from this template; the text says why in one sentence."""


class Changed(Unfit):
    """A file has changed since this template read it. A new template may be fit."""


class NotWanted(Unfit):
    """There is no module to import ahead for this script."""


class Unripe(Unfit):
    """A module can only be imported by the training process itself. A template without this module may be fit."""

    def __init__(self, module: str, variable: str) -> None:
        super().__init__(f"{module} reads {variable} when it is imported")
        self.module = module


def main(control: int) -> None:
    """Run the template: do what the agent at the other end of the socket `control` asks for."""
    line = socket.socket(fileno=control)
    request = json.loads(line.recv(MAX_PACKET))
    script = Script(request["command"])
    agent = os.getppid()
    priority = score = 0
    opened = _descriptors()
    began = time.time_ns()
    try:
        # First, because a process that does not show what it is could not be found.
        kernel_calls.show_command([NAME, *request["command"]], os.environ)
        kernel_calls.show_name(NAME)
        score, priority = kernel_calls.die_first(), os.getpriority(os.PRIO_PROCESS, 0)
        if not request["urgent"]:
            kernel_calls.yield_cpu()
        sys.path[:0] = script.path
        names = [name for name in script.wanted(request["preload"]) if name not in request["without"]]
        with _without_collections():
            _import(names, script.needed, request["changing"])
        files = _states({*script.files, *_module_files()}, began)
    except Exception as error:  # the agent must learn of any error why there will be no standby
        without = error.module if isinstance(error, Unripe) else ""
        kind = {"again": isinstance(error, Changed), "quiet": isinstance(error, NotWanted), "without": without}
        _say(line, unfit=str(error), **kind)
        os._exit(0)
    os.setpriority(os.PRIO_PROCESS, 0, priority)
    begin = functools.partial(_begin, script, files, score)
    left = _left_behind(opened)
    _say(line, warm=True, pid=os.getpid(), modules=names, left=left)
    if left:
        begin(line, _hear(line)[1])
    else:
        _fork_on_demand(line, agent, begin)


class Script:
    def __init__(self, command: list[str]) -> None:
        """`command` is `[python, "-u", SCRIPT, …]` or `[python, "-u", "-m", MODULE, …]`."""
        self.module = command[3] if command[2] == "-m" else ""
        self.file = "" if self.module else command[2]
        self.needed: set[str] = set()
        """Modules of `--preload`; it is an error if they cannot be imported."""
        self.files: list[str] = [sys.executable]
        """Files that were read to find out what to import. If one changes, the template is useless."""

    @property
    def path(self) -> list[str]:
        """The entries that Python puts in front of `sys.path` for the script."""
        if sys.flags.safe_path:
            return []
        return [os.getcwd() if self.module else os.path.dirname(os.path.realpath(self.file))]

    def wanted(self, named: list[str]) -> list[str]:
        """List the modules to import: those of torch that the script's source imports, and `named` (from `--preload`).

        Raises:
            Unfit: the script sets environment variables before it imports torch.
            NotWanted: there is nothing to import.
        """
        from resile.agent.standby import (
            script_imports,  # here, so that agents, which import this module too, do not pay for it
        )

        self.needed = set(named)
        paths = script_imports.files_of(self.module, [*self.path, *sys.path]) if self.module else [self.file]
        source = script_imports.read(paths, self.path[0] if self.path else "")
        self.files += source.files
        if source.sets_variables:
            raise Unfit(f"{source.sets_variables} sets variables before torch is imported")
        wanted = [*source.modules, *(name for name in named if name not in source.modules)]
        if not wanted:
            raise NotWanted("its source imports no torch, and --preload names nothing else")
        return wanted

    def run(self) -> None:
        # As the interpreter makes it, so that code that looks for `__main__` finds the script.
        program = types.ModuleType("__main__")
        vars(program).update(__annotations__={}, __builtins__=sys.modules["builtins"])
        sys.modules["__main__"] = program
        if self.module:
            import runpy

            runpy._run_module_as_main(self.module)  # type: ignore[attr-defined]
            return
        path = os.path.abspath(self.file)
        with open(path, "rb") as file:
            source = file.read()
        vars(program).update(__loader__=SourceFileLoader("__main__", path), __file__=path, __cached__=None)
        exec(compile(source, path, "exec", dont_inherit=True), vars(program))


def _begin(
    script: Script, files: Mapping[str, tuple[int, int]], score: int, line: socket.socket, descriptors: list[int]
) -> None:
    """Turn this interpreter, which is a template or a standby, into a training process.

    `files` are the states of all imported files, and `score` is the OOM score of training processes.
    """
    with open(descriptors[0], "rb") as file:
        order = json.load(file)
    changed = next((path for path, state in files.items() if _state(path) != state), "")
    try:
        if changed:
            raise Changed(f"{changed} has changed since it was read")
        kernel_calls.set_oom_score(score)
        kernel_calls.show_command(order["command"], order["environment"])
    except (Unfit, OSError) as error:
        _say(line, unfit=str(error))
        os._exit(0)
    kernel_calls.show_name(os.path.basename(order["command"][0]))
    for stream, descriptor in ((STDOUT, descriptors[1]), (STDERR, descriptors[2])):
        _take_over(stream, descriptor)
    os.environ.clear()
    os.environ.update(order["environment"])
    sys.orig_argv[:] = order["command"]
    sys.argv[:] = ["-m", *order["command"][4:]] if script.module else order["command"][2:]
    _be_another()
    _say(line, begun=True)
    line.close()
    try:
        script.run()
    except BaseException:
        sys.excepthook = _without_us(sys.excepthook)
        raise


# importing ------------------------------------------------------------------------------------------------------------


class _Watched(type(os.environ)):  # type: ignore[misc]
    """An `os.environ` that notes in `asked` which of the variables `changing` are read."""

    changing: frozenset[str] = frozenset()
    asked: set[str] = set()  # noqa: RUF012 - there is one environment

    def __getitem__(self, key: str) -> str:
        if key in self.changing:
            self.asked.add(key)
        value: str = super().__getitem__(key)
        return value

    def __contains__(self, key: object) -> bool:
        if key in self.changing:
            self.asked.add(str(key))
        return bool(super().__contains__(key))


def _import(names: Iterable[str], needed: set[str], changing: Iterable[str]) -> None:
    """Import the modules `names`. Ignores errors of modules that are not `needed`, because the script gets them too.

    Raises:
        Unfit: a module in `needed` cannot be imported.
        Unripe: a module read one of the variables `changing` while it was imported.
    """
    plain = type(os.environ)
    _Watched.changing = frozenset(changing)
    os.environ.__class__ = _Watched
    try:
        for name in names:
            try:
                importlib.import_module(name)
            except (Exception, SystemExit) as error:  # the script will see the same error
                if name in needed:
                    raise Unfit(f"cannot import {name}: {error}") from error
            if _Watched.asked:
                raise Unripe(name, min(_Watched.asked))
    finally:
        os.environ.__class__ = plain


@contextlib.contextmanager
def _without_collections() -> Iterator[None]:
    """Collect no garbage in this context, and never what is there at its end.

    Imports make next to no garbage. And a collection in a fork would touch, and so copy, the memory of all modules. If
    a module that is imported here switches collections off or changes their thresholds, that is kept.
    """
    before = gc.get_threshold()
    gc.set_threshold(0)
    try:
        yield
    finally:
        gc.freeze()
        if gc.get_threshold()[0] == 0:
            gc.set_threshold(*before)


def _module_files() -> set[str]:
    found = {getattr(module, "__file__", None) for module in list(sys.modules.values())}
    return {path for path in found if isinstance(path, str) and os.path.isabs(path)}


def _states(paths: Iterable[str], began: int) -> dict[str, tuple[int, int]]:
    states = {path: state for path in paths if (state := _state(path)) is not None}
    for path, (modified, _) in states.items():
        if modified > began:
            raise Changed(f"{path} changed while it was being imported")
    return states


def _state(path: str) -> tuple[int, int] | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size


def _descriptors() -> set[str]:
    """The numbers of all open descriptors, without the one that lists them."""
    return {name for name in os.listdir("/proc/self/fd") if os.path.lexists(f"/proc/self/fd/{name}")}


def _left_behind(opened: set[str]) -> str:
    """A sentence about threads or an open file that imports left behind; empty if there are none.

    `opened` are the descriptors that were open before the imports.
    """
    # OpenBLAS ends its idle threads before a fork and starts them again later, so a test fork shows which remain.
    if _threads():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # newer Pythons warn of forks with threads
            if (tried := os.fork()) == 0:
                os._exit(0)
        os.waitpid(tried, 0)
    if threads := _threads():
        return f"imports left {threads} thread{'s' if threads > 1 else ''} behind"
    for name in _descriptors() - opened:
        return f"imports left {os.readlink(f'/proc/self/fd/{name}')} open"
    return ""


def _threads() -> int:
    return len(os.listdir("/proc/self/task")) - 1


# forking --------------------------------------------------------------------------------------------------------------


def _fork_on_demand(line: socket.socket, agent: int, begin: Callable[[socket.socket, list[int]], None]) -> None:
    """Fork a standby whenever the agent asks for one on `line`, until the agent asks this process to begin.

    Then this process runs the script, and the function returns when the script has ended. Standbys run this loop too. A
    helper process forks the standby and ends at once, so that the process `agent` adopts the standby.
    """
    while True:
        word, descriptors = _hear(line)
        if word == BEGIN:
            begin(line, descriptors)
            return
        between = os.fork()
        if between:
            os.waitpid(between, 0)
            os.close(descriptors[0])
            continue
        if os.fork():
            os._exit(0)
        line.close()
        line = socket.socket(fileno=descriptors[0])
        _become_child_of(agent)
        os.setpgid(0, 0)
        _say(line, ready=os.getpid())


def _hear(line: socket.socket) -> tuple[bytes, list[int]]:
    word, descriptors, _, _ = socket.recv_fds(line, MAX_PACKET, 3)
    if not word:
        os._exit(0)
    return word, descriptors


def _become_child_of(agent: int) -> None:
    parent = os.getppid()
    if parent != agent:
        with contextlib.suppress(ProcessLookupError):
            pidfd = os.pidfd_open(parent)
            select.select([pidfd], [], [], ADOPTION)
            os.close(pidfd)
    if not kernel_calls.die_with(agent):
        os._exit(1)


# becoming another process ---------------------------------------------------------------------------------------------


def _take_over(stream: int, descriptor: int) -> None:
    """Redirect `stream` to `descriptor`, and write there what imports have printed to `stream` so far."""
    printed = os.pread(stream, os.fstat(stream).st_size, 0)
    os.dup2(descriptor, stream)
    os.close(descriptor)
    with contextlib.suppress(OSError):
        while printed:
            printed = printed[os.write(stream, printed) :]


def _be_another() -> None:
    """Make new random seeds and keys, as these must differ between processes. Forget which modules were not found."""
    importlib.invalidate_caches()
    modules: dict[str, Any] = sys.modules  # only modules that were imported
    for name in ("random", "numpy.random"):
        if (numbers := modules.get(name)) is not None:
            numbers.seed()
    if (processes := modules.get("multiprocessing.process")) is not None:
        processes.current_process().authkey = os.urandom(32)


def _without_us(hook: Callable[..., Any]) -> Callable[..., Any]:
    def shown(kind: type[BaseException], error: BaseException, trace: types.TracebackType | None) -> None:
        while trace is not None and trace.tb_frame.f_code.co_filename != __file__:
            trace = trace.tb_next
        while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
            trace = trace.tb_next
        hook(kind, error.with_traceback(trace), trace)

    return shown


def _say(line: socket.socket, **words: object) -> None:
    with contextlib.suppress(OSError):  # the agent is gone
        line.send(json.dumps(words).encode())
