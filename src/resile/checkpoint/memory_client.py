"""Between a training process and the agent that owns its buffers: a Unix socket of its own, one packet a message.

Apart from the channel for steps and shards because it hands over file descriptors, and because a process that never
saves a checkpoint should not know of it. Who may talk is decided as there: the socket lies in the agent's private
directory, and another user's process is turned away.
"""

from __future__ import annotations

import os
import select
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn, TypeVar

import msgspec

from resile.checkpoint.buffer import Buffer
from resile.common import unix_sockets

SOCKET = "checkpoint.sock"
"""Beside the agent's own."""
MAX_PACKET = 64 * 1024
BUFFERS = 2
MAX_LOCAL_RANKS = 4096
MAX_COPIES = 250
"""Descriptors that fit into one packet."""
COPY_GRACE = 15.0
"""Seconds that a copy to another node has in any case."""
COPY_SLOWEST = 8 << 20
"""Bytes a second below which it is given up."""
REMEMBERED = 16
"""Answers about storage that are kept for somebody to ask."""


class _Request(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    pass


class Open(_Request, frozen=True, kw_only=True):
    """Give me the buffers of the process with this local rank."""

    worker: str
    local_rank: int
    reads: bool = False
    """They are another process's, and only looked at."""


class Opened(_Request, frozen=True, kw_only=True):
    """Here they are (as descriptors), unless there is an `error`."""

    error: str = ""


class Reserve(_Request, frozen=True, kw_only=True):
    """Make each of my buffers at least `size` bytes."""

    size: int


class Reserved(_Request, frozen=True, kw_only=True):
    """It is, unless there is an `error`."""

    error: str = ""


class Store(_Request, frozen=True, kw_only=True):
    """Write what was committed as `sequence` in that buffer to storage."""

    buffer: int
    sequence: int


class Stored(_Request, frozen=True, kw_only=True):
    """Done with it, unless there is an `error`."""

    sequence: int
    error: str = ""


class AskReplica(_Request, frozen=True, kw_only=True):
    """Is there another node that keeps copies for this one?"""


class ReplicaIs(_Request, frozen=True, kw_only=True):
    """The answer."""

    there: bool


class FetchReplica(_Request, frozen=True, kw_only=True):
    """Bring what was committed as `sequence` in that buffer to the other node."""

    buffer: int
    sequence: int


class ReplicaFetched(_Request, frozen=True, kw_only=True):
    """It is there, unless there is an `error`."""

    sequence: int
    error: str = ""


class OpenReplicas(_Request, frozen=True, kw_only=True):
    """Give me the copies that this node keeps for another."""


class ReplicasOpened(_Request, frozen=True, kw_only=True):
    """Here they are, as descriptors."""


ToAgent = Open | Reserve | Store | AskReplica | FetchReplica | OpenReplicas
FromAgent = Opened | Reserved | Stored | ReplicaIs | ReplicaFetched | ReplicasOpened
_decoder = msgspec.msgpack.Decoder(FromAgent)
T = TypeVar("T")
W = TypeVar("W", bound=_Request)


def copied_within(length: int, ranks: int) -> float:
    """Seconds in which an agent has made copies of so many bytes of each of its ranks, one by one, or has given up."""
    return ranks * (2 * COPY_GRACE + length / COPY_SLOWEST)


class NoCheckpointServer(Exception):
    """There are no buffers to be had from the agent; the text is one sentence."""


class MemoryClient:
    """A training process's line to the buffers of one local rank. Any thread may use it.

    Of several threads that wait one listens, and tells the others what it hears.
    """

    def __init__(
        self, agent_socket: str, worker: str, local_rank: int, *, reads: bool = False, patience: float = 10.0
    ) -> None:
        """Ask for the buffers.

        Args:
            agent_socket: the agent's own socket; this line's lies beside it.
            worker: the name of this process.
            local_rank: whose buffers.
            reads: they are another process's, and only looked at.
            patience: seconds that the agent has for each answer.

        Raises:
            NoCheckpointServer: the agent does not answer, or has none.
        """
        self._patience = patience
        self._asking = threading.Lock()
        """One question at a time: its answer does not say whose it is."""
        self._turn = threading.Condition()
        """Guards all below; told when somebody has listened."""
        self._listening = False
        """Whether a thread waits at the socket, without the lock."""
        self._wanted: type[_Request] | None = None
        """The kind of answer that the question under way asks for."""
        self._answer: tuple[FromAgent, list[int]] | None = None
        """To that question, with the descriptors that came with it."""
        self._stored: dict[int, str] = {}
        self._copied: dict[int, str] = {}
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._socket.settimeout(patience)
            unix_sockets.connect(self._socket, Path(agent_socket).with_name(SOCKET))
            self._socket.send(msgspec.msgpack.encode(Open(worker=worker, local_rank=local_rank, reads=reads)))
            packet, descriptors, _, _ = socket.recv_fds(self._socket, MAX_PACKET, BUFFERS)
            answer = _decoder.decode(packet)
        except (OSError, msgspec.MsgspecError) as error:
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
        """Have each buffer made at least this large; an empty answer, or the sentence that says why not."""
        if all(buffer.size >= size for buffer in self.buffers):
            return ""
        try:
            return self._ask(Reserve(size=size), Reserved)[0].error
        except OSError as error:
            return f"the agent does not answer: {error}"

    def store(self, buffer: int, sequence: int) -> bool:
        """Have a buffer written to storage; `wait` tells when it is. False: the agent does not take the word."""
        return self._tell(Store(buffer=buffer, sequence=sequence))

    def wait(self, sequence: int, timeout: float) -> str | None:
        """Wait until it is stored: an empty answer, or the sentence that says why it is not; None: not in time."""
        answer = self._outcome(self._stored, sequence, timeout)
        self._stored.pop(sequence, None)
        return answer

    def has_partner(self) -> bool:
        """Whether there is another node that keeps copies for this one."""
        try:
            return self._ask(AskReplica(), ReplicaIs)[0].there
        except OSError:
            return False

    def copy_out(self, buffer: int, sequence: int) -> bool:
        """Have a buffer copied to the other node; `copied` tells when it is. False: the agent does not answer."""
        return self._tell(FetchReplica(buffer=buffer, sequence=sequence))

    def copied(self, sequence: int, timeout: float = 0.0) -> str | None:
        """Whether the other node has it: an empty answer, or the sentence that says why not; None: not yet."""
        return self._outcome(self._copied, sequence, timeout)

    def copies(self) -> list[Buffer]:
        """The buffers in which this node keeps copies for another; whoever asked closes them."""
        try:
            return [_own(descriptor) for descriptor in self._ask(OpenReplicas(), ReplicasOpened)[1]]
        except OSError:
            return []

    def close(self) -> None:
        """Hang up. The agent keeps the buffers."""
        self._socket.close()
        for buffer in self.buffers:
            buffer.close()

    def _outcome(self, known: dict[int, str], sequence: int, timeout: float) -> str | None:
        """What the agent says of a save, as soon as it does; None: not in time."""
        try:
            return self._awaited(lambda: known.get(sequence), timeout)
        except OSError as error:
            return f"the agent does not answer: {error}"

    def _ask(self, word: ToAgent, kind: type[W]) -> tuple[W, list[int]]:
        """The agent's answer of that kind, and the descriptors that came with it.

        Raises:
            OSError: there is none.
        """
        with self._asking:
            with self._turn:
                self._take()  # an answer to a question that was given up, maybe
                self._wanted = kind
            try:
                self._say(word)
                answer, descriptors = self._awaited(self._answered, self._patience) or _no_answer()
            finally:
                with self._turn:
                    self._wanted = None
                    _drop(self._answered())  # it came too late
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
        """Say something, and first take what the agent has said: it does not wait for one that does not listen."""
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
        """What is known, as soon as it is; None: not in time. Others use the line meanwhile.

        Raises:
            OSError: the agent is gone.
        """
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
                    self._turn.notify_all()  # they look at what came, and one of them listens from now on

    def _take(self) -> None:
        """Hear all that has come, unless a thread is about to."""
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
        except msgspec.MsgspecError as error:
            raise ConnectionError(str(error)) from None
        if isinstance(answer, Stored | ReplicaFetched):
            known = self._stored if isinstance(answer, Stored) else self._copied
            known[answer.sequence] = answer.error
            while len(known) > REMEMBERED:  # of saves that nobody asked about
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


def _no_answer() -> NoReturn:
    raise TimeoutError("no answer in time")
