"""The agent's side of checkpoints: it serves processes that do not listen, and ends what they did not live to ask."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from tests.checkpoint.parts import filled, layout_of
from tests.local.runs import wait_until
from tests.torch.vaults import PATIENCE, VaultThread, vault_thread

from resile.checkpoint.buffer import Buffer, places
from resile.checkpoint.line import Line
from resile.checkpoint.room import short_of
from resile.checkpoint.storage import Storage
from resile.wire.variables import AGENT_SOCKET, WORKER


@pytest.fixture
def vault() -> Iterator[VaultThread]:
    with vault_thread() as thread:
        yield thread


def line(vault: VaultThread) -> Line:
    return Line(vault.environment[AGENT_SOCKET], vault.environment[WORKER], 0)


def fill(opened: Line, directory: Path | str, step: int) -> tuple[Buffer, int]:
    layout = layout_of(directory)
    assert opened.make_room(places(msgspec.json.encode(layout), layout.length)[2]) == ""
    buffer, record = filled(layout, step, buffer=opened.buffers[0])
    return buffer, record.sequence


def test_a_process_that_never_asks_what_became_of_its_saves_is_served_for_ever(vault: VaultThread) -> None:
    opened = line(vault)
    _, sequence = fill(opened, "", 1)
    for _ in range(3000):  # more answers than a socket holds
        assert opened.store(0, sequence)
    assert opened.make_room(opened.buffers[0].size + 1) == ""
    assert opened.wait(sequence, PATIENCE) == ""
    opened.close()


def test_a_buffer_whose_process_died_before_it_could_ask_for_storage_is_stored_and_free_again(
    vault: VaultThread, tmp_path: Path
) -> None:
    dead = line(vault)
    buffer, sequence = fill(dead, tmp_path, 5)
    buffer.want(sequence)  # the last it did
    dead.close()
    successor = line(vault)
    wait_until(lambda: not successor.buffers[0].wanted, "the buffer to be free")
    assert Storage(tmp_path).steps() == [5]
    (part,) = Storage(tmp_path).parts(5)
    assert len(part.sums) == 2, "the agent has made the checksums that the process did not"
    successor.close()


def test_room_that_was_promised_to_one_process_is_not_promised_to_another(tmp_path: Path) -> None:
    mib = 1 << 20
    (tmp_path / "meminfo").write_text(f"MemAvailable: {1024 * 1024} kB\n")
    where = {"environ": {}, "proc": tmp_path, "cgroup": tmp_path}
    assert short_of(400 * mib, 400 * mib, 0, **where) == ""
    assert short_of(400 * mib, 400 * mib, 400 * mib, **where).endswith("this machine has 624 MiB left")


@pytest.mark.parametrize(
    ("line", "group", "limit", "used"),
    [
        ("0::/jobs/one", "jobs", "memory.max", "memory.current"),
        ("4:memory:/jobs/one", "memory/jobs/one", "memory.limit_in_bytes", "memory.usage_in_bytes"),
    ],
)
def test_a_limit_around_this_process_counts_wherever_it_is_set(
    tmp_path: Path, line: str, group: str, limit: str, used: str
) -> None:
    (tmp_path / "self").mkdir()
    (tmp_path / "self" / "cgroup").write_text(f"9:cpu:/\n{line}\n")
    around = tmp_path / group
    around.mkdir(parents=True)
    (around / limit).write_text(f"{1 << 30}\n")
    (around / used).write_text(f"{600 << 20}\n")
    (around / "memory.stat").write_text("inactive_file 0\n")
    where = {"environ": {}, "proc": tmp_path, "cgroup": tmp_path}
    assert short_of(100 << 20, **where) == ""
    assert short_of(300 << 20, **where).endswith("this container has 424 MiB left")
