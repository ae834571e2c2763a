"""Connects a training process to the agent that owns its buffers: a Unix socket with one packet per message.

This socket is separate from the one for steps and shards because it passes file descriptors, and because a process that
never saves a checkpoint should not depend on it. Access is guarded in the same way: the socket lies in the agent's
private directory, and the agent rejects processes of other users.
"""

from __future__ import annotations

import os
import select
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import msgspec

from resile.checkpoint.buffer import Buffer
from resile.common import unix_sockets

SOCKET = "checkpoint.sock"
MAX_PACKET = 64 * 1024
BUFFERS = 2
MAX_LOCAL_RANKS = 4096
MAX_COPIES = 250
"""Most replicas in an answer: their file descriptors fit into one packet."""
COPY_GRACE = 15.0
"""Seconds that a copy to another node may take in addition to the time for its bytes (`COPY_SLOWEST`)."""
COPY_SLOWEST = 8 << 20
"""Bytes per second. A copy that is slower is abandoned."""
REMEMBERED = 16
"""Outcomes of saves that are kept until a caller asks for them."""


class _Request(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    pass


class Open(_Request, frozen=True, kw_only=True):
    """Asks for the buffers of the process with this local rank. `worker` names the process that asks."""

    worker: str
    local_rank: int
    reads: bool = False
    """True if the buffers belong to another process and are only read."""


class Opened(_Request, frozen=True, kw_only=True):
    """Answers `Open` with the buffers as file descriptors, or with an `error`."""

    error: str = ""


class Reserve(_Request, frozen=True, kw_only=True):
    size: int


class Reserved(_Request, frozen=True, kw_only=True):
    error: str = ""


class Store(_Request, frozen=True, kw_only=True):
    buffer: int
    sequence: int


class Stored(_Request, frozen=True, kw_only=True):
    sequence: int
    error: str = ""


class AskReplica(_Request, frozen=True, kw_only=True):
    """Asks whether this node has a partner, which keeps its replicas."""


class ReplicaIs(_Request, frozen=True, kw_only=True):
    there: bool


class SendReplica(_Request, frozen=True, kw_only=True):
    buffer: int
    sequence: int


class ReplicaSent(_Request, frozen=True, kw_only=True):
    sequence: int
    error: str = ""


class OpenReplicas(_Request, frozen=True, kw_only=True):
    """Asks this node's agent for the replicas that it keeps for another node."""


class ReplicasOpened(_Request, frozen=True, kw_only=True):
    """Answers `OpenReplicas` with the replicas as file descriptors."""


ToAgent = Open | Reserve | Store | AskReplica | SendReplica | OpenReplicas
FromAgent = Opened | Reserved | Stored | ReplicaIs | ReplicaSent | ReplicasOpened
_decoder = msgspec.msgpack.Decoder(FromAgent)
T = TypeVar("T")
W = TypeVar("W", bound=_Request)


def copied_within(length: int, ranks: int) -> float:
    """How many seconds an agent may take to copy a save of all its ranks to the partner. A slower copy is abandoned.

    `ranks` is the number of these ranks. Each has `length` bytes, and they are copied one after another.
    """
    return ranks * (2 * COPY_GRACE + length / COPY_SLOWEST)


class NoCheckpointServer(Exception):
    """Raised if the agent provides no buffers. The message is one sentence."""


class MemoryClient:
    """Connects a training process to the agent, for the buffers of one local rank. Any thread may use it."""

    def __init__(
        self, agent_socket: str, worker: str, local_rank: int, *, reads: bool = False, patience: float = 10.0
    ) -> None:
        """Connect to the checkpoint socket beside `agent_socket` and ask for the buffers of `local_rank`.

        Set `reads` if the buffers belong to another process, and this one only reads them. `patience` is how many
        seconds to wait for each answer. Raises NoCheckpointServer if the agent does not answer, or has no buffers.
        """
        self._patience = patience
        self._asking = threading.Lock()
        """Held from question to answer, because an answer does not say which question it belongs to."""
        self._turn = threading.Condition()
        """Guards all fields below; notified whenever a thread has read the socket."""
        self._listening = False
        """True while a thread waits at the socket without holding the lock."""
        self._wanted: type[_Request] | None = None
        self._answer: tuple[FromAgent, list[int]] | None = None
        self._stored: dict[int, str] = {}
        self._copied: dict[int, str] = {}
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._socket.settimeout(patience)
            unix_sockets.connect(self._socket, Path(agent_socket).with_name(SOCKET))
            self._socket.send(msgspec.msgpack.encode(Open(worker=worker, local_rank=local_rank, reads=reads)))
            packet, descriptors, _, _ = socket.recv_fds(self._socket, MAX_PACKET, BUFFERS)
            answer = _decoder.decode(packet)
        except (OSError, ValueError) as error:
            self._socket.close()
            raise NoCheckpointServer(f"the agent gives no memory for checkpoints: {error}") from None
        if not isinstance(answer, Opened) or answer.error or len(descriptors) != BUFFERS:
            for descriptor in descriptors:
                os.close(descriptor)
            self._socket.close()
            raise NoCheckpointServer(
                answer.error if isinstance(answer, Opened) else "the agent gives no memory for checkpoints"
            )
        self.buffers = [_own(descriptor) for descriptor in descriptors]
        self._socket.setblocking(False)

    def make_room(self, size: int) -> str:
        """Have the agent grow each buffer to at least `size` bytes. Returns "", or the reason if that failed."""
        if all(buffer.size >= size for buffer in self.buffers):
            return ""
        try:
            return self._ask(Reserve(size=size), Reserved)[0].error
        except OSError as error:
            return f"the agent does not answer: {error}"

    def store(self, buffer: int, sequence: int) -> bool:
        """Ask the agent to write a buffer to storage; `wait` returns the outcome. False if the agent is gone."""
        return self._tell(Store(buffer=buffer, sequence=sequence))

    def wait(self, sequence: int, timeout: float) -> str | None:
        """Wait until checkpoint `sequence` is stored. Returns "", the reason if that failed, or None at `timeout`."""
        answer = self._outcome(self._stored, sequence, timeout)
        self._stored.pop(sequence, None)
        return answer

    def has_partner(self) -> bool:
        """True if another node keeps replicas for this one; False also if the agent does not answer."""
        try:
            return self._ask(AskReplica(), ReplicaIs)[0].there
        except OSError:
            return False

    def copy_out(self, buffer: int, sequence: int) -> bool:
        """Ask the agent to copy a buffer to the partner; `copied` returns the outcome. False if the agent is gone."""
        return self._tell(SendReplica(buffer=buffer, sequence=sequence))

    def copied(self, sequence: int, timeout: float = 0.0) -> str | None:
        """Wait until checkpoint `sequence` is copied. Returns "", the reason if that failed, or None at `timeout`."""
        return self._outcome(self._copied, sequence, timeout)

    def copies(self) -> list[Buffer]:
        """The replicas that this node keeps for another; empty if the agent does not answer. The caller closes them."""
        try:
            return [_own(descriptor) for descriptor in self._ask(OpenReplicas(), ReplicasOpened)[1]]
        except OSError:
            return []

    def close(self) -> None:
        """Disconnect. The agent keeps the buffers."""
        self._socket.close()
        for buffer in self.buffers:
            buffer.close()

    def _outcome(self, known: dict[int, str], sequence: int, timeout: float) -> str | None:
        try:
            return self._awaited(lambda: known.get(sequence), timeout)
        except OSError as error:
            return f"the agent does not answer: {error}"

    def _ask(self, word: ToAgent, kind: type[W]) -> tuple[W, list[int]]:
        """Send `word` and return the answer of type `kind` with its file descriptors. Raises OSError if none came."""
        with self._asking:
            with self._turn:
                self._take()  # drops a late answer to an earlier question
                self._wanted = kind
            try:
                self._say(word)
                answered = self._awaited(self._answered, self._patience)
            finally:
                with self._turn:
                    self._wanted = None
                    _drop(self._answered())  # it came too late
        if answered is None:
            raise TimeoutError("no answer in time")
        answer, descriptors = answered
        assert isinstance(answer, kind)
        return answer, descriptors

    def _answered(self) -> tuple[FromAgent, list[int]] | None:
        answer, self._answer = self._answer, None
        return answer

    def _tell(self, word: ToAgent) -> bool:
        try:
            self._say(word)
            return True
        except OSError:
            return False

    def _say(self, word: ToAgent) -> None:
        """Read all messages that have arrived, then send a message to the agent.

        Reading comes first because the agent drops its answers to a process that does not read.
        """
        packet = msgspec.msgpack.encode(word)
        with self._turn:
            self._take()
            try:
                self._socket.send(packet)
            except BlockingIOError:
                if not _ready(self._socket, select.POLLOUT, self._patience):
                    raise TimeoutError("it does not listen") from None
                self._socket.send(packet)

    def _awaited(self, known: Callable[[], T | None], timeout: float) -> T | None:
        """Wait until `known()` is not None and return it; None after `timeout`. Raises OSError if the agent is gone."""
        deadline = time.monotonic() + timeout
        with self._turn:
            while True:
                if (found := known()) is None:
                    self._take()
                    found = known()
                if found is not None:
                    return found
                if (left := deadline - time.monotonic()) <= 0:
                    return None
                if self._listening:
                    self._turn.wait(left)
                    continue
                self._listening = True
                self._turn.release()
                try:
                    _ready(self._socket, select.POLLIN, left)
                finally:
                    self._turn.acquire()
                    self._listening = False
                    self._turn.notify_all()  # the others look at what came, and one of them reads on

    def _take(self) -> None:
        """Read and handle all packets that have arrived. Does nothing while another thread waits at the socket."""
        while not self._listening:
            try:
                packet, descriptors, _, _ = socket.recv_fds(self._socket, MAX_PACKET, MAX_COPIES)
            except BlockingIOError:
                return
            self._hear(packet, descriptors)

    def _hear(self, packet: bytes, descriptors: list[int]) -> None:
        if not packet:
            raise ConnectionError("it hung up")
        try:
            answer: FromAgent = _decoder.decode(packet)
        except ValueError as error:
            raise ConnectionError(str(error)) from None
        if isinstance(answer, Stored | ReplicaSent):
            known = self._stored if isinstance(answer, Stored) else self._copied
            known[answer.sequence] = answer.error
            while len(known) > REMEMBERED:  # of saves that no caller asked about
                known.pop(min(known))
        elif self._wanted is not None and isinstance(answer, self._wanted):
            self._wanted, self._answer = None, (answer, descriptors)
        else:
            _drop((answer, descriptors))


def _own(descriptor: int) -> Buffer:
    os.set_inheritable(descriptor, False)
    return Buffer(descriptor)


def _ready(sock: socket.socket, event: int, timeout: float) -> bool:
    poll = select.poll()
    poll.register(sock, event)
    return bool(poll.poll(1000 * timeout))


def _drop(answer: tuple[FromAgent, list[int]] | None) -> None:
    for descriptor in answer[1] if answer is not None else ():
        os.close(descriptor)
