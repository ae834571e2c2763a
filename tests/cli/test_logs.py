"""A log is read piece by piece: whole lines whatever the pieces, and never the whole file in memory."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import pytest

from resile.client.local import logs
from resile.client.local.logs import CHUNK, Log


@pytest.mark.parametrize("chunk", [1, 2, 3, 7, 100])
def test_lines_are_whole_whatever_the_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    monkeypatch.setattr(logs, "CHUNK", chunk)
    path = tmp_path / "log"
    path.write_bytes(b"one\n\ntwo\nthr")
    log = Log(path, None)
    assert list(log.lines()) == [b"one", b"", b"two"]
    assert list(log.lines()) == []
    with path.open("ab") as file:
        file.write(b"ee\nfour")
    assert list(log.lines()) == [b"three"]
    assert list(log.lines(to_the_end=True)) == [b"four"]
    assert list(log.lines(to_the_end=True)) == []


@pytest.mark.parametrize("text", [b"", b"a", b"\n", b"a\nb\nc\n", b"a\n\n\nb", b"a\rb\nc\r\n\n", b"\n\na\n"])
@pytest.mark.parametrize("chunk", [1, 2, 100])
def test_the_last_lines_are_those_that_the_whole_log_ends_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: bytes, chunk: int
) -> None:
    monkeypatch.setattr(logs, "CHUNK", chunk)
    path = tmp_path / "log"
    path.write_bytes(text)
    everything = list(Log(path, None).lines(to_the_end=True))
    for lines in range(6):
        kept = everything[-lines:] if lines else []
        assert list(Log(path, lines).lines(to_the_end=True)) == kept


@pytest.mark.parametrize("line", [b"a line of some length\n", b"a line without an end "])
def test_a_long_log_takes_no_more_memory_than_its_longest_line(tmp_path: Path, line: bytes) -> None:
    size = 16 * CHUNK
    path = tmp_path / "log"
    path.write_bytes(line * (size // len(line)))
    tracemalloc.start()
    try:
        read = sum(len(found) for found in Log(path, None).lines(to_the_end=True))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert read > size * 0.9
    longest = CHUNK if line.endswith(b"\n") else size
    assert peak < 2 * longest + 8 * CHUNK
