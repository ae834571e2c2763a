"""Moves the output of training processes to the console and to files, and keeps the last lines for failure reports.

A thread does the writing. So a console that does not read (a pager, a slow terminal) stops the processes that print, as
it would without an agent, but never the agent and its heartbeats. The agent's own log lines go the same way for the
same reason. Reading never waits, so the last output of a process that just died is available at once. A stream that
only goes to a file is not read here: the process writes the file itself.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import selectors
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from resile.agent.failures.evidence import tail_of
from resile.api.ids import Bytes, MiB, Seconds
from resile.protocol.reports import MAX_LOG_TAIL

CHUNK = Bytes(64 * 1024)
BACKLOG = Bytes(MiB)
"""Bytes of a stream that are read ahead of writing. Beyond that, reading stops and the process has to wait."""
LONGEST_LINE = Bytes(64 * 1024)
"""Longer lines are written in pieces, and lines of other processes may come between the pieces."""
IDLE = Seconds(0.1)
"""Seconds after which an unfinished line (a progress bar) is shown."""
MAX_WORDS = Bytes(MiB)
"""Bytes of the agent's own lines that are kept for a console that does not read; older lines are dropped."""

STDOUT, STDERR = 1, 2


class Outlet(NamedTuple):
    """Where one stream of a process goes: a file, the console's descriptor, both or neither."""

    file: Path | None = None
    console: int | None = None


class Tail:
    """The last bytes that one process printed to stdout and stderr, in the order in which they were read."""

    def __init__(self, *files: Path) -> None:
        """`files` are logs that the process itself writes. `add` does not get that output, so `read` reads it."""
        self._files = files
        self._chunks: deque[bytes] = deque()
        self._held = 0

    def add(self, data: bytes) -> None:
        data = data[-MAX_LOG_TAIL:]
        self._chunks.append(data)
        self._held += len(data)
        while self._held - len(self._chunks[0]) >= MAX_LOG_TAIL:
            self._held -= len(self._chunks.popleft())

    def read(self) -> bytes:
        """About `MAX_LOG_TAIL` bytes from the end of each log file, then as many of the last bytes given to `add`."""
        return b"".join([*(tail_of(str(path)) for path in self._files), *self._chunks])


class Stream:
    def __init__(self, descriptor: int, console: int | None, file: int | None, prefix: bytes, tail: Tail) -> None:
        os.set_blocking(descriptor, False)
        self.descriptor = descriptor
        self.console = console
        self.file = file
        self.prefix = prefix
        self.tail = tail
        self.unwritten = bytearray()
        self.waiting_since = 0.0
        self.at_line_start = True
        self.ended = False

    def take(self, *, everything: bool) -> bytes:
        """Remove and return the lines to be written now, with the prefix.

        An unfinished line is left out, unless it is long or old, the stream has ended, or `everything` is True.
        """
        stale = time.monotonic() - self.waiting_since >= IDLE
        if everything or self.ended or stale or len(self.unwritten) >= LONGEST_LINE:
            end = len(self.unwritten)
        else:
            end = max(self.unwritten.rfind(b"\n"), self.unwritten.rfind(b"\r")) + 1
        data = bytes(self.unwritten[:end])
        del self.unwritten[:end]
        return self._prefixed(data) if self.prefix and data else data

    def _prefixed(self, data: bytes) -> bytes:
        start = self.prefix if self.at_line_start else b""
        self.at_line_start = data.endswith(b"\n")
        end = b"\n" if self.at_line_start else b""
        return start + data.removesuffix(b"\n").replace(b"\n", b"\n" + self.prefix) + end


