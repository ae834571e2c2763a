"""A thread that does one thing after the other: storage and networks may take minutes, and the event loop must not.

The thread is a daemon: work that hangs does not keep the agent from ending. In return no work may rely on being done.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future

from resile.checkpoint.buffer import Buffer
from resile.checkpoint.log_once import LogOnChange

log = logging.getLogger("resile.agent")


class WorkThread:
    """Does what it is given in order, and knows which buffers that concerns."""

    def __init__(self, name: str, level: int) -> None:
        """Nothing is done before `start`; what could not be done is logged at this level."""
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
        """Do something with these buffers when it is its turn.

        Args:
            work: does it; returns nothing, or why it could not be done.
            buffers: they are claimed until then.
            answer: is told in any case what came of it, whatever the work raises.
        """
        future: Future[None] = Future()
        self.pending[future] = buffers
        future.add_done_callback(lambda done: self.pending.pop(done, None))
        self._work.put((work, answer, future))

    @property
    def claimed(self) -> set[Buffer]:
        """The buffers that it works on, or will."""
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
