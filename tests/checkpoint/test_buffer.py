"""A buffer says that it holds a checkpoint only when it holds all of one, and nothing of it outlives its owners."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from resile.checkpoint.buffer import PAGE, Buffer, IncompleteBuffer
from resile.checkpoint.layout import chunks
from resile.checkpoint.memory_limits import LIMIT, short_of
from tests.checkpoint.buffers import filled, layout_of


def test_a_commit_is_read_back_with_its_layout() -> None:
    buffer, record = filled(layout_of(), step=7)
    assert buffer.record() == record
    assert record.step == 7
    assert buffer.layout(record) == layout_of()
    assert buffer.sums(record) is None, "it is not sealed yet"
    buffer.seal(record, range(chunks(record.length)))
    assert buffer.sums(record) == (0, 1)


def test_a_commit_cut_short_at_any_byte_is_none() -> None:
    buffer, _ = filled(layout_of(), step=7)
    whole = buffer.map()[:128]
    assert any(whole[68:]) is False, "the record and its checksum have 68 bytes"
    for cut in range(68):
        buffer.map()[:128] = whole[:cut].ljust(128, b"\0")
        assert buffer.record() is None, f"cut at byte {cut}"
    buffer.map()[:128] = whole
    assert buffer.record() is not None


def test_a_buffer_that_is_being_overwritten_holds_nothing() -> None:
    buffer, record = filled(layout_of(), step=7)
    buffer.begin(msgspec.json.encode(layout_of()), layout_of().length)
    assert buffer.record() is None
    buffer.seal(record, [1, 2])  # a late seal of what was there before
    assert buffer.record() is None
    again, newer = filled(layout_of(), step=8, buffer=buffer)
    assert again.sums(newer) is None, "the old seal is not the new one's"


def test_a_flipped_bit_in_the_layout_or_in_the_checksums_is_found() -> None:
    buffer, record = filled(layout_of(), step=7)
    buffer.seal(record, [5, 6])
    buffer.map()[record.sums_at] ^= 1
    with pytest.raises(IncompleteBuffer, match="table of checksums is damaged"):
        buffer.sums(record)
    buffer.map()[PAGE + 3] ^= 1
    with pytest.raises(IncompleteBuffer, match="table of contents is damaged"):
        Buffer(os.dup(buffer.descriptor)).layout(record)


def test_a_buffer_grows_without_losing_what_it_holds() -> None:
    buffer, record = filled(layout_of(), step=7)
    buffer.resize(buffer.size + 10 * PAGE)
    assert buffer.record() == record
    with pytest.raises(ValueError, match="cannot hold"):
        buffer.begin(b"{}", buffer.size)
    assert buffer.record() == record, "what does not fit changes nothing"


def test_only_its_user_can_open_it_and_it_has_no_name_on_disk() -> None:
    before = set(os.listdir("/dev/shm"))
    buffer, _ = filled(layout_of(), step=1)
    assert stat.S_IMODE(os.fstat(buffer.descriptor).st_mode) == 0o600
    assert set(os.listdir("/dev/shm")) - before == set()
    assert os.fstat(buffer.descriptor).st_nlink == 0


def test_nothing_is_left_of_it_when_its_owner_is_killed() -> None:
    code = (
        "import os; from resile.checkpoint.buffer import Buffer\n"
        "b = Buffer.make('resile-test'); b.resize(1 << 20); b.map()[:] = b'x' * (1 << 20); print('up', flush=True)\n"
        "import signal; signal.pause()"
    )
    owner = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert owner.stdout is not None
    with owner.stdout:
        assert owner.stdout.readline() == b"up\n"
        owner.send_signal(signal.SIGKILL)
        owner.wait(30)
    held = [link for pid in _pids() for link in _links(pid) if "resile-test" in link]
    assert held == []


def _pids() -> list[str]:
    return [name for name in os.listdir("/proc") if name.isdigit()]


def _links(pid: str) -> list[str]:
    try:
        return [os.readlink(f"/proc/{pid}/fd/{name}") for name in os.listdir(f"/proc/{pid}/fd")]
    except OSError:
        return []


def machine(path: Path, available: int, limit: str = "max", used: int = 0) -> dict[str, Path]:
    (path / "meminfo").write_text(f"MemTotal: 9 kB\nMemAvailable: {available // 1024} kB\n")
    (path / "memory.max").write_text(limit)
    (path / "memory.current").write_text(str(used))
    (path / "memory.stat").write_text("anon 1\ninactive_file 0\n")
    return {"proc": path, "cgroup": path}


def test_too_little_memory_is_one_sentence_that_says_whose(tmp_path: Path) -> None:
    mib = 1 << 20
    roomy = machine(tmp_path, 8192 * mib)
    assert short_of(1024 * mib, environ={}, **roomy) == ""
    assert short_of(600 * mib, 500 * mib, environ={LIMIT: "1Gi"}, **roomy) == (
        f"1100 MiB of memory are needed for checkpoints, {LIMIT} allows 1024 MiB"
    )
    assert "must be a quantity" in short_of(1, environ={LIMIT: "much"}, **roomy)
    assert short_of(1024 * mib, environ={}, **machine(tmp_path, 1100 * mib)).endswith("this machine has 1100 MiB left")
    tight = machine(tmp_path, 8192 * mib, limit=str(2048 * mib), used=1024 * mib)
    assert short_of(1000 * mib, environ={}, **tight).endswith("this container has 1024 MiB left")
    assert short_of(700 * mib, environ={}, **tight) == ""