class Output:
    """Moves the output of a node's processes to the console and files. To write the rest before exit, call `close`."""

    def __init__(self, words_to: int = STDERR) -> None:
        self._lock = threading.Lock()
        self._selector = selectors.DefaultSelector()
        self._streams: set[Stream] = set()
        self._words: deque[bytes] = deque()
        self._words_held = 0
        self._words_to = words_to
        self._waker, self._wake = os.pipe()
        os.set_blocking(self._waker, False)
        os.set_blocking(self._wake, False)
        self._selector.register(self._waker, selectors.EVENT_READ, None)
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="resile-output", daemon=True)
        self._thread.start()

    def open(self, outlet: Outlet, prefix: bytes, tail: Tail) -> tuple[int, Stream | None]:
        """Open a descriptor to which a process prints, and return it with its stream. The caller closes the descriptor.

        Each line gets `prefix`, and `tail` gets a copy. If the output only goes to a file, the process itself writes
        the file. The stream is then None, and `prefix` and `tail` are not used.
        """
        file = None
        if outlet.file is not None:
            file = os.open(outlet.file, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
            if outlet.console is None:
                return file, None
        try:
            reading, writing = os.pipe()
        except OSError:
            if file is not None:
                os.close(file)
            raise
        stream = Stream(reading, outlet.console, file, prefix, tail)
        with self._lock:
            self._streams.add(stream)
        self._selector.register(reading, selectors.EVENT_READ, stream)
        self._poke()
        return writing, stream

    def collect(self, streams: Sequence[Stream]) -> None:
        """Read all that is in the pipes of `streams` now, so that their tails are up to date. Never waits."""
        with self._lock:
            for stream in streams:
                self._read(stream)
        self._poke()

    def say(self, words: str) -> None:
        """Print a line of the agent itself. Never waits. If the console does not read, older lines are dropped."""
        data = words.encode(errors="replace") + b"\n"
        with self._lock:
            self._words.append(data)
            self._words_held += len(data)
            while self._words_held > MAX_WORDS and len(self._words) > 1:
                self._words_held -= len(self._words.popleft())
        self._poke()

    def close(self, patience: float = 2.0) -> None:
        """Write all output that is left, waiting at most `patience` seconds for a console that does not read."""
        self._closing = True
        self._poke()
        self._thread.join(patience)
        if not self._thread.is_alive():
            self._selector.close()
            left = [d for s in self._streams for d in (s.descriptor, s.file) if d is not None]
            for descriptor in (self._waker, self._wake, *left):
                os.close(descriptor)

    def _poke(self) -> None:
        with contextlib.suppress(BlockingIOError):  # the pipe is full of pokes: the thread is awake
            os.write(self._wake, b".")

    def _run(self) -> None:
        while True:
            ready = self._selector.select(self._patience())
            busy = False
            with self._lock:
                for key, _ in ready:
                    if key.data is None:
                        os.read(self._waker, CHUNK)
                    elif len(key.data.unwritten) < BACKLOG:
                        busy |= self._read(key.data)
                streams = list(self._streams)
            self._write_words()
            for stream in streams:
                self._write(stream)
            if self._closing and not busy:
                return

    def _patience(self) -> float | None:
        if self._closing:
            return 0.0
        with self._lock:
            return IDLE if any(stream.unwritten for stream in self._streams) else None

    def _read(self, stream: Stream) -> bool:
        """Read what is in the pipe of `stream`, and return True if there was output. The caller holds the lock.

        Stops when BACKLOG bytes wait to be written.
        """
        some = False
        while not stream.ended and len(stream.unwritten) < BACKLOG:
            try:
                data = os.read(stream.descriptor, CHUNK)
            except BlockingIOError:
                break
            if not data:
                stream.ended = True
                self._selector.unregister(stream.descriptor)
                os.close(stream.descriptor)
                break
            some = True
            if not stream.unwritten:
                stream.waiting_since = time.monotonic()
            stream.unwritten += data
            stream.tail.add(data)
        return some

    def _write(self, stream: Stream) -> None:
        """Write what `stream.take` returns. The lock is not held during a wait for the console or the disk."""
        with self._lock:
            data = stream.take(everything=self._closing)
            over = stream.ended and not stream.unwritten
            if over:
                self._streams.discard(stream)
        if data and stream.file is not None and not _write_all(stream.file, data):
            os.close(stream.file)  # a full disk must not end training
            stream.file = None
        if data and stream.console is not None and not _write_all(stream.console, data):
            stream.console = None  # nor a console that is gone
        if over and stream.file is not None:
            os.close(stream.file)
            stream.file = None

    def _write_words(self) -> None:
        with self._lock:
            data = b"".join(self._words)
            self._words.clear()
            self._words_held = 0
        if data:
            _write_all(self._words_to, data)


class OutputLines(logging.Handler):
    """Sends log records to the thread of an `Output`, so that logging never blocks the event loop."""

    def __init__(self, output: Output) -> None:
        super().__init__()
        self._output = output

    def emit(self, record: logging.LogRecord) -> None:
        self._output.say(self.format(record))


def console(stream: str) -> int:
    """The descriptor of this process's `stdout` or `stderr`. Python's buffer of this stream is flushed first."""
    file = getattr(sys, stream)
    with contextlib.suppress(OSError, ValueError):
        file.flush()
    return STDOUT if stream == "stdout" else STDERR


def _write_all(descriptor: int, data: bytes) -> bool:
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(descriptor, view) :]
        except BlockingIOError:
            select.select([], [descriptor], [])
        except OSError:
            return False
    return True
