"""What processes print arrives whole, in order and prefixed, and a console that does not read holds up nobody else."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from resile.agent.workers.output import LONGEST_LINE, MAX_WORDS, Outlet, Output, Tail
from resile.protocol.reports import MAX_LOG_TAIL


class Console:
    """A pipe in the console's place."""

    def __init__(self) -> None:
        self.reading, self.writing = os.pipe()

    def read(self, count: int) -> bytes:
        data = b""
        while len(data) < count and (chunk := os.read(self.reading, count - len(data))):
            data += chunk
        return data


@pytest.fixture
def console() -> Iterator[Console]:
    console = Console()
    yield console
    for descriptor in (console.reading, console.writing):
        os.close(descriptor)


@pytest.fixture
def output(console: Console) -> Iterator[Output]:
    output = Output(words_to=console.writing)
    yield output
    output.close()


def until(found: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not found():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_lines_get_their_prefix_wherever_they_were_cut(console: Console, output: Output) -> None:
    writing, stream = output.open(Outlet(console=console.writing), b"[w0]:", Tail())
    assert stream is not None
    os.write(writing, b"one\ntw")
    assert console.read(len(b"[w0]:one\n")) == b"[w0]:one\n"
    os.write(writing, b"o\n\nend")
    os.close(writing)
    expected = b"[w0]:two\n[w0]:\n[w0]:end"
    assert console.read(len(expected)) == expected


def test_a_line_without_an_end_is_shown_after_a_moment(console: Console, output: Output) -> None:
    writing, _ = output.open(Outlet(console=console.writing), b"", Tail())
    os.write(writing, b"10% ")
    assert console.read(4) == b"10% "
    os.close(writing)


def test_an_endless_line_is_passed_on_in_parts(console: Console, output: Output) -> None:
    writing, _ = output.open(Outlet(console=console.writing), b"", Tail())
    size = 40 * LONGEST_LINE

    def write() -> None:
        left = size
        while left:
            left -= os.write(writing, b"x" * min(left, 65536))
        os.close(writing)

    thread = threading.Thread(target=write)
    thread.start()
    assert console.read(size) == b"x" * size
    thread.join()


def test_a_stream_for_a_file_alone_is_written_by_the_process_itself(tmp_path: Path, output: Output) -> None:
    file = tmp_path / "stdout.log"
    tail = Tail(file)
    writing, stream = output.open(Outlet(file=file), b"[ignored]:", tail)
    assert stream is None
    os.write(writing, b"line\n")
    os.close(writing)
    assert file.read_bytes() == tail.read() == b"line\n"


def test_the_tail_has_the_last_words_even_if_the_console_is_stuck(console: Console) -> None:
    output = Output(words_to=console.writing)
    tail = Tail()
    stuck, _ = output.open(Outlet(console=console.writing), b"", Tail())
    os.set_blocking(stuck, False)
    until(lambda: _refused(stuck))
    writing, stream = output.open(Outlet(console=console.writing), b"", tail)
    assert stream is not None
    os.write(writing, b"last words")
    output.collect([stream])
    assert tail.read() == b"last words"
    for number in range(50_000):  # the agent goes on talking, in bounded memory and without waiting
        output.say(f"line {number}")
    assert output._words_held <= MAX_WORDS
    began = time.monotonic()
    output.close(0.1)
    assert time.monotonic() - began < 5
    for descriptor in (stuck, writing):
        os.close(descriptor)
    os.set_blocking(console.reading, False)
    until(lambda: _drained(console.reading) and not output._thread.is_alive())
    output.close()


def test_a_console_that_is_gone_stops_nothing(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    output = Output(words_to=writing)
    file = tmp_path / "stdout.log"
    pipe, _ = output.open(Outlet(file=file, console=writing), b"", Tail())
    os.write(pipe, b"one\n")
    until(lambda: file.exists() and file.read_bytes() == b"one\n")
    os.write(pipe, b"two\n")
    os.close(pipe)
    until(lambda: file.read_bytes() == b"one\ntwo\n")
    output.close()
    os.close(writing)


def test_nothing_stays_open_when_streams_end(tmp_path: Path, console: Console, output: Output) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for number in range(20):
        writing, _ = output.open(Outlet(tmp_path / str(number), console.writing), b"", Tail())
        os.write(writing, b"x\n")
        os.close(writing)
    until(lambda: len(os.listdir("/proc/self/fd")) == before)
    assert (tmp_path / "19").read_bytes() == b"x\n"


def test_a_tail_keeps_the_end_in_bounded_memory() -> None:
    tail = Tail()
    for number in range(10_000):
        tail.add(b"%09d\n" % number)
    kept = tail.read()
    assert kept.endswith(b"000009998\n000009999\n")
    assert MAX_LOG_TAIL <= len(kept) < 2 * MAX_LOG_TAIL


def _refused(descriptor: int) -> bool:
    try:
        os.write(descriptor, b"x" * 65536)
    except BlockingIOError:
        return True
    return False


def _drained(descriptor: int) -> bool:
    try:
        return not os.read(descriptor, 1 << 20)
    except BlockingIOError:
        return True
