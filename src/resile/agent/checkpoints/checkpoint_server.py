"""The checkpoint server: two buffers of memory for each training process, their way to storage and to another node.

The agent owns the buffers, so they outlive the processes that fill them. They are anonymous memory, so nothing of them
outlives the agent and its processes. The agent allocates and counts the memory, and does not interpret its contents. A
thread copies buffers to storage when a process asks for it, when the processes of the node have ended, and when another
node is lost. Another thread copies sharded state to the partner node.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

from resile.agent.checkpoints.background_thread import WorkThread
from resile.agent.checkpoints.memory_socket import MemorySocket, Peer
from resile.agent.checkpoints.replica_client import ReplicaClient
from resile.agent.checkpoints.replica_server import ReplicaServer
from resile.agent.checkpoints.store_last import left_in, store_last, whole_in
from resile.api.ids import Round
from resile.checkpoint.buffer import Buffer, Record
from resile.checkpoint.memory_client import (
    BUFFERS,
    MAX_COPIES,
    MAX_LOCAL_RANKS,
    AskReplica,
    Open,
    Opened,
    OpenReplicas,
    ReplicaIs,
    ReplicaSent,
    ReplicasOpened,
    Reserve,
    Reserved,
    SendReplica,
    Store,
    Stored,
    ToAgent,
)
from resile.checkpoint.memory_limits import LIMIT, short_of
from resile.checkpoint.store_retries import PAUSES, store_committed
from resile.protocol.reports import ReplicaEndpoint

log = logging.getLogger("resile.agent")

LOOK_AGAIN = 5.0
"""Seconds between two checks whether the replicas of another node are still needed."""


class CheckpointServer:
    def __init__(
        self,
        path: Path,
        *,
        token: Callable[[], bytes] = bytes,
        yield_memory: Callable[[], bool] = lambda: False,
        pause: Callable[[float], object] = time.sleep,
    ) -> None:
        """Serve processes at the socket `path`, once `start` is called.

        `yield_memory` makes the agent free memory, and returns False if it freed none. `flush` and `rescue` call
        `pause` with the seconds to wait before they try again to store a checkpoint.
        """
        self._socket = MemorySocket(path, self._on_message)
        self._pause = pause
        self._buffers: dict[int, list[Buffer]] = {}
        self._storing = WorkThread("resile-store", logging.ERROR)
        self._copying = WorkThread("resile-copy-out", logging.WARNING)
        self.replicas = ReplicaServer(self._room_for, token)
        self.replica_client = ReplicaClient(token)
        self._yield_memory = yield_memory
        self._alone: asyncio.TimerHandle | None = None
        self._leaves = threading.Event()
        self._hurry = asyncio.Event()
        self._flushed: dict[int, list[Record | None]] = {}
        """The records of all buffers at the last flush."""
        self._rescuing = False
        self._rescued: Buffer | None = None

    def start(self) -> None:
        self._socket.start()
        self._storing.start()
        self._copying.start()

    def keep_replicas(self, host: str, *, tls: bool) -> None:
        try:
            self.replicas.open(host, tls=tls)
        except OSError as error:
            log.warning("this node keeps no copies of other nodes' checkpoints: %s", error.strerror or error)

    def enter(self, round_: Round, partner: ReplicaEndpoint | None) -> None:
        """Refuse replicas of rounds before `round_`, and send this node's replicas to `partner`, if there is one."""
        self.replicas.enter(round_)
        self.replica_client.enter(round_, partner)
        if self._alone is not None:
            self._alone.cancel()
            self._alone = None
        if partner is None:
            self._outlive_copies({rank: self._newest(rank) for rank in self._buffers})

    def _outlive_copies(self, before: dict[int, int]) -> None:
        """Free the replicas of other nodes if every local rank has a newer save than in `before`.

        `before` has the sequence number of the newest save of each local rank. If a rank has no newer save yet, the
        check is repeated after LOOK_AGAIN seconds.
        """
        filled = self._socket.filled_ranks
        if filled and all(self._newest(rank) > before.get(rank, 0) for rank in filled):
            self.replicas.give_back()
        elif self.replicas.buffers:
            self._alone = asyncio.get_running_loop().call_later(LOOK_AGAIN, self._outlive_copies, before)

    def _newest(self, local_rank: int) -> int:
        return max((buffer.sequence for buffer in self._buffers.get(local_rank, ())), default=0)

    def close(self) -> None:
        self._socket.close()
        if self._alone is not None:
            self._alone.cancel()
        self.replicas.close()
        if self._storing.pending or self._copying.pending:
            return  # the threads still use descriptors; the memory is freed when this process ends
        for buffers in self._buffers.values():
            for buffer in buffers:
                buffer.close()
        self._buffers.clear()

    def flush(self, what_next: str = "") -> None:
        """Begin to store the checkpoints that ended processes left in memory.

        `what_next` is added to the log line about the stored checkpoint. New processes do not overwrite the newest
        checkpoint of a rank until it is stored. They may overwrite it if the rank's other buffer is still being stored,
        because one buffer must always be free for new saves.
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
        """Begin to store the newest step that is complete on this node, while its processes go on."""
        if not self._rescuing:
            self._rescuing = True
            self._storing.submit(self._rescue)

    def _rescue(self) -> str:
        self._rescuing = False
        held = whole_in(list(self._buffers.values()))
        if held is None:
            return ""
        buffer, record = held
        self._rescued = buffer
        try:
            buffer.want(record.sequence)
            if buffer.record() != record:  # its process has begun to overwrite it
                buffer.release(record.sequence)
                return ""
            return store_last([held], [], PAUSES, self._pause)
        finally:
            self._rescued = None

    def _store(self, buffer: Buffer, sequence: int) -> str:
        # `_leaves` is set when the node ends; the tries after that have no pauses
        return store_committed(buffer, sequence, PAUSES, self._leaves.wait)

    def _note_flush(self, error: str) -> None:
        if error:  # the next flush tries again
            self._flushed = {}

    async def flushed(self, patience: float) -> None:
        """Wait until all checkpoints are stored, but at most `patience` seconds. A call of `hurry` ends the wait.

        Called when the node ends.
        """
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
        self._hurry.set()

    # what processes ask for -------------------------------------------------------------------------------------------

    def _on_message(self, peer: Peer, message: ToAgent) -> None:
        match message:
            case Open():
                self._open(peer, message)
            case Reserve(size=size):
                peer.send(Reserved(error=self._make_room(self._buffers_of(peer), size)))
            case Store():
                self._do(self._storing, self._store, peer, message, Stored)
            case SendReplica():
                copy = functools.partial(self.replica_client.copy, peer.local_rank or 0)
                self._do(self._copying, copy, peer, message, ReplicaSent)
            case AskReplica():
                peer.send(ReplicaIs(there=self.replica_client.there))
            case OpenReplicas():
                held = self.replicas.descriptors(MAX_COPIES)
                peer.send(ReplicasOpened(), held)
                for descriptor in held:
                    os.close(descriptor)

    def _open(self, peer: Peer, message: Open) -> None:
        rank = message.local_rank
        if not 0 <= rank < MAX_LOCAL_RANKS:
            peer.send(Opened(error=f"there is no local rank {rank}"))
            return
        try:
            buffers = self._buffers.get(rank) or [Buffer.make(f"resile-checkpoint-{rank}-{n}") for n in range(BUFFERS)]
        except OSError as error:
            peer.send(Opened(error=f"no memory for checkpoints: {error.strerror}"))
            return
        peer.local_rank, self._buffers[rank] = rank, buffers
        peer.fills = not message.reads
        if not message.reads:
            self._take_over(buffers)
        peer.send(Opened(), [buffer.descriptor for buffer in buffers])

    def _take_over(self, buffers: list[Buffer]) -> None:
        """Begin to store the checkpoints in `buffers` that wait for storage, unless they are being stored already.

        Called when a new process begins to fill `buffers`. An earlier process left the checkpoints.
        """
        for buffer in buffers:
            if buffer.wanted and buffer not in self._storing.claimed and buffer is not self._rescued:
                record = buffer.record()
                if record is None:
                    buffer.release()
                else:
                    self._storing.submit(functools.partial(self._store, buffer, record.sequence), buffer)

    def _buffers_of(self, peer: Peer) -> list[Buffer]:
        return self._buffers.get(peer.local_rank, []) if peer.local_rank is not None else []

    def _make_room(self, buffers: list[Buffer], size: int) -> str:
        if not buffers or size < 0:
            return "it asked for room in no buffer"
        need = sum(max(0, size - buffer.size) for buffer in buffers)
        why = self._room_for(need) if need else ""
        if why and LIMIT not in why and self._yield_memory():  # freeing memory does not help against this limit
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
        """Return why there is no memory for `need` more bytes; empty if there is memory. Any thread may call this."""
        own = [buffer for each in list(self._buffers.values()) for buffer in each]
        taken, untouched = self.replicas.sizes()
        taken, untouched = taken + sum(each.size for each in own), untouched + sum(each.untouched for each in own)
        return short_of(need, taken, untouched)

    def _do(
        self,
        thread: WorkThread,
        work: Callable[[Buffer, int], str],
        peer: Peer,
        asked: Store | SendReplica,
        kind: type[Stored | ReplicaSent],
    ) -> None:
        """Let `thread` do `work` with the buffer and the sequence number that the process `peer` asked for.

        The process always gets an answer of type `kind`, also if the work fails.
        """
        loop, buffers = asyncio.get_running_loop(), self._buffers_of(peer)

        def answer(error: str) -> None:
            loop.call_soon_threadsafe(peer.send, kind(sequence=asked.sequence, error=error))

        if 0 <= asked.buffer < len(buffers):
            buffer = buffers[asked.buffer]
            thread.submit(functools.partial(work, buffer, asked.sequence), buffer, answer=answer)
        else:
            answer(f"there is no buffer {asked.buffer}")
