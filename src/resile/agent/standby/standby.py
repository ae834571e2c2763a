"""The agent's side of a template or standby: receives its messages, sees its end, and turns it into a training process.

`interpreter.py` is the other side. Except for `end`, nothing here waits: a standby that is asked to begin confirms that
or ends, and is killed if it does neither in time.
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
from resile.agent.workers import kernel_calls

BEGIN_WITHIN = 2.0
"""Seconds for a standby to confirm that it begins; a start from scratch takes longer."""
IMPORT_WITHIN = 120.0
"""Seconds for a template that is needed at once to finish its imports."""
COLLECT_WITHIN = 2.0
"""Seconds that the agent waits for the end of a process that it killed."""


class Standby:
    """A template or a standby: a child process of the agent, with the socket to it."""

    def __init__(self, pid: int, line: socket.socket) -> None:
        """The process `pid` must be a child of this process and lead a process group; `line` is the socket to it."""
        self.pid = pid
        self.pidfd = os.pidfd_open(pid)
        self._line: socket.socket | None = line
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._watched = False
        self.importing = False
        """True if this template is to become a training process and has not finished its imports."""
        self._on_words: Callable[[dict[str, Any]], None] = lambda _: None
        self._on_end: Callable[[], None] = lambda: None

    def watch(self, on_words: Callable[[dict[str, Any]], None], on_end: Callable[[], None]) -> None:
        """Call `on_words` for each message of this interpreter, and `on_end` when it has ended."""
        self._on_words, self._on_end = on_words, on_end
        if not self._watched:
            self._watched = True
            self._loop.add_reader(self.pidfd, self._ended)
            if self._line is not None:
                self._loop.add_reader(self._line, self._hear)

    def send(self, word: bytes, descriptors: Sequence[int] = ()) -> None:
        """Send a message without waiting. Raises OSError if the process does not read."""
        if self._line is None:
            raise BrokenPipeError
        socket.send_fds(self._line, [word], descriptors, socket.MSG_DONTWAIT)

    def kill_after(self, seconds: float) -> None:
        self.call_off()
        self._timer = self._loop.call_later(seconds, self.kill)

    def call_off(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def hurry(self) -> None:
        """Raise the priority of a template that is needed at once; kill it if it still imports after IMPORT_WITHIN."""
        self.importing = True
        self.kill_after(IMPORT_WITHIN)
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, self.pid, os.getpriority(os.PRIO_PROCESS, 0))

    def kill(self, *, alone: bool = False) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            (os.kill if alone else os.killpg)(self.pid, signal.SIGKILL)

    def wait(self) -> int:
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def let_go(self) -> None:
        """Stop watching this interpreter and close the socket to it. The caller closes `pidfd`."""
        self.call_off()
        if self._watched:
            self._watched = False
            self._loop.remove_reader(self.pidfd)
        self._hang_up()

    def end(self) -> None:
        """Kill and reap this interpreter. The callbacks of `watch` are not called."""
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
            self._hang_up()  # the process is ending; its pidfd shows when it has
            return
        self._on_words(json.loads(packet))

    def _ended(self) -> None:
        self._hear()  # it may have sent a message before it ended
        if self._watched:
            self.let_go()
            self._on_end()

    def _hang_up(self) -> None:
        if self._line is not None:
            self._loop.remove_reader(self._line)
            self._line.close()
            self._line = None


def template(environment: Mapping[str, str], request: Mapping[str, object], stdin: int | None) -> Standby:
    """Start a template that imports the modules of `request`. Raises OSError if no process or file can be made."""
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
    process.returncode = 0  # `Standby` reaps the process
    interpreter = Standby(process.pid, ours)
    interpreter.send(json.dumps(request).encode())
    return interpreter


def die_with_agent(agent: int) -> Callable[[], None]:
    """A `preexec_fn` that makes a new process die with the agent, whose pid is `agent`."""

    def ask() -> None:
        if not kernel_calls.die_with(agent):  # the agent died before this call
            os._exit(1)

    return ask


class StartOrder:
    """The message that turns a standby into a training process: command, environment and streams.

    It has open descriptors. Its maker must call `give` or `close`, which close them.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], streams: Sequence[int]) -> None:
        """Duplicates the file descriptors `streams`, so the caller still has to close its own. Raises OSError."""
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
        """Send the message to `standby` and close the message's descriptors here.

        The standby is killed if the message cannot be sent, or if the standby does not confirm it within BEGIN_WITHIN
        seconds. Then the callback `on_end` of `Standby.watch` is called.
        """
        try:
            standby.send(BEGIN, self._descriptors)
        except OSError:
            standby.kill()
        standby.kill_after(BEGIN_WITHIN)
        self.close()

    def close(self) -> None:
        """Close the descriptors of this message. May be called twice."""
        self._undo.close()
