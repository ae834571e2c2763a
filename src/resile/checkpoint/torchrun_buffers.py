"""Buffers without an agent, for scripts under plain torchrun. They die with the process and only feed storage."""

from __future__ import annotations

import logging
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotYet

from resile.checkpoint.buffer import Buffer
from resile.checkpoint.memory_client import BUFFERS
from resile.checkpoint.memory_limits import short_of
from resile.checkpoint.store_retries import store_committed
from resile.common.log_once import LogOnChange

log = logging.getLogger(__name__)


class ProcessBuffers:
    """Replaces `MemoryClient` if there is no agent. This process owns the buffers; one of its threads stores them."""

    def __init__(self) -> None:
        self.buffers = [Buffer.make("resile-checkpoint") for _ in range(BUFFERS)]
        self._writer = ThreadPoolExecutor(1, "resile-store")
        self._stored: dict[int, Future[str]] = {}
        self._complaints = LogOnChange(log)

    def make_room(self, size: int) -> str:
        need = sum(max(0, size - buffer.size) for buffer in self.buffers)
        if need and (why := short_of(need)):
            return why
        try:
            for buffer in self.buffers:
                buffer.resize(size)
        except OSError as error:
            return f"no memory for checkpoints: {error.strerror}"
        return ""

    def store(self, buffer: int, sequence: int) -> bool:
        """Write a buffer to storage in another thread; `wait` returns the outcome. Always returns True at once.

        When the process exits normally, it waits until the buffer is written.
        """
        self._stored = {number: answer for number, answer in self._stored.items() if not answer.done()}
        self._stored[sequence] = self._writer.submit(self._store, self.buffers[buffer], sequence)
        return True

    def _store(self, buffer: Buffer, sequence: int) -> str:
        error = store_committed(buffer, sequence)
        self._complaints.say(error)
        return error

    def wait(self, sequence: int, timeout: float) -> str | None:
        try:
            answer = self._stored[sequence].result(timeout)
        except NotYet:
            return None
        del self._stored[sequence]
        return answer

    def close(self) -> None:
        self._writer.shutdown()
        for buffer in self.buffers:
            buffer.close()
