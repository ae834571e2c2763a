"""What training processes print: to the console, to files, and the last lines kept for when one fails.

A thread does the writing, so a console that does not read (a pager, a slow terminal) stops the printing processes,
as it would without us, but never the agent: its heartbeats go on. Reading never waits, so the last words of a
process that just died can be had at once.
"""

from __future__ import annotations

import os
import selectors
import threading
from collections import deque
from collections.abc import Sequence
from typing import IO

from resile.api.reports import MAX_LOG_TAIL

CHUNK = 64 * 1024
BACKLOG = 1024 * 1024
"""Bytes read but not written yet, per stream, before reading stops and the process has to wait."""
IDLE_SECONDS = 0.1
"""A line without an end (a progress bar) is shown after this long."""


class Stream:
    """One pipe from a process, and where its bytes go."""

    def __init__(self, descriptor: int, sinks: Sequence[IO[bytes]], prefix: bytes, tail: deque[bytes]) -> None:
        os.set_blocking(descriptor, False)
        self.descriptor = descriptor
        self.sinks = sinks
        self.prefix = prefix
        self.tail = tail
        self.unwritten = bytearray()
        self.at_line_start = True
        self.ended = False


class Output:
    """Moves the output of all processes of a node. `close` before exit writes what is left."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._selector = selectors.DefaultSelector()
        self._streams: set[Stream] = set()
        self._waker, self._wake = os.pipe()
        os.set_blocking(self._waker, False)
        self._selector.register(self._waker, selectors.EVENT_READ, None)
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="resile-output", daemon=True)
        self._thread.start()

    def add(self, descriptor: int, sinks: Sequence[IO[bytes]], prefix: bytes, tail: deque[bytes]) -> Stream:
        """Take over the reading end of a pipe."""
        stream = Stream(descriptor, sinks, prefix, tail)
        with self._lock:
            self._streams.add(stream)
        self._selector.register(descriptor, selectors.EVENT_READ, stream)
        self._poke()
        return stream

    def collect(self, streams: Sequence[Stream]) -> None:
        """Read what these pipes hold now, so that the tail is up to date. Never waits."""
        with self._lock:
            for stream in streams:
                self._read(stream)
        self._poke()

    def close(self, patience: float = 2.0) -> None:
        """Write what is left, waiting at most so long for a console that does not read."""
        self._closing = True
        self._poke()
        self._thread.join(patience)

    def _poke(self) -> None:
        os.write(self._wake, b".")

    def _run(self) -> None:
        while True:
            ready = self._selector.select(IDLE_SECONDS if self._pending() else None)
            with self._lock:
                for key, _ in ready:
                    if key.data is None:
                        os.read(self._waker, CHUNK)
                    elif len(key.data.unwritten) < BACKLOG:
                        self._read(key.data)
                streams = list(self._streams)
            for stream in streams:
                self._write(stream, flush=not ready or self._closing or stream.ended)
            if self._closing and not self._pending():
                return

    def _pending(self) -> bool:
        with self._lock:
            return any(stream.unwritten for stream in self._streams)

    def _read(self, stream: Stream) -> None:
        """With the lock held."""
        while not stream.ended:
            try:
                data = os.read(stream.descriptor, CHUNK)
            except BlockingIOError:
                return
            if not data:
                stream.ended = True
                self._selector.unregister(stream.descriptor)
                os.close(stream.descriptor)
                return
            stream.unwritten += data
            _remember(stream.tail, data)
            if len(stream.unwritten) >= BACKLOG:
                return

    def _write(self, stream: Stream, *, flush: bool) -> None:
        with self._lock:
            end = (
                len(stream.unwritten)
                if flush
                else max(stream.unwritten.rfind(b"\n"), stream.unwritten.rfind(b"\r")) + 1
            )
            data = bytes(stream.unwritten[:end])
            del stream.unwritten[:end]
            if stream.ended and not stream.unwritten:
                self._streams.discard(stream)
        if data and stream.prefix:
            data = self._prefixed(stream, data)
        for sink in stream.sinks if data else ():
            try:
                sink.write(data)
                sink.flush()
            except (OSError, ValueError):
                continue  # a closed console or a full disk must not end training

    def _prefixed(self, stream: Stream, data: bytes) -> bytes:
        lines = data.splitlines(keepends=True)
        out = b"".join(
            line if number == 0 and not stream.at_line_start else stream.prefix + line
            for number, line in enumerate(lines)
        )
        stream.at_line_start = data.endswith((b"\n", b"\r"))
        return out


def _remember(tail: deque[bytes], data: bytes) -> None:
    tail.append(data[-MAX_LOG_TAIL:])
    held = sum(map(len, tail))
    while held - len(tail[0]) >= MAX_LOG_TAIL:
        held -= len(tail.popleft())
