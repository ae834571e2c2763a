"""Buffers without an agent, for scripts under plain torchrun: they die with the process, and only carry to storage."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotYet

from resile.checkpoint.buffer import Buffer
from resile.checkpoint.line import BUFFERS
from resile.checkpoint.room import short_of
from resile.checkpoint.storage import store_committed


class OwnBuffers:
    """What `Line` is, within one process; storage is written by a thread of its own."""

    def __init__(self) -> None:
        self.buffers = [Buffer.make("resile-checkpoint") for _ in range(BUFFERS)]
        self._writer = ThreadPoolExecutor(1, "resile-store")
        self._stored: dict[int, Future[str]] = {}

    def make_room(self, size: int) -> str:
        """Make each buffer at least this large; an empty answer, or the sentence that says why not."""
        need = sum(max(0, size - buffer.size) for buffer in self.buffers)
        if need and (why := short_of(need)):
            return why
        for buffer in self.buffers:
            buffer.resize(size)
        return ""

    def store(self, buffer: int, sequence: int) -> None:
        """Have a buffer written to storage; the process does not end before it is."""
        self._stored[sequence] = self._writer.submit(store_committed, self.buffers[buffer], sequence)

    def wait(self, sequence: int, timeout: float) -> str | None:
        """Wait until it is stored: an empty answer, or the sentence that says why it is not; None: not in time."""
        try:
            answer = self._stored[sequence].result(timeout)
        except NotYet:
            return None
        del self._stored[sequence]
        return answer

    def close(self) -> None:
        """Finish writing, and give the memory back."""
        self._writer.shutdown()
        for buffer in self.buffers:
            buffer.close()
