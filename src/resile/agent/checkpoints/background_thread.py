"""A thread for work with storage and networks, which may take minutes and must not block the event loop.

The thread is a daemon, so work that hangs does not keep the agent from ending. The price: when the agent ends, pending
work is lost.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future

from resile.checkpoint.buffer import Buffer
from resile.common.log_once import LogOnChange

log = logging.getLogger("resile.agent")


class WorkThread:
    """Runs queued work in order in one thread, and knows which buffers the pending work uses."""

    def __init__(self, name: str, level: int) -> None:
        self._name = name
        self._work: queue.SimpleQueue[tuple[Callable[[], str], Callable[[str], object], Future[None]]]
        self._work = queue.SimpleQueue()
        self.pending: dict[Future[None], tuple[Buffer, ...]] = {}
        self._complaints = LogOnChange(log, level)

    def start(self) -> None:
        threading.Thread(target=self._run, name=self._name, daemon=True).start()

    def submit(
        self, work: Callable[[], str], *buffers: Buffer, answer: Callable[[str], object] = lambda error: None
    ) -> None:
        """Queue `work`, which uses `buffers`. `work` returns an empty string, or why it failed.

        Then the thread calls `answer` with this string. If `work` raises, `answer` gets a sentence about the exception.
        """
        future: Future[None] = Future()
        self.pending[future] = buffers
        future.add_done_callback(lambda done: self.pending.pop(done, None))
        self._work.put((work, answer, future))

    @property
    def claimed(self) -> set[Buffer]:
        return {buffer for buffers in list(self.pending.values()) for buffer in buffers}

    def _run(self) -> None:
        while True:
            work, answer, future = self._work.get()
            try:
                error = work()
                self._complaints.say(error)
            except Exception as unforeseen:  # this thread must survive any error of a disk or a network
                log.exception("%s failed", self._name)
                error = f"{self._name} failed: {unforeseen}"
            with contextlib.suppress(RuntimeError):  # the agent has ended
                answer(error)
            future.set_result(None)
