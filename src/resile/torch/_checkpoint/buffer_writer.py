"""Writes the saves of one rank into its two buffers.

A save copies the state once, while training stands still or (overlapped) during the next forward and backward pass.
Everything after the copy runs on a thread of its own: computing checksums, asking for a replica on another node, and
asking for storage. The price is that the next save into the same buffer waits for that thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from resile.checkpoint.buffer import Record
from resile.checkpoint.layout import Layout
from resile.checkpoint.memory_client import MemoryClient
from resile.checkpoint.torchrun_buffers import ProcessBuffers
from resile.common.log_once import LogOnce
from resile.torch._checkpoint.flatten import Leaf
from resile.torch._checkpoint.packing import PackedState
from resile.torch._checkpoint.parallel_copy import POPULATE_WRITE, copying_threads, populate
from resile.torch._checkpoint.save_group import BufferChoice
from resile.torch._checkpoint.storing import StoreQueue

BUSY = "storage still writes an earlier step: steps that are due meanwhile may stay in memory alone"


class BufferWriter:
    """Writes the saves of one rank into its two buffers, on the training thread and two background threads."""

    def __init__(self, memory: MemoryClient | ProcessBuffers, once: LogOnce) -> None:
        self._memory = memory
        self._log_once = once
        self._packed: dict[int, tuple[bytes, int, PackedState]] = {}
        """By buffer: the encoded layout and the size for which the buffer is prepared, and the prepared bytes."""
        self._copier = ThreadPoolExecutor(1, "resile-copy")
        self.sealer = ThreadPoolExecutor(1, "resile-seal")
        self.store_queue = StoreQueue(memory, once, self.sealer.submit)
        self._copying: Future[None] | None = None
        self._sealing: dict[int, Future[None]] = {}
        self._populating: list[Future[None]] = []

    def populate(self) -> None:
        """Allocate the pages of both buffers in the background, so that the first save is as fast as later ones."""
        self._populating = [self.sealer.submit(populate, each, POPULATE_WRITE) for each in self._memory.buffers]

    def write(
        self,
        choice: BufferChoice,
        leaves: Sequence[Leaf],
        layout: Layout,
        text: bytes,
        *,
        sequence: int,
        step: int,
        due: bool,
        on_replication: Callable[[], None] | None,
        overlap: bool,
    ) -> None:
        """Copy a state into the chosen buffer and commit it. Checksums, replica and storage follow in the background.

        `text` is the encoded layout. The save goes to storage only if it is `due`. If storage is busy, the save is
        deferred. With `overlap`, leaves that only the optimizer changes are copied in the background. The commit comes
        after this copy, and `before_update` waits for both. `on_replication` is called after the commit, perhaps on a
        background thread. If `on_replication` is None, the save is not copied to another node. Raises SlotTooSmall if a
        value has outgrown its slot in the layout.
        """
        number, stores = choice.number, due and not choice.busy
        if due:
            self.store_queue.deferred = None
        elif not choice.busy:
            self.store_queue.follow_up(number)
        if due and choice.busy:
            self._log_once.say(BUSY)
        packed = self._begin(number, layout, text)

        def commit() -> None:
            record = self._memory.buffers[number].commit(sequence, step, text, layout.length)
            if stores:
                self.store_queue.reserve(number, sequence)
            elif due:
                self.store_queue.deferred = (number, sequence)
            replicated = on_replication is not None
            if on_replication is not None:
                on_replication()
            self._sealing[number] = self.sealer.submit(self._seal, number, packed, record, stores, replicated)

        if not overlap:
            packed.fill(leaves, copying_threads(layout.length))
            commit()
            return
        packed.fill(leaf for leaf in leaves if not leaf.late)
        late = [leaf for leaf in leaves if leaf.late]

        def copy_rest() -> None:
            packed.fill(late)
            commit()

        self._copying = self._copier.submit(copy_rest)

    def before_update(self) -> None:
        """Wait until a save with `overlap` has copied everything. If the copy failed, raises its error."""
        copying, self._copying = self._copying, None
        if copying is not None:
            copying.result()

    def wait_sealed(self) -> None:
        for sealing in list(self._sealing.values()):
            sealing.result()

    def wait(self, timeout: float) -> None:
        """Wait until all background work is done and storage has every save that was sent to it.

        Raises TimeoutError if one of these takes more than `timeout` seconds, and OSError if storage refused the last
        save.
        """
        self.before_update()
        for working in [*self._populating, *self._sealing.values()]:
            working.result(timeout)
        self.store_queue.wait(timeout)

    def close(self) -> None:
        try:
            self.before_update()
        finally:
            self._copier.shutdown()
            self.sealer.shutdown()
            self._packed.clear()

    def _begin(self, number: int, layout: Layout, text: bytes) -> PackedState:
        buffer = self._memory.buffers[number]
        if (sealing := self._sealing.pop(number, None)) is not None:
            sealing.result()
        buffer.release()
        _, data_at = buffer.begin(text, layout.length)
        known = self._packed.get(number)
        if known is not None and known[0] is text and known[1] == buffer.size:
            return known[2]
        packed = PackedState(buffer.map(), data_at, layout)
        packed.write_frames()
        self._packed[number] = (text, buffer.size, packed)
        return packed

    def _seal(self, number: int, packed: PackedState, record: Record, stores: bool, replicated: bool) -> None:
        self._memory.buffers[number].seal(record, packed.sums())
        if replicated and isinstance(self._memory, MemoryClient):
            self._memory.copy_out(number, record.sequence)
        if stores:
            self.store_queue.send(number, record.sequence)
