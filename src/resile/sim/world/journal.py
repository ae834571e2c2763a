"""A journal in memory, as bytes: all that a dead master leaves behind."""

from __future__ import annotations

import msgspec

from resile.core.events import AnyEvent
from resile.core.state import JobState

_encode = msgspec.msgpack.Encoder().encode
_decode_event = msgspec.msgpack.Decoder(tuple[float, AnyEvent]).decode
_decode_state = msgspec.msgpack.Decoder(JobState).decode


class MemoryJournal:
    def __init__(self, state: JobState) -> None:
        self._snapshot = _encode(state)
        self._events: list[bytes] = []

    def append(self, now: float, event: AnyEvent) -> None:
        self._events.append(_encode((now, event)))

    def compact(self, state: JobState) -> None:
        """Replace everything by this state."""
        self._snapshot = _encode(state)
        self._events.clear()

    def load(self) -> tuple[JobState, list[tuple[float, AnyEvent]]]:
        return _decode_state(self._snapshot), [_decode_event(event) for event in self._events]
