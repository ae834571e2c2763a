"""What training processes print: to the console, to files, and the last lines kept for when one fails.

A thread does the writing, so a console that does not read (a pager, a slow terminal) stops the printing processes,
as it would without us, but never the agent: its heartbeats go on. For the same reason the agent's own words go this
way too. Reading never waits, so the last words of a process that just died can be had at once. A stream that goes to
a file alone is not read here at all: the process writes the file itself.
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
"""Read but not written yet, per stream, before reading stops and the process has to wait."""
LONGEST_LINE = Bytes(64 * 1024)
"""A longer line is written in parts, perhaps with lines of other processes between them."""
IDLE = Seconds(0.1)
"""A line without an end (a progress bar) is shown after this long."""
MAX_WORDS = Bytes(MiB)
"""Of the agent's own words, kept for a console that does not read; older ones give way."""

STDOUT, STDERR = 1, 2


class Outlet(NamedTuple):
    """Where one stream of a process goes: a file, the console's descriptor, both or neither."""

    file: Path | None = None
    console: int | None = None


class Tail:
    """The last words of one process, over both its streams in the order in which they were read."""

    def __init__(self, *files: Path) -> None:
        """`files` are those that the process writes itself; they are read when the words are asked for."""
        self._files = files
        self._chunks: deque[bytes] = deque()
        self._held = 0

    def add(self, data: bytes) -> None:
        """Remember the end of it."""
        data = data[-MAX_LOG_TAIL:]
        self._chunks.append(data)
        self._held += len(data)
        while self._held - len(self._chunks[0]) >= MAX_LOG_TAIL:
            self._held -= len(self._chunks.popleft())

    def read(self) -> bytes:
        """What is known now; at most `MAX_LOG_TAIL` bytes and a chunk for each source."""
        return b"".join([*(tail_of(str(path)) for path in self._files), *self._chunks])


class Stream:
    """One pipe from a process, and where its bytes go. It owns its files and closes them at the end."""

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
        """Whole lines, and what comes after them if it is long, old or the last there will be."""
        stale = time.monotonic() - self.waiting_since >= IDLE
        if everything or self.ended or stale or len(self.unwritten) >= LONGEST_LINE:
            end = len(self.unwritten)
        else:
            end = max(self.unwritten.rfind(b"\n"), self.unwritten.rfind(b"\r")) + 1
        data = bytes(self.unwritten[:end])
        del self.unwritten[:end]
        return self._prefixed(data) if self.prefix and data else data

    def _prefixed(self, data: bytes) -> bytes:
        lines = data.split(b"\n")
        last = lines.pop()
        out = b"".join(self._start_of_line(number) + line + b"\n" for number, line in enumerate(lines))
        if last:
            out += self._start_of_line(len(lines)) + last
        self.at_line_start = not last
        return out

    def _start_of_line(self, number: int) -> bytes:
        return self.prefix if number or self.at_line_start else b""


class Output:
    """Moves the output of all processes of a node. `close` before exit writes what is left."""

    def __init__(self, words_to: int = STDERR) -> None:
        """Start the writing thread; the agent's own words go to the descriptor `words_to`."""
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
        """A descriptor for a process to write to (the caller closes it), and the stream if it is read here.

        Raises:
            OSError: no file or pipe can be opened.
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
        """Read what these pipes hold now, so that the tail is up to date. Never waits."""
        with self._lock:
            for stream in streams:
                self._read(stream)
        self._poke()

    def say(self, words: str) -> None:
        """Print a line of the agent's own. Never waits; if the terminal is not read, older lines give way to newer."""
        data = words.encode(errors="replace") + b"\n"
        with self._lock:
            self._words.append(data)
            self._words_held += len(data)
            while self._words_held > MAX_WORDS and len(self._words) > 1:
                self._words_held -= len(self._words.popleft())
        self._poke()

    def close(self, patience: float = 2.0) -> None:
        """Write what is left, waiting at most so long for a console that does not read."""
        self._closing = True
        self._poke()
        self._thread.join(patience)
        if not self._thread.is_alive():
            self._selector.close()
            left = [d for s in self._streams for d in (s.descriptor, s.file) if d is not None]
            for descriptor in (self._waker, self._wake, *left):
                os.close(descriptor)

    def _poke(self) -> None:
        with contextlib.suppress(BlockingIOError):  # full of pokes: it is awake
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
        """Take what the pipe holds; whether there was any. With the lock held."""
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
        """Without the lock while it waits for the console or the disk."""
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
    """Log records as words of the agent: writing them never holds up the event loop."""

    def __init__(self, output: Output) -> None:
        super().__init__()
        self._output = output

    def emit(self, record: logging.LogRecord) -> None:
        """Hand one record to the writing thread."""
        self._output.say(self.format(record))


def console(stream: str) -> int:
    """The descriptor of this process's `stdout` or `stderr`, with what Python holds back of it written first."""
    file = getattr(sys, stream)
    with contextlib.suppress(OSError, ValueError):
        file.flush()
    return STDOUT if stream == "stdout" else STDERR


def _write_all(descriptor: int, data: bytes) -> bool:
    """Write all of it, waiting as long as it takes; False if the other end is closed."""
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(descriptor, view) :]
        except BlockingIOError:
            select.select([], [descriptor], [])
        except OSError:
            return False
    return True
