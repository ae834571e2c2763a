"""Sends saves to storage one at a time: a save that is due meanwhile stays in its buffer until storage is free again.

One in flight is enough. With both buffers on their way to storage, the next save would have no buffer to go to. The
price is that a deferred save is lost to storage if its buffer is overwritten first.
"""

from __future__ import annotations

from collections.abc import Callable

from resile.checkpoint.log_once import LogOnce
from resile.checkpoint.memory_client import MemoryClient
from resile.checkpoint.torchrun_buffers import ProcessBuffers


class StoreQueue:
    """The saves of one rank that wait for storage."""

    def __init__(
        self,
        memory: MemoryClient | ProcessBuffers | None,
        once: LogOnce,
        submit: Callable[[Callable[[], None]], object],
    ) -> None:
        """Nothing is stored yet.

        Args:
            memory: the buffers of this rank, if it has any.
            once: logs what a user should know.
            submit: runs a function on the thread that seals buffers, after all that was submitted before.
        """
        self._memory = memory
        self._log_once = once
        self._submit = submit
        self._requested = 0
        """The last sequence that was sent to storage; 0 once it was waited for."""
        self._error = ""
        """Why storage refused the last checkpoint that was waited for; empty if it did not."""
        self._deferred: tuple[int, int] | None = None
        """Buffer and sequence of a save that was due while storage was busy with the previous one."""

    def reserve(self, number: int, sequence: int) -> None:
        """Keep a buffer from being overwritten until it is stored. `send` follows once the buffer is sealed."""
        assert self._memory is not None
        self._memory.buffers[number].want(sequence)
        self._requested = sequence

    def defer(self, number: int, sequence: int) -> None:
        """Store a buffer when storage is free again, if it still holds this save."""
        self._deferred = (number, sequence)

    def drop_deferred(self) -> None:
        """Forget the deferred save, because a newer one is due or the group is another one."""
        self._deferred = None

    def follow_up(self, overwritten: int | None) -> None:
        """Send the deferred save, now that storage is free, unless its buffer was overwritten or is about to be."""
        deferred, self._deferred = self._deferred, None
        if deferred is None or deferred[0] == overwritten or self._memory is None:
            return
        number, sequence = deferred
        record = self._memory.buffers[number].record()
        if record is not None and record.sequence == sequence:
            if not any(each.wanted for each in self._memory.buffers):
                self._memory.buffers[number].want(sequence)
            self._requested = sequence
            self._submit(lambda: self.send(number, sequence))

    def send(self, number: int, sequence: int) -> None:
        """Have a buffer written to storage."""
        assert self._memory is not None
        if not self._memory.store(number, sequence):
            self._memory.buffers[number].release()
            self._log_once.say("storage gets no more checkpoints: the agent does not answer")

    def wait(self, timeout: float) -> None:
        """Wait until storage has the last save that it was sent, and then the deferred one.

        Raises:
            TimeoutError: it does not have it yet.
            OSError: it refused it; the text says why. A second call raises it again.
        """
        self._await_requested(timeout)
        self.follow_up(None)  # storage may accept this one, even if it refused the one before
        self._await_requested(timeout)
        if self._error:
            raise OSError(self._error)

    def close(self) -> None:
        """Stop using this rank's buffers."""
        self._memory = None

    def _await_requested(self, timeout: float) -> None:
        if self._requested and self._memory is not None:
            sequence, self._requested = self._requested, 0
            answer = self._memory.wait(sequence, timeout)
            if answer is None:
                self._requested = sequence
                raise TimeoutError(f"storage did not take the checkpoint within {timeout:g} s")
            self._error = answer
