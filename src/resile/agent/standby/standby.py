"""The agent's side of one warm interpreter: what it says, whether it lives, and how it becomes a training process.

`interpreter.py` is the other side. Nothing here ever waits: a standby that is told to begin either says that
it has begun, or is dead and collected; one that does neither in time is killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from resile.agent.standby.interpreter import BEGIN, BOOT, MAX_PACKET
from resile.agent.workers import process_control

BEGIN_WITHIN = 2.0
"""Seconds that a standby has to begin what it is told; a start from scratch takes longer."""
IMPORT_WITHIN = 120.0
"""Seconds that one has to finish its imports when it is wanted: on a busy machine another one would not be faster."""
COLLECT_WITHIN = 2.0
"""Seconds that a killed process has to be gone, before the agent waits no longer."""


class Standby:
    """A child of this process on the other end of a line: told when it speaks and when it has ended."""

    def __init__(self, pid: int, line: socket.socket) -> None:
        """The process is a child of this one, and leads a process group of its own."""
        self.pid = pid
        self.pidfd = os.pidfd_open(pid)
        self._line: socket.socket | None = line
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._watched = False
        self.importing = False
        """It is wanted, and has not finished its imports."""
        self._on_words: Callable[[dict[str, Any]], None] = lambda _: None
        self._on_end: Callable[[], None] = lambda: None

    def watch(self, on_words: Callable[[dict[str, Any]], None], on_end: Callable[[], None]) -> None:
        """Call these for each of its words, and when it has ended, which is after the last of them."""
        self._on_words, self._on_end = on_words, on_end
        if not self._watched:
            self._watched = True
            self._loop.add_reader(self.pidfd, self._ended)
            if self._line is not None:
                self._loop.add_reader(self._line, self._hear)

    def send(self, word: bytes, descriptors: Sequence[int] = ()) -> None:
        """Say something; never waits.

        Raises:
            OSError: it does not listen.
        """
        if self._line is None:
            raise BrokenPipeError
        socket.send_fds(self._line, [word], descriptors, socket.MSG_DONTWAIT)

    def kill_after(self, seconds: float) -> None:
        """Kill it, unless `call_off` comes first."""
        self.call_off()
        self._timer = self._loop.call_later(seconds, self.kill)

    def call_off(self) -> None:
        """Call the deadline off."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def hurry(self) -> None:
        """It is still importing, and already wanted: have it do so as fast as any other process, or be killed."""
        self.importing = True
        self.kill_after(IMPORT_WITHIN)
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, self.pid, os.getpriority(os.PRIO_PROCESS, 0))

    def kill(self, *, alone: bool = False) -> None:
        """SIGKILL to it and, unless it is meant alone, to what it forked."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            (os.kill if alone else os.killpg)(self.pid, signal.SIGKILL)

    def wait(self) -> int:
        """Collect it; its exit code, negative for a signal. Its pid is free then."""
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def let_go(self) -> None:
        """Watch it no longer, and hang up: it is a training process now, and its pidfd is for the caller to close."""
        self.call_off()
        if self._watched:
            self._watched = False
            self._loop.remove_reader(self.pidfd)
        self._hang_up()

    def end(self) -> None:
        """Kill and collect it; neither callback of `watch` is called."""
        self.let_go()
        self.kill()
        if select.select([self.pidfd], [], [], COLLECT_WITHIN)[0]:
            self.wait()
        os.close(self.pidfd)

    def _hear(self) -> None:
        if self._line is None:
            return
        try:
            packet = self._line.recv(MAX_PACKET, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        except OSError:
            packet = b""
        if not packet:
            self._hang_up()  # it is ending; its pidfd tells when it has
            return
        self._on_words(json.loads(packet))

    def _ended(self) -> None:
        self._hear()  # its last words, if any, were said before it ended
        if self._watched:
            self.let_go()
            self._on_end()

    def _hang_up(self) -> None:
        if self._line is not None:
            self._loop.remove_reader(self._line)
            self._line.close()
            self._line = None


def template(environment: Mapping[str, str], request: Mapping[str, object], stdin: int | None) -> Standby:
    """Start an interpreter that imports what `request` says.

    Raises:
        OSError: the machine has no room for another process or file.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    printed: list[int] = []
    try:
        printed += [os.memfd_create("resile-standby", os.MFD_CLOEXEC) for _ in ("stdout", "stderr")]
        process = subprocess.Popen(
            [sys.executable, "-u", "-c", BOOT, str(theirs.fileno())],
            env=environment,
            stdin=stdin,
            stdout=printed[0],
            stderr=printed[1],
            process_group=0,
            pass_fds=(theirs.fileno(),),
            preexec_fn=die_with_agent(os.getpid()),
        )
    except BaseException:
        ours.close()
        raise
    finally:
        theirs.close()
        for descriptor in printed:
            os.close(descriptor)
    process.returncode = 0  # its end is for `Standby` to collect
    interpreter = Standby(process.pid, ours)
    interpreter.send(json.dumps(request).encode())
    return interpreter


def die_with_agent(agent: int) -> Callable[[], None]:
    """What a new process does before its program: see to it that it dies when the agent does."""

    def ask() -> None:
        if not process_control.die_with(agent):  # it died before we could ask
            os._exit(1)

    return ask


class StartOrder:
    """What a standby is to become: a command, its environment, and where its streams go. To be closed."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], streams: Sequence[int]) -> None:
        """The streams stay the caller's.

        Raises:
            OSError: there is no room for another file, or no memory for the words.
        """
        with contextlib.ExitStack() as undo:
            words = os.memfd_create("resile-order", os.MFD_CLOEXEC)
            undo.callback(os.close, words)
            with open(words, "wb", closefd=False) as file:
                file.write(json.dumps({"command": list(command), "environment": dict(environment)}).encode())
            os.lseek(words, 0, os.SEEK_SET)
            self._descriptors = [words]
            for stream in streams:
                self._descriptors.append(os.dup(stream))
                undo.callback(os.close, self._descriptors[-1])
            self._undo = undo.pop_all()

    def give(self, standby: Standby) -> None:
        """Tell a standby to begin; it is killed if it does not in time."""
        try:
            standby.send(BEGIN, self._descriptors)
        except OSError:  # it does not listen
            standby.kill()
        standby.kill_after(BEGIN_WITHIN)
        self.close()

    def close(self) -> None:
        """Give back what it holds; twice is fine."""
        self._undo.close()
