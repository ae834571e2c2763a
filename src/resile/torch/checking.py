"""The comparison of a checkpoint in memory with its checksums, as work that several threads may share.

It can begin before anybody asks for the state, while a script that was started again still builds its model; who then
wants the state does what is left of it.
"""

from __future__ import annotations

from concurrent.futures import Executor, Future

from resile.checkpoint.buffer import Buffer, Record
from resile.torch.image import Image, share


class Checking:
    """One buffer, as it was committed."""

    def __init__(self, buffer: Buffer, record: Record) -> None:
        """Nothing is compared yet.

        Raises:
            NotWhole: what describes the data is damaged.
        """
        self.record = record
        self.image = Image(buffer.map(), record.data_at, buffer.layout(record))
        self.sums = buffer.sums(record)
        """None: its process ended while they were made."""
        self._left = iter(self.image.checks(self.sums or ()) if self.sums is not None else ())
        self._begun: Future[None] | None = None

    def begin(self, background: Executor) -> None:
        """Let another thread start with it."""
        self._begun = background.submit(share, 1, self._left)

    def finish(self, threads: int) -> None:
        """Do what is left; every byte has been compared then.

        Raises:
            Damaged: one checksum does not fit.
        """
        share(threads, self._left)
        if self._begun is not None and not self._begun.cancel():
            self._begun.result()
