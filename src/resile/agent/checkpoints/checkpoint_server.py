"""The agent's hold on checkpoints: two buffers of memory for each training process, and the ways out of it.

Buffers are the agent's, so they outlive the processes that fill them; they are anonymous, so nothing of them outlives
the agent and its processes. What is in them is not the agent's business: it gives room, counts it, and copies bytes to
storage in a thread of its own, when a process asks for it, when the processes of the node have ended, and when a peer
on another node is lost. Another thread copies them to another node, for state that no other node has.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import queue
import socket
import struct
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

import msgspec

from resile.agent.checkpoints.flush import left_in, store_last, whole_in
from resile.agent.checkpoints.replica_client import ReplicaClient
from resile.agent.checkpoints.replica_server import ReplicaServer
from resile.api.ids import Round
from resile.checkpoint.buffer import Buffer, Record
from resile.checkpoint.log_once import LogOnChange
from resile.checkpoint.memory_client import (
    BUFFERS,
    MAX_COPIES,
    MAX_LOCAL_RANKS,
    MAX_PACKET,
    AskReplica,
    FetchReplica,
    FromAgent,
    Open,
    Opened,
    OpenReplicas,
    ReplicaFetched,
    ReplicaIs,
    ReplicasOpened,
    Reserve,
    Reserved,
    Store,
    Stored,
    ToAgent,
)
from resile.checkpoint.memory_limits import LIMIT, short_of
from resile.checkpoint.storage import store_committed
from resile.common import unix_sockets
from resile.protocol.reports import ReplicaEndpoint

log = logging.getLogger("resile.agent")

BACKLOG = 256
LOOK_AGAIN = 5.0
"""Seconds between two looks at whether the copies of another node are still needed."""
PAUSES = (0.5, 1.5, 4.0)
"""Seconds before each further try, if storage does not take a checkpoint."""
_decoder = msgspec.msgpack.Decoder(ToAgent)


class _Peer:
    """A training process on the line."""

    def __init__(self, line: socket.socket) -> None:
        self.line = line
        self.local_rank: int | None = None
        self.fills = False
        """The buffers of that rank are its own; else it only looks at them."""

    def send(self, answer: FromAgent, descriptors: list[int] | None = None) -> None:
        """Never waits: whoever does not read its answers does without."""
        with contextlib.suppress(OSError):
            socket.send_fds(self.line, [msgspec.msgpack.encode(answer)], descriptors or [])


class _Worker:
    """A thread that does one thing after the other. A daemon: what hangs does not keep the agent from ending."""

    def __init__(self, name: str, level: int) -> None:
        """Nothing is done yet; what could not be done is logged at this level."""
        self._name = name
        self._work: queue.SimpleQueue[tuple[Callable[[], str], Callable[[str], object], Future[None]]]
        self._work = queue.SimpleQueue()
        self.pending: dict[Future[None], tuple[Buffer, ...]] = {}
        self._complaints = LogOnChange(log, level)

    def start(self) -> None:
        """Begin."""
        threading.Thread(target=self._run, name=self._name, daemon=True).start()

    def submit(
        self, work: Callable[[], str], *buffers: Buffer, answer: Callable[[str], object] = lambda error: None
    ) -> None:
        """Do something with these buffers, when it is its turn.

        Args:
            work: does it: an empty answer, or why it could not be done.
            buffers: they are claimed until then.
            answer: is told in any case what came of it, whatever the work raises.
        """
        future: Future[None] = Future()
        self.pending[future] = buffers
        future.add_done_callback(lambda done: self.pending.pop(done, None))
        self._work.put((work, answer, future))

    @property
    def claimed(self) -> set[Buffer]:
        """The buffers that it has to do with, or will have."""
        return {buffer for buffers in list(self.pending.values()) for buffer in buffers}

    def _run(self) -> None:
        while True:
            work, answer, future = self._work.get()
            try:
                error = work()
                self._complaints.say(error)
            except Exception as unforeseen:  # this thread must outlive whatever a disk or a network does
                log.exception("%s failed", self._name)
                error = f"{self._name} failed: {unforeseen}"
            with contextlib.suppress(RuntimeError):  # the agent has ended
                answer(error)
            future.set_result(None)


class CheckpointServer:
    """The buffers of one node."""

    def __init__(self, path: Path, *, pause: Callable[[float], object] = time.sleep) -> None:
        """Nothing is there before `start`.

        Args:
            path: of the socket.
            pause: lets so many seconds pass before storage is tried again with what ended processes left; called by
                a thread.
        """
        self._path = path
        self._pause = pause
        self._buffers: dict[int, list[Buffer]] = {}
        self._peers: dict[int, _Peer] = {}
        self._listener: socket.socket | None = None
        self._storing = _Worker("resile-store", logging.ERROR)
        self._copying = _Worker("resile-copy-out", logging.WARNING)
        self.copies = ReplicaServer(self._room_for)
        self.partner = ReplicaClient()
        self._alone: asyncio.TimerHandle | None = None
        self._leaves = threading.Event()
        """The node ends."""
        self._hurry = asyncio.Event()
        self._flushed: dict[int, list[Record | None]] = {}
        """What the buffers held when they were last flushed."""
        self._rescuing = False
        """It was asked for, and has not begun yet."""
        self._rescued: Buffer | None = None
        self.yield_memory: Callable[[], bool] = lambda: False
        """Asks others of this node to give memory back; whether they had any."""

    def start(self) -> None:
        """Listen. Its directory is private to this user already."""
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        self._path.unlink(missing_ok=True)
        unix_sockets.bind(listener, self._path)
        listener.listen(BACKLOG)
        self._listener = listener
        self._storing.start()
        self._copying.start()
        asyncio.get_running_loop().add_reader(listener, self._accept, listener)

    def open_door(self, host: str, token: Callable[[], bytes], *, tls: bool) -> None:
        """Keep copies for another node from now on, and have one kept; what says why not is logged."""
        self.partner.know(token)
        try:
            self.copies.open(host, token, tls=tls)
        except OSError as error:
            log.warning("this node keeps no copies of other nodes' checkpoints: %s", error.strerror or error)

    def enter(self, round_: Round, partner: ReplicaEndpoint | None) -> None:
        """This node is in another round now."""
        self.copies.enter(round_)
        self.partner.enter(round_, partner)
        if self._alone is not None:
            self._alone.cancel()
            self._alone = None
        if partner is None:
            self._outlive_copies({rank: self._newest(rank) for rank in self._buffers})

    def _outlive_copies(self, before: dict[int, int]) -> None:
        """Alone, a node needs copies for restoring: once its processes have saved again, their memory is given back."""
        filled = {peer.local_rank for peer in self._peers.values() if peer.fills and peer.local_rank is not None}
        if filled and all(self._newest(rank) > before.get(rank, 0) for rank in filled):
            self.copies.give_back()
        elif self.copies.buffers:
            self._alone = asyncio.get_running_loop().call_later(LOOK_AGAIN, self._outlive_copies, before)

    def _newest(self, local_rank: int) -> int:
        records = [buffer.record() for buffer in self._buffers.get(local_rank, ())]
        return max((record.sequence for record in records if record is not None), default=0)

    def close(self) -> None:
        """Give all memory back."""
        loop = asyncio.get_running_loop()
        if self._listener is not None:
            loop.remove_reader(self._listener)
            self._listener.close()
            self._path.unlink(missing_ok=True)
        if self._alone is not None:
            self._alone.cancel()
        for peer in list(self._peers.values()):
            self._hang_up(peer)
        self.copies.close()
        if self._storing.pending or self._copying.pending:
            return  # their memory goes with this process: a descriptor given back now could become another file's
        for buffers in self._buffers.values():
            for buffer in buffers:
                buffer.close()
        self._buffers.clear()

    def flush(self, what_next: str = "") -> None:
        """Begin to store what processes that have ended left in memory. Until it is, others do not overwrite it.

        That holds for the newest of each rank, unless the one before it is on its way still: their successors are to
        have a buffer to save into, however long storage takes.

        Args:
            what_next: to add to the words that tell where it is.
        """
        held = {rank: [buffer.record() for buffer in buffers] for rank, buffers in self._buffers.items()}
        if held == self._flushed:
            return
        self._flushed = held
        newest, older = left_in(self._buffers.values())
        for buffer, record in newest:
            pair = next(pair for pair in self._buffers.values() if buffer in pair)
            if not any(each.wanted for each in pair):
                buffer.want(record.sequence)
        if newest:
            buffers = [buffer for buffer, _ in newest + older]
            work = functools.partial(store_last, newest, older, PAUSES, self._pause, what_next)
            self._storing.submit(work, *buffers, answer=self._note_flush)

    def rescue(self) -> None:
        """Begin to store the newest step that this node has all of; its processes live, and go on meanwhile."""
        if not self._rescuing:
            self._rescuing = True
            self._storing.submit(self._rescue)

    def _rescue(self) -> str:
        """In the thread that stores, when it is its turn: what is the newest by then."""
        self._rescuing = False
        held = whole_in(list(self._buffers.values()))
        if held is None:
            return ""
        buffer, record = held
        self._rescued = buffer
        try:
            buffer.want(record.sequence)
            if buffer.record() != record:  # its process was quicker
                buffer.release(record.sequence)
                return ""
            return store_last([held], [], PAUSES, self._pause)
        finally:
            self._rescued = None

    def _store(self, buffer: Buffer, sequence: int) -> str:
        """What a process has asked for; at the node's end without pauses, as all that is left is tried again then."""
        return store_committed(buffer, sequence, PAUSES, self._leaves.wait)

    def _note_flush(self, error: str) -> None:
        if error:  # the next end of processes tries again
            self._flushed = {}

    async def flushed(self, patience: float) -> None:
        """The node ends: wait for storage, but not for ever, and not when in a hurry."""
        self._leaves.set()
        waiting = [asyncio.wrap_future(future) for future in list(self._storing.pending)]
        if not waiting:
            return
        hurry = asyncio.ensure_future(self._hurry.wait())
        written = asyncio.ensure_future(asyncio.wait(waiting))
        await asyncio.wait([hurry, written], timeout=patience, return_when=asyncio.FIRST_COMPLETED)
        if not written.done():
            log.error("storage has not taken the last checkpoint yet, and is not waited for any longer")
        for task in (hurry, written):
            task.cancel()

    def hurry(self) -> None:
        """Wait for storage no longer."""
        self._hurry.set()

    # the line --------------------------------------------------------------------------------------------------------

    def _accept(self, listener: socket.socket) -> None:
        try:
            line, _ = listener.accept()
        except OSError:
            return
        line.setblocking(False)
        credentials = line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        if struct.unpack("3i", credentials)[1] not in (os.geteuid(), 0):
            line.close()
            return
        peer = self._peers[line.fileno()] = _Peer(line)
        asyncio.get_running_loop().add_reader(line, self._read, peer)

    def _read(self, peer: _Peer) -> None:
        try:
            packet = peer.line.recv(MAX_PACKET)
            if not packet:
                self._hang_up(peer)
                return
            self._heard(peer, _decoder.decode(packet))
        except BlockingIOError:
            return
        except OSError:  # it ended with answers unread
            self._hang_up(peer)
        except msgspec.MsgspecError as error:
            log.warning("a process that asked for checkpoint memory was cut off: %s", error)
            self._hang_up(peer)

    def _hang_up(self, peer: _Peer) -> None:
        self._peers.pop(peer.line.fileno(), None)
        asyncio.get_running_loop().remove_reader(peer.line)
        peer.line.close()

    def _heard(self, peer: _Peer, word: ToAgent) -> None:
        match word:
            case Open():
                self._open(peer, word)
            case Reserve(size=size):
                peer.send(Reserved(error=self._make_room(self._buffers_of(peer), size)))
            case Store(buffer=number, sequence=sequence):
                self._do(self._storing, peer, number, sequence, Stored)
            case FetchReplica(buffer=number, sequence=sequence):
                self._do(self._copying, peer, number, sequence, ReplicaFetched)
            case AskReplica():
                peer.send(ReplicaIs(there=self.partner.there))
            case OpenReplicas():
                held = self.copies.descriptors(MAX_COPIES)
                peer.send(ReplicasOpened(), held)
                for descriptor in held:
                    os.close(descriptor)

    def _open(self, peer: _Peer, word: Open) -> None:
        rank = word.local_rank
        if not 0 <= rank < MAX_LOCAL_RANKS:
            peer.send(Opened(error=f"there is no local rank {rank}"))
            return
        try:
            buffers = self._buffers.get(rank) or [Buffer.make(f"resile-checkpoint-{rank}-{n}") for n in range(BUFFERS)]
        except OSError as error:
            peer.send(Opened(error=f"no memory for checkpoints: {error.strerror}"))
            return
        peer.local_rank, self._buffers[rank] = rank, buffers
        peer.fills = not word.reads
        if not word.reads:
            self._take_over(buffers)
        peer.send(Opened(), [buffer.descriptor for buffer in buffers])

    def _take_over(self, buffers: list[Buffer]) -> None:
        """Another process fills these from now on: what the last one wanted stored, and did not live to say, is."""
        for buffer in buffers:
            if buffer.wanted and buffer not in self._storing.claimed and buffer is not self._rescued:
                record = buffer.record()
                if record is None:
                    buffer.release()
                else:
                    self._storing.submit(functools.partial(self._store, buffer, record.sequence), buffer)

    def _buffers_of(self, peer: _Peer) -> list[Buffer]:
        return self._buffers.get(peer.local_rank, []) if peer.local_rank is not None else []

    def _make_room(self, buffers: list[Buffer], size: int) -> str:
        if not buffers or size < 0:
            return "it asked for room in no buffer"
        need = sum(max(0, size - buffer.size) for buffer in buffers)
        why = self._room_for(need) if need else ""
        if why and LIMIT not in why and self.yield_memory():  # a bound of our own is none of theirs
            why = self._room_for(need)
        if why:
            return why
        try:
            for buffer in buffers:
                buffer.resize(size)
        except OSError as error:
            return f"no memory for checkpoints: {error.strerror}"
        return ""

    def _room_for(self, need: int) -> str:
        """Why there is no memory for so much more; empty if there is. Any thread may ask."""
        own = [buffer for each in list(self._buffers.values()) for buffer in each]
        taken, untouched = self.copies.sizes()
        taken, untouched = taken + sum(each.size for each in own), untouched + sum(each.untouched for each in own)
        return short_of(need, taken, untouched)

    def _do(
        self, worker: _Worker, peer: _Peer, number: int, sequence: int, kind: type[Stored] | type[ReplicaFetched]
    ) -> None:
        """Have a buffer stored or copied, and answer in any case: who waits for an answer saves nothing meanwhile."""
        loop, local_rank = asyncio.get_running_loop(), peer.local_rank or 0

        def answer(error: str) -> None:
            loop.call_soon_threadsafe(peer.send, kind(sequence=sequence, error=error))

        buffers = self._buffers_of(peer)
        if not 0 <= number < len(buffers):
            answer(f"there is no buffer {number}")
            return
        buffer = buffers[number]

        def work() -> str:
            if kind is Stored:
                return self._store(buffer, sequence)
            return self.partner.copy(local_rank, buffer, sequence)

        worker.submit(work, buffer, answer=answer)
