"""The training process's end of the channel to its own agent: a plain blocking Unix socket, safe in threads and forks.

It must never hurt the training it serves. Importing it costs msgspec and the standard library's `socket`, no asyncio
and no RPC library. Reporting a step never waits and never raises. A data loader that forks gets its own connection
under its own name. When the agent goes away and comes back, unanswered requests are repeated under their old numbers.
The receiver must tell them apart by `(worker, request)`, as every message may arrive twice.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import itertools
import os
import select
import socket
import threading
import time
import weakref
from typing import overload

import msgspec

from resile.api.ids import NO_ROUND, Round, Seconds
from resile.common import unix_sockets
from resile.protocol.agent_to_master import StepReport
from resile.protocol.shards import (
    DatasetOpen,
    OpenDataset,
    ShardAnswer,
    ShardGranted,
    ShardMessage,
    ShardNoted,
    ShardProgress,
    TakeShard,
)
from resile.protocol.worker_to_agent import Attach
from resile.wire.env import AGENT_SOCKET, OWNER, ROUND, WORKER
from resile.wire.frames import MAX_FRAME, BadFrame, FrameDecoder, MessageDecoder, encode

STEP_INTERVAL = Seconds(0.05)
"""Steps are reported at most this often: 20 a second show progress well, whatever the step rate."""

RETRY = Seconds(0.2)
"""Seconds before connecting again to an agent that could not be reached."""

LONGEST_POLL = Seconds(1.0)
"""How often the reading thread looks for bytes that another thread could not send at once."""


class AgentNotAnswering(TimeoutError):
    """The agent did not answer in time; the text is one sentence."""


class AgentClient:
    """One training process's connection to its agent. Any thread may use it."""

    def __init__(self, path: str, worker: str, round: Round = NO_ROUND) -> None:
        self.round = round
        """The round that step reports name. A process that regroups without a restart sets it anew."""
        self._path = path
        self._name = worker
        self._decoder = MessageDecoder(ShardAnswer)
        self._held: StepReport | None = None
        self._start(worker)
        channel = weakref.ref(self)

        def in_child() -> None:
            if (me := channel()) is not None:
                me._after_fork()

        os.register_at_fork(after_in_child=in_child)

    @classmethod
    def from_environment(cls) -> AgentClient | None:
        """The client of this process, the same one at every call; None if no agent started the process."""
        path, worker = os.environ.get(AGENT_SOCKET), os.environ.get(WORKER)
        if not path or not worker:
            return None
        return _channel_of_process(path, worker)

    # steps ------------------------------------------------------------------------------------------------------------

    def report_step(self, step: int, total: int = 0) -> None:
        """Report that training has completed `step` steps of `total` (0 = unknown). Never waits, never raises.

        The first step of a round is sent at once. A step that comes less than STEP_INTERVAL after the last report is
        held back. It is sent with a later call or request or at exit, unless a newer step replaces it.
        """
        self._held = StepReport(round=self.round, step=step, total=total)
        early = self._told_in == self.round and time.monotonic() < self._next_step
        if not early:
            self.flush()

    def flush(self) -> None:
        """Send a held-back step now, if that is possible without waiting."""
        if self._turn.acquire(blocking=False):
            try:
                self._tell_step()
            finally:
                self._turn.release()

    # requests ---------------------------------------------------------------------------------------------------------

    @overload
    def request(self, message: OpenDataset, timeout: float) -> DatasetOpen: ...
    @overload
    def request(self, message: TakeShard, timeout: float) -> ShardGranted: ...
    @overload
    def request(self, message: ShardProgress, timeout: float) -> ShardNoted: ...

    def request(self, message: ShardMessage, timeout: float) -> ShardAnswer:
        """Send a request and return its answer. Other threads can send requests while this one waits.

        This sets `worker` and `request` of the message, so give `""` and 0. While the agent is away, this tries to
        connect again and again. Raises AgentNotAnswering after `timeout` seconds (`math.inf`: never). A later call with
        an equal message waits for the answer to the first one, so a shard that was granted late is not lost.
        """
        deadline = time.monotonic() + timeout
        with self._turn:
            self._tell_step()
            number = self._submit(message)
            while number not in self._answers:
                left = deadline - time.monotonic()
                if left <= 0:
                    self._late.setdefault(message, []).append(number)
                    raise AgentNotAnswering(f"the agent did not answer {type(message).__name__} within {timeout:g} s")
                if self._reading:
                    self._turn.wait(min(left, threading.TIMEOUT_MAX))
                else:
                    self._read(left)
            del self._open[number]
            return self._answers.pop(number)

    def close(self) -> None:
        """Send the last step and disconnect. A later report or request connects again."""
        with self._turn:
            self._tell_step()
            self._hang_up()

    # inside: all of it with the lock held -----------------------------------------------------------------------------

    def _start(self, worker: str) -> None:
        self.worker = worker
        """The name that this process gives to its agent. A forked child adds its pid to it."""
        self._turn = threading.Condition(threading.Lock())
        self._socket: socket.socket | None = None
        self._frames = FrameDecoder(MAX_FRAME)
        self._unsent = b""
        self._reading = False
        self._numbers = itertools.count(1)
        self._open: dict[int, bytes] = {}
        self._answers: dict[int, ShardAnswer] = {}
        self._late: dict[ShardMessage, list[int]] = {}
        self._held = None
        self._next_step = 0.0
        self._told_in: Round | None = None
        """The round of the last step that was reported."""
        self._next_call = 0.0

    def _after_fork(self) -> None:
        """In a forked child, close the inherited socket and begin anew. The parent's connection stays open."""
        inherited = self._socket
        self._start(f"{self._name}/{os.getpid()}")
        if inherited is not None:
            inherited.close()

    def _tell_step(self) -> None:
        if self._held is None or self._connected() is None:
            return
        self._write(b"")  # an agent that stood still may read again
        if self._socket is None or self._unsent:
            return
        held, self._held = self._held, None
        self._next_step, self._told_in = time.monotonic() + STEP_INTERVAL, held.round
        self._write(encode(held))

    def _submit(self, message: ShardMessage) -> int:
        if late := self._late.get(message):
            number = late.pop(0)
            if not late:
                del self._late[message]
            return number
        number = next(self._numbers)
        frame = encode(msgspec.structs.replace(message, worker=self.worker, request=number), MAX_FRAME)
        # Connect first: connecting sends the open requests, and this one must not go twice.
        line = self._connected()
        self._open[number] = frame
        if line is not None:
            self._write(frame)
        return number

    def _connected(self) -> socket.socket | None:
        """The connection. If there is none, connect without waiting. None if the agent cannot be reached now."""
        if self._socket is not None or time.monotonic() < self._next_call:
            return self._socket
        line = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        line.setblocking(False)
        try:
            unix_sockets.connect(line, self._path)
        except OSError:
            line.close()
            self._next_call = time.monotonic() + RETRY
            return None
        self._socket, self._frames, self._unsent = line, FrameDecoder(MAX_FRAME), b""
        self._write(encode(Attach(worker=self.worker)) + b"".join(self._open.values()))
        return self._socket

    def _write(self, data: bytes) -> None:
        """Send as many bytes as the kernel takes now. Later calls send the rest first, so a frame is never torn."""
        self._unsent += data
        if self._socket is None or not self._unsent:
            return
        try:
            sent = self._socket.send(self._unsent)
        except BlockingIOError:
            return
        except OSError:
            self._hang_up()
            return
        self._unsent = self._unsent[sent:]

    def _read(self, patience: float) -> None:
        """Wait up to `patience` seconds for answers, and note them, even those to requests of other threads.

        The lock is released during the wait. Without a connection this waits at most RETRY seconds.
        """
        line = self._connected()
        if line is None:
            self._turn.wait(min(patience, RETRY))
            return
        watch = select.poll()
        watch.register(line, select.POLLIN | (select.POLLOUT if self._unsent else 0))
        self._reading = True
        self._turn.release()
        try:
            watch.poll(min(patience, LONGEST_POLL) * 1000)
        finally:
            self._turn.acquire()
            self._reading = False
            self._turn.notify_all()
        self._write(b"")
        if self._socket is not line:
            line.close()
            return
        try:
            data = line.recv(64 * 1024)
            bodies = self._frames.feed(data)
            answers = [self._decoder.decode(body) for body in bodies]
        except BlockingIOError:
            return
        except (OSError, BadFrame):
            self._hang_up()
            return
        if not data:
            self._hang_up()
        for answer in answers:
            if isinstance(answer, ShardAnswer) and answer.request in self._open:
                self._answers[answer.request] = answer

    def _hang_up(self) -> None:
        """Close the connection. A thread that waits for an answer wakes up and connects again."""
        line, self._socket = self._socket, None
        self._unsent = b""
        if line is None:
            return
        if self._reading:
            # If the descriptor were closed under another thread's poll, a new file could take its number.
            with contextlib.suppress(OSError):  # gone already, which wakes the reader as well
                line.shutdown(socket.SHUT_RDWR)
        else:
            line.close()


@functools.cache
def _channel_of_process(path: str, worker: str) -> AgentClient:
    pid = str(os.getpid())
    name = worker if os.environ.setdefault(OWNER, pid) == pid else f"{worker}/{pid}"
    try:
        round = Round(int(os.environ.get(ROUND, "0")))
    except ValueError:
        round = NO_ROUND
    channel = AgentClient(path, name, round)
    atexit.register(channel.flush)
    return channel
