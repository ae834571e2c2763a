"""The parts of checkpoints that a rank finds in memory: which there are, whether they are sound, and sending them.

Verifying every byte takes time. It can begin while a restarted script still builds its model: `verify_ahead` starts it
on another thread, and `restore` does what is left of it.
"""

from __future__ import annotations

import ctypes
import logging
from array import array
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future
from typing import NamedTuple

import msgspec
import torch

from resile.checkpoint.buffer import Buffer, IncompleteBuffer, Record
from resile.checkpoint.layout import Layout, is_first, made_at
from resile.torch._checkpoint.packing import Damaged, PackedState
from resile.torch._checkpoint.parallel_copy import POPULATE_READ, copying_threads, populate, run_jobs
from resile.torch._checkpoint.restore_plan import Kind, Offer, RestorePlan, Transfer
from resile.torch._loop.collectives import Collectives

log = logging.getLogger(__name__)


class MemoryPart(NamedTuple):
    """A part in memory. `sums` are its checksums; None if the saving process ended before it had computed them."""

    packed: PackedState
    sums: tuple[int, ...] | None


class Verification:
    """Compares one committed buffer with its checksums. Several threads may share the work."""

    def __init__(self, buffer: Buffer, record: Record) -> None:
        """Map the buffer and read its layout and checksums. Nothing is compared yet.

        Raises IncompleteBuffer if the layout or the checksums are damaged.
        """
        self.record = record
        self.packed = PackedState(buffer.map(), record.data_at, buffer.layout(record))
        self.sums = buffer.sums(record)
        """None if the process ended before it had computed them."""
        self._left = iter(self.packed.checks(self.sums) if self.sums is not None else ())
        self._begun: Future[None] | None = None

    def begin(self, background: Executor) -> None:
        self._begun = background.submit(run_jobs, 1, self._left)

    def finish(self, threads: int) -> None:
        """Compare the bytes that the thread of `begin` has not compared, and wait for that thread. Call this once.

        Raises Damaged if any of the threads found a byte that differs from what was saved.
        """
        run_jobs(threads, self._left)
        if self._begun is not None and not self._begun.cancel():
            self._begun.result()


def verify_ahead(buffers: Iterable[Buffer], background: Executor) -> dict[Buffer, Verification]:
    """Begin to verify the newest step in `buffers` on a thread of `background`. Returns its buffer's verification.

    Returns nothing if there is no step, if it has no checksums, or if its layout or checksums are damaged.
    """
    buffer = max(buffers, key=lambda each: each.sequence)
    record = buffer.record()
    try:
        verification = Verification(buffer, record) if record is not None else None
    except IncompleteBuffer:  # `restore` reports it, if it needs this buffer
        return {}
    if verification is None or verification.sums is None:  # the agent may be computing them at this moment
        return {}
    background.submit(populate, buffer, POPULATE_READ)
    verification.begin(background)
    return {buffer: verification}


