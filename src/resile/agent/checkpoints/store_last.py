"""Stores checkpoints that ended processes left in memory, or that living ones have when another node is lost.

All ranks of the node share the retries (`store_retries`), so that many processes do not take many times as long: a node
that ends is killed after a grace period.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable

from resile.checkpoint.buffer import Buffer, IncompleteBuffer, Record
from resile.checkpoint.errors import NotReadable, StorageError
from resile.checkpoint.layout import Layout
from resile.checkpoint.storage import open_storage
from resile.checkpoint.store_retries import store_all

log = logging.getLogger("resile.agent")

Held = tuple[Buffer, Record]


def left_in(ranks: Iterable[list[Buffer]]) -> tuple[list[Held], list[Held]]:
    """Find checkpoints that still have to be stored: the newest of each rank, and the older ones.

    `ranks` has the buffers of each rank. Buffers with no such checkpoint are released for new saves.
    """
    newest: list[Held] = []
    older: list[Held] = []
    for buffers in ranks:
        found = [(buffer, record) for buffer in buffers if (record := _unstored(buffer, buffers)) is not None]
        found.sort(key=lambda pair: pair[1].sequence, reverse=True)
        newest += found[:1]
        older += found[1:]
    return newest, older


def whole_in(ranks: Iterable[list[Buffer]]) -> Held | None:
    """The newest complete step that living processes have saved and that is not in storage; None if there is none.

    A rank that is storing one buffer is skipped, because its process needs the other buffer for the next save.
    """
    found = []
    for buffers in ranks:
        held = [(buffer, record) for buffer in buffers if (record := buffer.record()) is not None]
        if held and not any(buffer.wanted for buffer in buffers):
            buffer, record = max(held, key=lambda each: each[1].sequence)
            with contextlib.suppress(IncompleteBuffer):
                layout = buffer.layout(record)
                if layout.whole and layout.directory and record.sequence > max(each.stored for each in buffers):
                    found.append((buffer, record))
    return max(found, key=lambda each: each[1].step, default=None)


def store_last(
    newest: list[Held],
    older: list[Held],
    pauses: Iterable[float],
    pause: Callable[[float], object],
    what_next: str = "",
) -> str:
    """Store the checkpoints `newest`. If their step is then not complete in storage, store `older` too.

    After a failure, `pause` is called with the next of `pauses`, and the store is tried again. All stores share
    `pauses`. Returns every reason why a store failed, or an empty string. `what_next` ends the log line about the
    stored checkpoint. All buffers are released at the end.
    """
    left = iter(pauses)
    try:
        stored, errors = _store_each(newest, left, pause)
        if older and not (len(stored) == 1 and all(_is_there(place) for place in stored)):
            still = [(buffer, record) for buffer, record in older if buffer.record() == record]
            more, others = _store_each(still, left, pause)
            stored, errors = stored | more, errors + others
        whole = [place for place in sorted(stored) if _is_there(place)]
        for directory, step in whole:
            log.info("the last checkpoint is in storage: %s%s", open_storage(directory).where(step), what_next)
        told = "; ".join(dict.fromkeys(errors))
        return f"the last checkpoint is not in storage: {told}" if told and not whole else told
    except (StorageError, NotReadable) as error:
        return f"cannot tell whether the last checkpoint is in storage: {error}"
    finally:
        for buffer, record in newest + older:
            buffer.release(record.sequence)


def _unstored(buffer: Buffer, siblings: list[Buffer]) -> Record | None:
    """Return the record of the checkpoint in `buffer` if it has to be stored. Else release `buffer` and return None.

    The checkpoint has to be stored if its layout allows that, and if storage has only older checkpoints of
    the rank. `siblings` are all buffers of the rank.
    """
    record = buffer.record()
    try:
        stored = max(each.stored for each in siblings)
        if record is not None and record.sequence > stored and _is_storable(buffer.layout(record)):
            return record
    except IncompleteBuffer as error:
        log.warning("step %d is not stored: %s", record.step if record is not None else 0, error)
    buffer.release()
    return None


def _is_storable(layout: Layout) -> bool:
    return bool(layout.directory) and (layout.whole or not layout.replicated)


def _store_each(
    found: list[Held], pauses: Iterable[float], pause: Callable[[float], object]
) -> tuple[set[tuple[str, int]], list[str]]:
    places, held, errors = [], [], []
    for buffer, record in found:
        if buffer.record() == record and not buffer.wanted:
            buffer.want(record.sequence)
        try:
            places.append((buffer.layout(record).directory, record.step))
            held.append((buffer, record.sequence))
        except IncompleteBuffer as damage:
            errors.append(f"step {record.step} was not stored: {damage}")
    answers = store_all(held, pauses, pause, last=True)
    stored = {place for place, error in zip(places, answers, strict=True) if not error}
    return stored, errors + [error for error in answers if error]


def _is_there(place: tuple[str, int]) -> bool:
    return open_storage(place[0]).has(place[1])
