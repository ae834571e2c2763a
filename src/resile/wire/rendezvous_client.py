"""An elastic training process's connection to its agent, on which it joins rounds and learns that a round is over.

It is separate from `AgentClient`, because the message that a round is over must reach a process that is blocked in a
collective. A thread listens for it. The thread holds no lock of the training and ends with the process. Nothing is
repeated here: a connection that breaks means that the agent is gone, and this process ends with it.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Callable

from resile.api.ids import NO_ROUND, Round
from resile.common import unix_sockets
from resile.protocol.agent_to_master import LastStepTaken
from resile.protocol.master_to_agent import RoundComplete, RoundOver
from resile.protocol.message import Message
from resile.protocol.worker_to_agent import RendezvousMessage, WorkerAssignment, WorkerReady
from resile.wire.env import AGENT_SOCKET, WORKER
from resile.wire.frames import MAX_FRAME, BadFrame, FrameDecoder, MessageDecoder, encode

CALL_TIMEOUT = 10.0
"""Seconds for an agent on the same machine to take a connection."""


class ConnectionBroken(ConnectionError):
    """The agent hung up or cannot be reached; the text is one sentence."""


class RendezvousClient:
    """A training process's connection to its agent for joining rounds.

    Only one thread at a time may call `ready`. `on_over` is called on a thread of the client.
    """

    def __init__(self, path: str, worker: str, on_over: Callable[[Round], None]) -> None:
        """Connect to the agent and listen for its messages. Raises ConnectionBroken if no agent listens at `path`.

        `on_over` is called with the number of a round that is over; it must not block and must not raise.
        """
        self._worker = worker
        self._on_over = on_over
        self._turn = threading.Condition()
        self._placed: WorkerAssignment | None = None
        self._over: Round = NO_ROUND
        self._complete: Round = NO_ROUND
        self._left: Round = NO_ROUND
        """The newest round whose end does not matter any more, because `complete` let the process go on."""
        self._broken = ""
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.settimeout(CALL_TIMEOUT)
        try:
            unix_sockets.connect(self._socket, path)
        except OSError as error:
            self._socket.close()
            raise ConnectionBroken(f"the agent cannot be reached at {path}: {error.strerror or error}") from None
        self._socket.settimeout(None)
        self._thread = threading.Thread(target=self._listen, name="resile-rounds", daemon=True)
        self._thread.start()

    @classmethod
    def from_environment(cls, on_over: Callable[[Round], None]) -> RendezvousClient | None:
        """A new client for this process; None if no agent started the process."""
        path, worker = os.environ.get(AGENT_SOCKET), os.environ.get(WORKER)
        return cls(path, worker, on_over) if path and worker else None

    def over(self, round_: Round) -> bool:
        return round_ <= self._over

    def is_complete(self, round_: Round) -> bool:
        """True if the agent has said that all members of `round_` took the last step."""
        return round_ <= self._complete

    def await_over(self, round_: Round, timeout: float) -> bool:
        """Wait until the agent says that `round_` is over, and return True.

        Returns False after `timeout` seconds, or if the agent is gone.
        """
        with self._turn:
            self._turn.wait_for(lambda: self.over(round_) or bool(self._broken), timeout)
            return self.over(round_)

    def ready(self, step: int, timeout: float | None = None, *, holds: Round = NO_ROUND) -> WorkerAssignment:
        """Report that this process is in no round. Wait for its assignment to the next round, and return that.

        `step` is the number of steps completed. `holds` is the last round in which this process agreed with all members
        on one state. Raises ConnectionBroken if the agent is gone, TimeoutError if no assignment came within `timeout`
        seconds.
        """
        with self._turn:
            self._placed = None
            try:
                self._socket.sendall(encode(WorkerReady(worker=self._worker, step=step, holds=holds)))
            except OSError as error:
                self._broken = self._broken or f"the agent hung up: {error.strerror or error}"
            self._turn.wait_for(lambda: self._placed is not None or bool(self._broken), timeout)
            return self._answer(timeout)

    def _answer(self, timeout: float | None) -> WorkerAssignment:
        if self._placed is not None:
            return self._placed
        if self._broken:
            raise ConnectionBroken(self._broken)
        raise TimeoutError(f"no round had a place for this process within {timeout:g} s")

    def complete(self, round_: Round, timeout: float) -> bool:
        """Report that all members of `round_` have taken the last step. After that, newcomers do not end the round.

        Returns False if a member was lost or a newcomer joined before, so that the round is over. Returns True if the
        master has noted the report, if there is no answer within `timeout` seconds, or if the agent is gone.
        """
        with contextlib.suppress(OSError):  # the agent hung up
            self._socket.sendall(encode(LastStepTaken(round=round_)))
        with self._turn:
            self._turn.wait_for(lambda: self.is_complete(round_) or self.over(round_) or bool(self._broken), timeout)
            goes_on = self.is_complete(round_) or not self.over(round_)
            if goes_on:
                self._left = round_
            return goes_on

    def close(self) -> None:
        with self._turn:
            self._broken = self._broken or "this process hung up"
        with contextlib.suppress(OSError):  # the agent closed it first
            self._socket.shutdown(socket.SHUT_RDWR)
        if threading.current_thread() is not self._thread:
            self._thread.join(CALL_TIMEOUT)
        self._socket.close()

    def _listen(self) -> None:
        frames, decoder = FrameDecoder(MAX_FRAME), MessageDecoder(RendezvousMessage)
        why = "the agent hung up"
        try:
            while data := self._socket.recv(64 * 1024):
                for body in frames.feed(data):
                    self._hear(decoder.decode(body))
        except (OSError, BadFrame) as error:
            why = f"the line to the agent broke: {error}"
        with self._turn:
            self._broken = self._broken or why
            self._turn.notify_all()

    def _hear(self, message: Message) -> None:
        with self._turn:
            match message:
                case WorkerAssignment():
                    self._placed = message
                case RoundComplete():
                    self._complete = max(self._complete, message.round)
                case RoundOver():
                    self._over = max(self._over, message.round)
            self._turn.notify_all()
            left = self._left
        if isinstance(message, RoundOver) and message.round > left:
            self._on_over(message.round)
