"""Compares a checkpoint in memory with its checksums, as work that several threads may share.

The work can begin while a restarted script still builds its model. `restore` then does what is left of it.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from concurrent.futures import Executor, Future

from resile.checkpoint.buffer import Buffer, IncompleteBuffer, Record
from resile.torch._checkpoint.packing import PackedState
from resile.torch._checkpoint.parallel_copy import POPULATE_READ, populate, run_jobs


class Verification:
    """The comparison of one committed buffer."""

    def __init__(self, buffer: Buffer, record: Record) -> None:
        """Nothing is compared yet.

        Raises:
            IncompleteBuffer: the layout or the checksums are damaged.
        """
        self.buffer = buffer
        self.record = record
        self.packed = PackedState(buffer.map(), record.data_at, buffer.layout(record))
        self.sums = buffer.sums(record)
        """None if the process ended before it had computed them."""
        self._left = iter(self.packed.checks(self.sums or ()) if self.sums is not None else ())
        self._begun: Future[None] | None = None
        self.used = False
        """True once `finish` was called. The result cannot be used again."""

    def begin(self, background: Executor) -> None:
        """Have another thread start with it."""
        self._begun = background.submit(run_jobs, 1, self._left)

    def finish(self, threads: int) -> None:
        """Compare what is left, so that every byte has been compared. Call it once.

        Raises:
            Damaged: a checksum differs.
        """
        self.used = True
        run_jobs(threads, self._left)
        if self._begun is not None and not self._begun.cancel():
            self._begun.result()


def begin(buffers: Iterable[Buffer], background: Executor) -> Verification | None:
    """Map the newest step of some buffers and begin to compare it on another thread; None if there is none.

    Only the newest, because nearly all restores use it. The comparison of others just starts later.
    """
    whole = [(record.sequence, buffer, record) for buffer in buffers if (record := buffer.record()) is not None]
    if not whole:
        return None
    _, buffer, record = max(whole, key=operator.itemgetter(0))
    try:
        verification = Verification(buffer, record)
    except IncompleteBuffer:  # `restore` reports it, if it needs this buffer
        return None
    if verification.sums is None:  # the agent may be computing them at this moment
        return None
    background.submit(populate, buffer, POPULATE_READ)
    verification.begin(background)
    return verification
