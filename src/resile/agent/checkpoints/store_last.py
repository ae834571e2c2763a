"""What processes leave in memory when they end, or have in it when a peer is lost, and its way to storage.

Storage that refuses is tried again, for all ranks of the node together: a node that ends has a grace period before it
is killed (30 s as a rule, which its processes may have used a part of), and one that is taken away for another should
not be held up for as many pauses as it has processes.
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
    """Of the buffers of each rank: the newest that is not in storage, and the ones before it."""
    newest: list[Held] = []
    older: list[Held] = []
    for buffers in ranks:
        found = [(buffer, record) for buffer in buffers if (record := _unstored(buffer, buffers)) is not None]
        found.sort(key=lambda pair: pair[1].sequence, reverse=True)
        newest += found[:1]
        older += found[1:]
    return newest, older


def whole_in(ranks: Iterable[list[Buffer]]) -> Held | None:
    """The newest whole step that living processes have saved, if it is not in storage.

    The other buffer is left to its process, to save into: so nothing is taken while that is on its way to storage.
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
    """Store the newest step of each rank; if that does not make one step whole, the one before it as well.

    An empty answer, or why something was not stored. Nobody wants the buffers kept any longer then.

    Args:
        newest: of each rank.
        older: of the ranks that have two.
        pauses: seconds before each further try, if storage does not take something; for all of it together.
        pause: lets them pass.
        what_next: to add to the words that tell where it is.
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
    """What a buffer holds, unless that or something newer of its rank is in storage."""
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
    """Directory and step of each part that was stored (the step is there once every rank's is), and what went wrong."""
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
