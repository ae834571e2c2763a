"""Keeps copies of another node's checkpoints in memory, so that the loss of a node loses no part of a sharded state.

There are two buffers for each process of that node. While one is being filled, the other holds the copy before it, so
there is a complete copy even if the node is lost in the middle of copying. The sender has the job's token and must
not be in an older round than this agent. Threads receive the copies, not the agent's event loop.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import ssl
import tempfile
import threading
import time
from array import array
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from resile.api.ids import NO_ROUND, Round
from resile.checkpoint.buffer import MAX_LAYOUT, PAGE, Buffer, places
from resile.checkpoint.layout import Layout, chunks
from resile.checkpoint.memory_client import BUFFERS, COPY_GRACE, COPY_SLOWEST, MAX_LOCAL_RANKS
from resile.common.log_once import LogOnChange
from resile.protocol.replicas import ReplicaAnswer, ReplicaOffer
from resile.protocol.reports import ReplicaEndpoint
from resile.wire.bulk_stream import BulkStream, admit, fingerprint
from resile.wire.handshake import HandshakeRefused
from resile.wire.tls import OLDEST

log = logging.getLogger("resile.agent")

UNPROVEN = 16
"""How many connections may be open before they have proved the job's token. With one more, an old one is closed."""
PROOF = 5.0
"""Seconds that a sender has to prove the token; it takes milliseconds."""
PAUSE = 0.2
"""Seconds to wait if a connection could not be accepted, for want of descriptors or threads."""
GIVE_WAY = 5.0
"""Seconds for a copy to end after a newer one cut it off."""
BACKLOG = 16
LARGEST = 1 << 62
SUM = 8
"""Bytes of a checksum."""


def copy_deadline(data: int) -> float:
    """The time on the monotonic clock by which a copy of `data` bytes must be done."""
    return time.monotonic() + COPY_GRACE + data / COPY_SLOWEST


class _Arrival(NamedTuple):
    number: int
    """Counts all arrivals. Sequence numbers do not tell which is newer, because the senders' clocks may differ."""
    round: Round