class Memory(NamedTuple):
    own: Sequence[Buffer]
    leaders: Sequence[Buffer]
    """Buffers of the node's leader: the rank, perhaps this one, that keeps what all ranks of the node have alike."""
    copies: Sequence[Buffer]
    """Buffers of this node's other ranks, and replicas of another node's parts."""
    verifying: dict[Buffer, Verification]
    """Verifications that have begun. Each is taken out when it is used, because it can be used only once."""

    def offers(self) -> Iterator[Offer]:
        for kind, buffers in ((Kind.OWN, self.own), (Kind.LEADER, self.leaders), (Kind.COPY, self.copies)):
            for _, record, layout in _complete(buffers, leads=kind is Kind.LEADER):
                yield Offer(*_identity(record, layout), int(kind), int(is_first(layout.attempt, record.sequence)))

    def verified(self, plan: RestorePlan, part: int, *, prefer_copies: bool) -> MemoryPart:
        """Find one part of the step that `plan` restores, compare it with its checksums, and return it.

        With `prefer_copies`, `copies` are searched before the buffers of this rank and of its leader, else after them.
        Raises IncompleteBuffer if the part is not found or is damaged.
        """
        buffer, record = self._find(plan, part, prefer_copies)
        verification = self.verifying.pop(buffer, None)
        if verification is None or verification.record != record:
            verification = Verification(buffer, record)
        if verification.sums is None:
            log.info("step %d in memory has no checksums: its process ended while they were made", plan.step)
        verification.finish(copying_threads(record.length))
        return MemoryPart(verification.packed, verification.sums)

    def drop_newer(self, step: int) -> None:
        """Erase this rank's saves of steps after the restored `step`, because training takes those steps again."""
        for buffer in self.own:
            record = buffer.record()
            if record is not None and record.step > step:
                buffer.void()

    def _find(self, plan: RestorePlan, part: int, prefer_copies: bool) -> tuple[Buffer, Record]:
        own = [self.own, self.leaders]
        wanted = (plan.step, plan.attempt, plan.world, part, plan.shared)
        for buffers in [self.copies, *own] if prefer_copies else [*own, self.copies]:
            for buffer, record, layout in _complete(buffers, leads=buffers is self.leaders):
                if _identity(record, layout) == wanted:
                    return buffer, record
        raise Damaged("it is not in memory any more")


def _identity(record: Record, layout: Layout) -> tuple[int, int, int, int, int]:
    """What tells a part from all others: the first fields of its `Offer`."""
    return record.step, made_at(layout.attempt), layout.world, layout.rank, int(layout.replicated)


def _complete(buffers: Iterable[Buffer], *, leads: bool) -> Iterator[tuple[Buffer, Record, Layout]]:
    """Yield the committed buffers that contain a whole part, each with its record and layout.

    If all ranks have the same state, only rank 0 and the leader of each node save all of it. Then the buffers of other
    ranks are skipped. `leads` is True if `buffers` are a leader's. A buffer with a damaged layout is skipped.
    """
    for buffer in buffers:
        record = buffer.record()
        if record is not None:
            try:
                layout = buffer.layout(record)
            except IncompleteBuffer as error:
                log.warning("step %d in memory is not used: %s", record.step, error)
                continue
            if not layout.replicated or leads or layout.rank == 0:
                yield buffer, record, layout


def hand_over(ranks: Collectives, transfer: Transfer, mine: MemoryPart | None) -> MemoryPart | None:
    """Send one part from the rank `transfer.source` to the ranks `transfer.takers`. A collective of all ranks.

    `mine` is this rank's copy of the part before the transfer; None if it has none. Returns the received part on the
    takers, and `mine` on all other ranks. Raises Damaged if the part changed on the way, and MemoryError if a taker has
    too little memory.
    """
    head: torch.Tensor | None = None
    data: torch.Tensor | None = None
    sizes = [0, 0, 0]
    if ranks.rank == transfer.source:
        assert mine is not None
        text, table = msgspec.json.encode(mine.packed.layout), array("q", mine.sums or ()).tobytes()
        head, data = torch.frombuffer(bytearray(text + table), dtype=torch.uint8), mine.packed.bytes
        sizes = [len(text), len(table), mine.packed.layout.length]
    texts, tables, length = ranks.gather(sizes)[transfer.source]
    lacks_memory: MemoryError | None = None
    if ranks.rank in transfer.takers:
        try:
            head = torch.empty(texts + tables, dtype=torch.uint8)
            memory = bytearray(max(length, 1))
            data = torch.frombuffer(memory, dtype=torch.uint8)[:length]
        except MemoryError as error:
            head, lacks_memory = None, error
    ranks.hand_over(head, texts + tables, *transfer[1:])
    ranks.hand_over(data, length, *transfer[1:])
    if lacks_memory is not None:
        raise lacks_memory
    if ranks.rank not in transfer.takers:
        return mine
    assert head is not None
    words = ctypes.string_at(head.data_ptr(), texts + tables)
    packed = PackedState(memory, 0, msgspec.json.decode(words[:texts], type=Layout))
    sums = tuple(array("q", words[texts:]))
    if sums:
        packed.check(sums, copying_threads(length))
    return MemoryPart(packed, sums or None)
