"""Watches one local node by the pipe and the pidfd of its shim.

The shim of a node that this master launched reports through the pipe, within some hundred microseconds. A node that an
earlier master launched is watched by the pidfd of its shim and read from its files. Nothing is polled.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from resile.api.ids import Seconds
from resile.platform.base import Observation
from resile.platform.local import files, processes
from resile.platform.local.shim import remove_cgroup, start_time
from resile.protocol.reports import NodeEnd, NodeStatus

BACKSTOP = 15.0
"""A shim that has not ended its node so many seconds after the grace is killed, and the node with it."""


class LocalNode:
    """Watches one local node. Each change of its status is passed to `changed`, in order, on the event loop."""

    def __init__(self, record: files.NodeFile, directory: Path, changed: Callable[[Observation], None]) -> None:
        self.record = record
        self.status = NodeStatus.LAUNCHING
        self.end = NodeEnd()
        self._directory = directory
        self._changed = changed
        self._stopping = False
        self._pidfd: int | None = None
        self._pipe: int | None = None
        self._said = b""
        self._backstop: asyncio.TimerHandle | None = None

    @property
    def observation(self) -> Observation:
        return Observation(
            node=self.record.key,
            status=self.status,
            end=self.end,
            host=os.uname().nodename,
            address=self.record.address,
        )

    def launched(self, pid: int, pipe: int) -> None:
        """Watch the shim with this pid, which reports through `pipe`. This object closes `pipe`."""
        start = start_time(pid)  # the child was not reaped yet, so the pid is still its own
        self.record = msgspec.structs.replace(
            self.record, shim_pid=pid, shim_start=start, boot=processes.boot_id(), launched_at=time.time()
        )
        self._pipe = pipe
        os.set_blocking(pipe, False)
        loop = asyncio.get_running_loop()
        loop.add_reader(pipe, self._read_pipe)
        self._set(NodeStatus.STARTING)
        self._watch(os.pidfd_open(pid))

    def could_not_start(self, exit_code: int, sentence: str) -> None:
        ended = files.ExitFile(exit_code=exit_code, ended_at=time.time(), error=sentence)
        with contextlib.suppress(OSError):  # perhaps the very reason for which it could not start
            files.write(self._directory / "exit.json", ended)
        self._end_with(*files.outcome(ended))

    def adopt(self) -> None:
        """Read the status of a node that an earlier master launched, and watch the node if it lives.

        `changed` is not called. A node that lives is `RUNNING`, even in the 20 ms in which its shim starts the command.
        """
        changed, self._changed = self._changed, lambda observation: None
        self._find()
        self._changed = changed

    def _find(self) -> None:
        stop = files.read(self._directory / "stop.json", files.StopFile)
        self._stopping = stop is not None
        if self._ended_by_file():
            return
        record = self.record
        pid, start, boot = record.shim_pid, record.shim_start, record.boot
        if not pid and (found := processes.find_shim(self._directory)) is not None:
            pid, start, boot = found, start_time(found), processes.boot_id()
            self.record = msgspec.structs.replace(record, shim_pid=pid, shim_start=start, boot=boot)
        pidfd = processes.open_pidfd(pid, start) if boot == processes.boot_id() else None
        if pidfd is None:
            if not self._ended_by_file():  # the node may have ended since the first look
                self._lost(session=None)
            return
        self.status = NodeStatus.RUNNING
        self._watch(pidfd)
        if stop is not None:  # the earlier master may have died between the file and the signal
            self._ask_to_end(stop.grace + BACKSTOP)

    def stop(self, grace: Seconds) -> None:
        """End the node with SIGTERM, and after `grace` with SIGKILL. Another call can only shorten the grace."""
        self._stopping = True
        patience = grace + BACKSTOP
        try:
            files.write(self._directory / "stop.json", files.StopFile(grace=grace))
        except OSError:
            patience = grace  # the shim cannot know the grace
        if self.status.ended:
            self._set(NodeStatus.DELETED)
        else:
            self._ask_to_end(patience)

    def release(self) -> None:
        _close(self._pipe)
        _close(self._pidfd)
        self._pipe = self._pidfd = None
        if self._backstop is not None:
            self._backstop.cancel()

    def _set(self, status: NodeStatus) -> None:
        self.status = status
        asyncio.get_running_loop().call_soon(self._changed, self.observation)

    def _watch(self, pidfd: int) -> None:
        self._pidfd = pidfd
        asyncio.get_running_loop().add_reader(pidfd, self._shim_ended)

    def _ask_to_end(self, patience: float) -> None:
        self._signal_shim(signal.SIGTERM)
        if self._backstop is not None:
            self._backstop.cancel()
        self._backstop = asyncio.get_running_loop().call_later(patience, self._signal_shim, signal.SIGKILL)

    def _signal_shim(self, number: signal.Signals) -> None:
        if self._pidfd is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, number)

    def _read_pipe(self) -> None:
        if self._pipe is None:
            return
        try:
            while chunk := os.read(self._pipe, 65536):
                self._said += chunk
        except BlockingIOError:
            pass
        else:
            _close(self._pipe)
            self._pipe = None
        *lines, self._said = self._said.split(b"\n")
        for line in lines:
            self._hear(line)

    def _hear(self, line: bytes) -> None:
        word, _, rest = line.partition(b" ")
        if self.status.ended:
            return
        if word == b"running":
            self.record = msgspec.structs.replace(self.record, pid=int(rest))
            self._set(NodeStatus.RUNNING)
        elif word == b"ended":
            self._end_with(*files.outcome(msgspec.json.decode(rest, type=files.ExitFile), self.record.memory))

    def _shim_ended(self) -> None:
        self._read_pipe()
        if self._pidfd is not None:
            processes.collect(self._pidfd)
            _close(self._pidfd)
            self._pidfd = None
        if not self.status.ended and not self._ended_by_file():
            self._lost(session=self.record.pid or None)

    def _ended_by_file(self) -> bool:
        ended = files.read(self._directory / "exit.json", files.ExitFile)
        if ended is not None:
            self._end_with(*files.outcome(ended, self.record.memory))
        return ended is not None

    def _lost(self, session: int | None) -> None:
        if not self.record.boot or self.record.boot == processes.boot_id():
            processes.kill_strays(self._directory, session)
        if self.record.cgroup:
            self._remove_cgroup(tries=40)
        self._end_with(NodeStatus.FAILED, files.lost(self.record))

    def _remove_cgroup(self, tries: int) -> None:
        """Remove the node's cgroup. Retry up to `tries` times, because killed processes may leave it with a delay."""
        remove_cgroup(self.record.cgroup)
        if tries and os.path.exists(self.record.cgroup):
            asyncio.get_running_loop().call_later(0.05, self._remove_cgroup, tries - 1)

    def _end_with(self, status: NodeStatus, end: NodeEnd) -> None:
        self.end = end
        if self._backstop is not None:
            self._backstop.cancel()
        self._set(NodeStatus.DELETED if self._stopping else status)


def _close(watched: int | None) -> None:
    if watched is not None:
        asyncio.get_running_loop().remove_reader(watched)
        os.close(watched)