class ReplicaServer:
    def __init__(self, room: Callable[[int], str], token: Callable[[], bytes]) -> None:
        """`room(n)` returns why there is no memory for `n` more bytes, or an empty string; any thread calls it."""
        self._room = room
        self._buffers: dict[int, list[Buffer]] = {}
        self._locks: dict[int, threading.Lock] = {}
        self._coming: dict[int, tuple[Round, BulkStream]] = {}
        """For each local rank, the round and connection of the copy that is being received."""
        self._arrivals: dict[Buffer, _Arrival] = {}
        self._guard = threading.RLock()
        self._round: Round = NO_ROUND
        self._listener: socket.socket | None = None
        self._closed = threading.Event()
        self._fingerprint = ""
        self._token = token
        self._tls: ssl.SSLContext | None = None
        self._unproven: dict[socket.socket, str] = {}
        """Connections without proof, oldest first: a second descriptor of each, and the sender's address."""

    @property
    def buffers(self) -> list[Buffer]:
        """All buffers, also those that hold no complete replica."""
        with self._guard:
            return [buffer for pair in self._buffers.values() for buffer in pair]

    def sizes(self) -> tuple[int, int]:
        """The bytes of all buffers, and how many of these bytes were never written to."""
        with self._guard:
            return sum(each.size for each in self.buffers), sum(each.untouched for each in self.buffers)

    def descriptors(self, most: int) -> list[int]:
        """New descriptors of at most `most` buffers that hold a replica. The caller closes the descriptors."""
        found: list[int] = []
        with self._guard, contextlib.suppress(OSError):
            for each in [each for each in self.buffers if each.record() is not None][:most]:
                found.append(os.dup(each.descriptor))
        return found

    def give_back(self) -> None:
        """Free all replicas except those that are being received."""
        with self._guard:
            self._forget(self._buffers)

    def open(self, host: str, *, tls: bool) -> None:
        """Listen for replicas, with a new self-signed certificate if `tls`. Raises OSError if no port is free."""
        listener = socket.create_server((host, 0), backlog=BACKLOG)
        if tls:
            self._tls, self._fingerprint = _own_identity()
        self._listener = listener
        threading.Thread(target=self._serve, args=(listener,), name="resile-copies", daemon=True).start()

    def replica_endpoint(self, address: str) -> ReplicaEndpoint | None:
        """Where nodes that reach this node by `address` send replicas; None if this node keeps no replicas."""
        if self._listener is None:
            return None
        return ReplicaEndpoint(address=address, port=self._listener.getsockname()[1], fingerprint=self._fingerprint)

    def enter(self, round_: Round) -> None:
        """Refuse replicas of rounds before `round_` from now on, also those that are being received."""
        with self._guard:
            self._round = round_
            for known, stream in self._coming.values():
                if known < round_:
                    stream.cut()

    def close(self) -> None:
        """Stop listening. The memory stays until this process ends, because a thread may be writing to it."""
        self._closed.set()
        if self._listener is not None:
            with contextlib.suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
            self._listener.close()
            self._listener = None

    def _serve(self, listener: socket.socket) -> None:
        complaints = LogOnChange(log, logging.WARNING)
        while not self._closed.is_set():
            try:
                sock, peer = listener.accept()
                self._let_in(sock, peer[0])
            except (OSError, RuntimeError) as error:  # no descriptor or thread, or the sender is gone: this may pass
                if self._closed.wait(PAUSE):
                    return
                complaints.say(f"a copy of a checkpoint could not be let in: {error}")

    def _let_in(self, sock: socket.socket, peer: str) -> None:
        grip: socket.socket | None = None
        try:
            grip = sock.dup()
            with self._guard:
                self._unproven[grip] = peer
                if len(self._unproven) > UNPROVEN:
                    callers = list(self._unproven.values())
                    most = max(callers, key=callers.count)
                    oldest = next(each for each, caller in self._unproven.items() if caller == most)
                    del self._unproven[oldest]
                    with contextlib.suppress(OSError):
                        oldest.shutdown(socket.SHUT_RDWR)
            threading.Thread(target=self._welcome, args=(sock, grip, peer), name="resile-copy-in", daemon=True).start()
        except BaseException:
            sock.close()
            if grip is not None:
                with self._guard:
                    self._unproven.pop(grip, None)
                    grip.close()
            raise

    def _welcome(self, sock: socket.socket, grip: socket.socket, peer: str) -> None:
        try:
            with contextlib.closing(self._proven(sock, grip, peer)) as stream:
                self._take(stream)
        except (OSError, HandshakeRefused) as error:
            log.warning("no copy of a checkpoint was taken from %s: %s", peer, error)
        except Exception:  # what one sender sent must not harm the others
            log.exception("no copy of a checkpoint was taken from %s", peer)

    def _proven(self, sock: socket.socket, grip: socket.socket, peer: str) -> BulkStream:
        try:
            return admit(sock, peer, self._token(), self._tls, PROOF)
        except BaseException:
            sock.close()
            raise
        finally:
            with self._guard:
                self._unproven.pop(grip, None)
                grip.close()

    def _take(self, stream: BulkStream) -> None:
        copy = stream.hear(ReplicaOffer, time.monotonic() + COPY_GRACE)
        if not _is_checkpoint(copy):
            stream.say(ReplicaAnswer(error="it is no checkpoint"), time.monotonic() + COPY_GRACE)
            return
        deadline = copy_deadline(copy.data)
        with self._turn(copy, stream) as mine:
            error = self._refusal(copy) if mine else "another copy of this rank is coming in"
            stream.say(ReplicaAnswer(error=error), deadline)
            if not error:
                self._fill(stream, copy, deadline)
        if not error:  # only now, because the sender may send the next copy at once
            stream.say(ReplicaAnswer(), deadline)

    @contextlib.contextmanager
    def _turn(self, copy: ReplicaOffer, stream: BulkStream) -> Iterator[bool]:
        """Lock the buffers of the local rank of `copy`. Yields False if the lock is not free within GIVE_WAY seconds.

        If another copy of this local rank is still being received, it is cut off first, unless its round is newer. The
        sender of that copy was lost or hangs, because a node sends one copy at a time.
        """
        with self._guard:
            lock = self._locks.setdefault(copy.local_rank, threading.Lock())
            round_, other = self._coming.get(copy.local_rank, (NO_ROUND, None))
            if other is not None and round_ <= copy.round:
                other.cut()
        mine = lock.acquire(timeout=GIVE_WAY)
        try:
            if mine:
                with self._guard:
                    self._coming[copy.local_rank] = (copy.round, stream)
            yield mine
        finally:
            if mine:
                with self._guard:
                    del self._coming[copy.local_rank]
                lock.release()

    def _refusal(self, copy: ReplicaOffer) -> str:
        """Make room for a copy in a buffer. Returns why the copy is refused, or an empty string."""
        if copy.round < self._round:
            return self._too_late(copy)
        buffer = self._oldest(copy.local_rank)
        size = places(copy.layout, copy.data)[2]
        if size > buffer.size and (why := self._room(size - buffer.size)):
            return why
        try:
            buffer.resize(size)
        except OSError as error:
            return f"no memory for copies of checkpoints: {error.strerror}"
        return ""

    def _oldest(self, local_rank: int) -> Buffer:
        with self._guard:
            pair = self._buffers.get(local_rank)
            if pair is None:
                pair = self._buffers[local_rank] = [
                    Buffer.make(f"resile-copy-{local_rank}-{n}") for n in range(BUFFERS)
                ]
            return min(pair, key=lambda buffer: self._arrivals[buffer].number if buffer in self._arrivals else 0)

    def _fill(self, stream: BulkStream, copy: ReplicaOffer, deadline: float) -> None:
        buffer = self._oldest(copy.local_rank)
        with self._guard:
            self._arrivals.pop(buffer, None)
        buffer.begin(b"", copy.data)
        sums_at, data_at, _ = places(copy.layout, copy.data)
        with memoryview(buffer.map()) as memory:
            for at, size in ((PAGE, copy.layout), (sums_at, copy.sums), (data_at, copy.data)):
                with memory[at : at + size] as target:
                    stream.read(target, deadline)
            text, table = bytes(memory[PAGE : PAGE + copy.layout]), bytes(memory[sums_at : sums_at + copy.sums])
        try:
            fits = Layout.decode(text, copy.data).sums * SUM == len(table)
        except ValueError as error:
            raise ConnectionError(f"its table of contents is not usable: {error}") from None
        if not fits:
            raise ConnectionError("it has not as many checksums as its table of contents says")
        with self._guard:
            if copy.round < self._round:
                raise ConnectionError(self._too_late(copy))
            buffer.seal(buffer.commit(copy.sequence, copy.step, text, copy.data), array("q", table))
            number = max((each.number for each in self._arrivals.values()), default=0) + 1
            self._arrivals[buffer] = _Arrival(number, copy.round)
            self._forget_older(copy)

    def _too_late(self, copy: ReplicaOffer) -> str:
        return f"it is of round {copy.round}, and this node is in round {self._round}"

    def _forget_older(self, copy: ReplicaOffer) -> None:
        """Free replicas of rounds before that of `copy`, once its rank has sent two replicas in the new round.

        The second of them shows that all ranks have sent their first, so no rank needs replicas of an older round.
        """
        newest = {
            rank: max((self._arrivals[each].round for each in pair if each in self._arrivals), default=NO_ROUND)
            for rank, pair in self._buffers.items()
        }
        pair = self._buffers[copy.local_rank]
        if all(each in self._arrivals and self._arrivals[each].round == copy.round for each in pair):
            self._forget([rank for rank, round_ in newest.items() if round_ < copy.round])

    def _forget(self, ranks: Iterable[int]) -> None:
        for rank in [each for each in ranks if each not in self._coming]:
            for buffer in self._buffers.pop(rank):
                self._arrivals.pop(buffer, None)
                buffer.close()


def _is_checkpoint(copy: ReplicaOffer) -> bool:
    return (
        0 <= copy.local_rank < MAX_LOCAL_RANKS
        and 0 <= copy.step < LARGEST
        and 0 <= copy.sequence < LARGEST
        and 0 < copy.layout <= MAX_LAYOUT
        and 0 <= copy.data < LARGEST
        and 0 <= copy.sums <= SUM * (chunks(copy.data) + 1)
    )


def _own_identity() -> tuple[ssl.SSLContext, str]:
    from resile.common.certificates import self_signed

    pair = self_signed("resile-agent", ["resile-agent"])
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = OLDEST
    context.num_tickets = 0
    with tempfile.TemporaryDirectory() as directory:  # mode 0700; OpenSSL reads keys from files alone
        certificate, key = Path(directory) / "crt", Path(directory) / "key"
        certificate.write_bytes(pair.certificate)
        key.write_bytes(pair.key)
        context.load_cert_chain(certificate, key)
    return context, fingerprint(ssl.PEM_cert_to_DER_cert(pair.certificate.decode()))
