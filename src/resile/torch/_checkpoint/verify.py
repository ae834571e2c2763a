"""The comparison of a checkpoint in memory with its checksums, as work that several threads may share.

It can begin before anybody asks for the state, while a script that was started again still builds its model; who then
wants the state does what is left of it.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from concurrent.futures import Executor, Future

from resile.checkpoint.buffer import Buffer, IncompleteBuffer, Record
from resile.torch._checkpoint.packing import PackedState
from resile.torch._checkpoint.parallel_copy import run_jobs
from resile.torch._checkpoint.prefault import READ, populate


class Verification:
    """One buffer, as it was committed."""

    def __init__(self, buffer: Buffer, record: Record) -> None:
        """Nothing is compared yet.

        Raises:
            IncompleteBuffer: what describes the data is damaged.
        """
        self.buffer = buffer
        self.record = record
        self.packed = PackedState(buffer.map(), record.data_at, buffer.layout(record))
        self.sums = buffer.sums(record)
        """None: its process ended while they were made."""
        self._left = iter(self.packed.checks(self.sums or ()) if self.sums is not None else ())
        self._begun: Future[None] | None = None
        self.used = False
        """Somebody has finished it, or found damage: what it would say now is worth nothing."""

    def begin(self, background: Executor) -> None:
        """Let another thread start with it."""
        self._begun = background.submit(run_jobs, 1, self._left)

    def finish(self, threads: int) -> None:
        """Do what is left; every byte has been compared then. For one time.

        Raises:
            Damaged: one checksum does not fit.
        """
        self.used = True
        run_jobs(threads, self._left)
        if self._begun is not None and not self._begun.cancel():
            self._begun.result()


def begin(buffers: Iterable[Buffer], background: Executor) -> Verification | None:
    """Map the newest step of some buffers, and begin to compare it, in another thread; None if there is none.

    The newest alone, for that is what nearly all restores take; of the others nothing is lost but time.
    """
    whole = [(record.sequence, buffer, record) for buffer in buffers if (record := buffer.record()) is not None]
    if not whole:
        return None
    _, buffer, record = max(whole, key=operator.itemgetter(0))
    try:
        verification = Verification(buffer, record)
    except IncompleteBuffer:  # who restores says so, if it comes to it
        return None
    if verification.sums is None:  # the agent may be making them at this moment
        return None
    background.submit(populate, buffer, READ)
    verification.begin(background)
    return verification
