"""`resile` commands for tests, forked from a process that has imported what they need.

A command that starts anew takes 0.35 s of CPU, nearly all of it for imports, and the tests run hundreds. A fork of a
template takes a twentieth of that. It is a process like any other, with its own words, variables, directory, streams
and exit code. What it cannot show is what a start imports and what signals do to it: tests of those start `resile`.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from tests.support.paths import ROOT

RESILE = str(Path(sys.executable).with_name("resile"))
MAX_PACKET = 1 << 20
BOOT = "import sys; from tests.support.template import serve; serve(int(sys.argv[1]))"


class Template:
    """The template of this process, at the other end of a socket; it ends with it."""

    def __init__(self) -> None:
        self._line, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", BOOT, str(theirs.fileno())],
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
            )
        atexit.register(self.close)

    def run(self, *words: str, env: Mapping[str, str], cwd: Path, timeout: float) -> subprocess.CompletedProcess[str]:
        """What `resile WORDS` does; raises `subprocess.TimeoutExpired` if it does not end in time."""
        request = json.dumps({"words": words, "env": dict(env), "cwd": str(cwd)}).encode()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with ours, theirs, tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            socket.send_fds(self._line, [request], [out.fileno(), err.fileno(), theirs.fileno()])
            theirs.close()
            ours.settimeout(timeout)
            pid = 0
            try:
                pid = _number(ours)
                code = _number(ours)
            except TimeoutError:
                if pid:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                raise subprocess.TimeoutExpired([RESILE, *words], timeout) from None
            texts = []
            for stream in (out, err):
                stream.seek(0)
                texts.append(stream.read().decode())
        return subprocess.CompletedProcess([RESILE, *words], code, *texts)

    def close(self) -> None:
        self._line.close()
        self._process.wait()


def _number(answers: socket.socket) -> int:
    packet = answers.recv(MAX_PACKET)
    assert packet, "the template of `resile` commands has ended"
    return int(packet)


@functools.cache
def template() -> Template:
    """The template of this process, started when it is first asked for."""
    return Template()


# in the template ------------------------------------------------------------------------------------------------------


def serve(line: int) -> None:
    """Run one command after the other, each in a fork, until the other end hangs up."""
    from resile.cli import click_group, main  # noqa: F401
    from resile.cli.output import tables  # noqa: F401

    for name in sorted(set(main.COMMANDS) - {"run", "resume", "operator"}):
        importlib.import_module(f"resile.cli.commands.{name}")
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # those that wait for commands are not waited for
    with socket.socket(fileno=line) as heard:
        while True:
            request, descriptors, _, _ = socket.recv_fds(heard, MAX_PACKET, 3)
            if not request:
                return
            if os.fork() == 0:
                heard.close()
                _wait_for(json.loads(request), *descriptors)
            for descriptor in descriptors:
                os.close(descriptor)


def _wait_for(request: dict[str, Any], out: int, err: int, answer: int) -> NoReturn:
    """Fork the command, and tell its pid and its exit code."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    pid = os.fork()
    if pid == 0:
        _be(request, out, err)
    with contextlib.suppress(OSError):  # the test may have given up
        os.write(answer, str(pid).encode())
        os.write(answer, str(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])).encode())
    os._exit(0)


def _be(request: dict[str, Any], out: int, err: int) -> NoReturn:
    """Become the command."""
    os.dup2(out, 1)
    os.dup2(err, 2)
    os.closerange(3, 64)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    sys.argv[:] = [RESILE, *request["words"]]
    sys.path[0] = str(Path(RESILE).parent)  # not the directory of the test, as `-c` has it
    code = 1
    try:
        from resile.cli.main import main

        main()
    except SystemExit as end:
        code = 0 if end.code is None else end.code if isinstance(end.code, int) else 1
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    threading._shutdown()  # as the interpreter does at its end
    atexit._run_exitfuncs()
    with contextlib.suppress(OSError):
        sys.stdout.flush()
    os._exit(code)
