"""Writes checkpoints from memory to storage and tries again when storage refuses them.

A full disk or a missing mount may pass within seconds, and the buffer still has the step. So a refused step is tried
again after each of a few pauses. The pauses are shared by all buffers of one call: a node that ends has a grace period
(30 s as a rule), which must not be spent once for every process. Errors that waiting does not cure (`NotWritable`) are
not tried again.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from resile.checkpoint.buffer import Buffer, IncompleteBuffer
from resile.checkpoint.errors import NotReadable, NotWritable, StorageError
from resile.checkpoint.storage import Storage, open_storage

if TYPE_CHECKING:
    from resile.checkpoint.object_storage import ObjectStorage

PAUSES = (0.5, 1.5, 4.0)
"""Seconds that an agent waits before each further try."""
OTHERS_FIRST = 1.0
"""Seconds that the rank responsible for a step has to begin storing it, before another rank that has the step does."""
LOOK = 0.25
"""Seconds between two looks whether another rank stores a step."""


def store_committed(
    buffer: Buffer, sequence: int, pauses: Iterable[float] = (), pause: Callable[[float], object] = time.sleep
) -> str:
    """Write the checkpoint `sequence` of one buffer to storage. `pauses` and `pause` are those of `store_all`.

    Returns an empty string, or a sentence that says why the checkpoint was not stored.
    """
    return store_all([(buffer, sequence)], pauses, pause)[0]


def store_all(
    held: Sequence[tuple[Buffer, int]],
    pauses: Iterable[float],
    pause: Callable[[float], object] = time.sleep,
    *,
    last: bool = False,
) -> list[str]:
    """Write buffers to the storage that their layouts name. If storage refuses a buffer, try it again after a pause.

    Returns one text for each buffer: empty, or a sentence that says why the buffer was not stored.

    Args:
        held: buffers, each with the sequence number of its checkpoint. All are released before this function returns.
        pauses: seconds before each further try. If waiting does not cure a buffer's error, it is not tried again.
        pause: called with the seconds to wait.
        last: True if the rank responsible for a step may be gone. Then this rank stores the step if no other seems to.
    """
    answers = [""] * len(held)
    left, to_do = iter(pauses), list(range(len(held)))
    try:
        while True:
            refused = []
            for number in to_do:
                try:
                    answers[number] = _store(*held[number], pause if last else None)
                except StorageError as error:
                    answers[number] = str(error)
                    if not isinstance(error, NotWritable):
                        refused.append(number)
            if not refused or (seconds := next(left, None)) is None:
                return answers
            to_do = refused
            pause(seconds)
    finally:
        for buffer, sequence in held:
            buffer.release(sequence)


def _store(buffer: Buffer, sequence: int, pause: Callable[[float], object] | None) -> str:
    """Try once to store the checkpoint `sequence` of a buffer. Returns "", or why further tries are useless.

    If another rank is responsible for the step, writes nothing and returns "". With `pause`, waits a while for that
    rank, and writes the step if no other rank does. Raises StorageError if storage refused the checkpoint.
    """
    record = buffer.record()
    if record is None or record.sequence != sequence:
        return "it was not stored: a newer step took its place in memory"
    try:
        layout = buffer.layout(record)
        if layout.directory and (not layout.is_anothers or (layout.whole and pause is not None)):
            keep = open_storage(layout.directory, keep_last=layout.keep_last, keep_every=layout.keep_every)
            if not layout.is_anothers or pause is None or _is_left_to_us(record.step, keep, layout.rank, pause):
                keep.store(buffer, record)
            buffer.note_stored(record)
    except IncompleteBuffer as error:
        return str(error)
    return ""


def _is_left_to_us(step: int, keep: Storage | ObjectStorage, rank: int, pause: Callable[[float], object]) -> bool:
    """Wait for other ranks to store a step. True if the step is still missing then and no rank seems to write it.

    How long to wait depends on `rank`, so that two ranks seldom write the same step.
    """
    seen: int | None = None
    try:
        while (now := keep.progress(step)) != seen:
            seen = now
            for _ in range(round((OTHERS_FIRST + math.log2(rank)) / LOOK)):
                if keep.has(step):
                    return False
                pause(LOOK)
        return not keep.has(step)
    except NotReadable as error:
        raise StorageError(f"step {step} was not stored: {error}") from None
