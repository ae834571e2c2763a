"""The agent's side of checkpoints: it serves processes that do not listen, and ends what they did not live to ask."""

from __future__ import annotations

import errno
import os
import queue
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from resile.agent.checkpoints.replica_client import ReplicaClient
from resile.api.ids import Round
from resile.checkpoint.buffer import Buffer, places
from resile.checkpoint.memory_client import MemoryClient, NoCheckpointServer
from resile.checkpoint.memory_limits import short_of
from resile.checkpoint.storage import Storage
from resile.checkpoint.store_retries import PAUSES
from resile.protocol.reports import ReplicaEndpoint
from resile.torch.checkpointer import Checkpointer
from resile.wire.env import AGENT_SOCKET, WORKER
from resile.wire.job_directory import DirectoryError
from tests.checkpoint.buffers import filled, layout_of
from tests.local.resile_run import wait_until
from tests.torch.checkpoint.checkpoint_servers import PATIENCE, VaultThread, in_ranks, is_uniform, uniform, vault_thread


@pytest.fixture
def vault(request: pytest.FixtureRequest) -> Iterator[VaultThread]:
    with vault_thread(**getattr(request, "param", {})) as thread:
        yield thread


def line(vault: VaultThread, local_rank: int = 0) -> MemoryClient:
    return MemoryClient(vault.environment[AGENT_SOCKET], vault.environment[WORKER], local_rank)


def fill(opened: MemoryClient, directory: Path | str, step: int, rank: int = 0, world: int = 1) -> tuple[Buffer, int]:
    layout = layout_of(directory, rank=rank, world=world)
    assert opened.make_room(places(len(msgspec.json.encode(layout)), layout.length)[2]) == ""
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


def test_a_request_that_fails_is_cut_off_at_once_and_others_are_served(
    vault: VaultThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with monkeypatch.context() as patch:
        patch.setattr(vault.vault, "_open", fail)
        begun = time.monotonic()
        with pytest.raises(NoCheckpointServer):
            line(vault)
        assert time.monotonic() - begun < 5, "it would wait 10 s for an answer"
    line(vault).close()


class Told(threading.Condition):
    """One of which a test knows that a thread waits to be told."""

    def __init__(self) -> None:
        super().__init__()
        self.waits = threading.Event()

    def wait(self, timeout: float | None = None) -> bool:
        self.waits.set()
        return super().wait(timeout)


def test_of_threads_that_wait_on_a_line_each_is_told_at_once_whoever_of_them_listens(vault: VaultThread) -> None:
    opened, turn, said = line(vault), Told(), queue.SimpleQueue[tuple[int, str | None]]()
    opened._turn = turn
    _, sequence = fill(opened, "", 1)

    def await_copy(number: int) -> None:
        said.put((number, opened.copied(number, 10 * PATIENCE)))

    threading.Thread(target=await_copy, args=(sequence,), daemon=True).start()
    wait_until(lambda: opened._listening, "a thread to listen")
    threading.Thread(target=await_copy, args=(sequence + 1,), daemon=True).start()
    assert turn.waits.wait(PATIENCE)
    turn.waits.clear()
    threading.Thread(target=await_copy, args=(sequence + 2,), daemon=True).start()
    assert turn.waits.wait(PATIENCE)
    alone = "there is no other node to copy to"
    assert opened.has_partner() is False, "they keep nobody from asking, and the listener hears the answer"
    assert opened.copy_out(0, sequence + 2)
    assert said.get(timeout=PATIENCE) == (sequence + 2, alone), "the listener told one who waits"
    assert opened.copy_out(0, sequence)
    assert said.get(timeout=PATIENCE) == (sequence, alone), "the listener has heard what it waits for"
    assert opened.copy_out(0, sequence + 1)
    assert said.get(timeout=PATIENCE) == (sequence + 1, alone), "another thread listens in its place"
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


def unknown() -> bytes:
    raise DirectoryError("the job's token cannot be read")


@pytest.mark.parametrize("vault", [{"token": unknown}], indirect=True)
def test_a_request_is_answered_whatever_becomes_of_it(vault: VaultThread, monkeypatch: pytest.MonkeyPatch) -> None:
    def unforeseen(*_: object) -> str:
        raise RuntimeError("the store's library has its moods")

    opened = line(vault)
    _, sequence = fill(opened, "", 1)
    vault.do(lambda: vault.vault.enter(Round(1), ReplicaEndpoint(address="127.0.0.1", port=1)))
    assert opened.copy_out(0, sequence)
    assert "the job's token cannot be read" in (opened.copied(sequence, PATIENCE) or "")
    monkeypatch.setattr("resile.agent.checkpoints.checkpoint_server.store_committed", unforeseen)
    assert opened.store(0, sequence)
    assert "the store's library has its moods" in (opened.wait(sequence, PATIENCE) or "")
    assert opened.store(7, 8)
    assert opened.wait(8, PATIENCE) == "there is no buffer 7"
    assert opened.copy_out(-1, 9)
    assert opened.copied(9, PATIENCE) == "there is no buffer -1"
    opened.close()


class Full:
    """A disk that takes nothing until somebody tidies up."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._takes = os.sendfile
        self.tidy = False
        monkeypatch.setattr(os, "sendfile", self._send)

    def _send(self, *words: int) -> int:
        if not self.tidy:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return self._takes(*words)

    def tidy_up(self, *_: float) -> None:
        self.tidy = True


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch) -> Full:
    return Full(monkeypatch)


def test_what_storage_does_not_take_at_first_is_tried_again(tmp_path: Path, full: Full) -> None:
    storage = tmp_path / "storage"
    with vault_thread(pause=full.tidy_up) as vault:
        dead = line(vault)
        fill(dead, storage, 5)
        dead.close()
        vault.flush()
        assert Storage(storage).steps() == [5]
        successor = line(vault)
        assert not successor.buffers[0].wanted
        successor.close()


def test_storage_that_never_takes_it_is_one_sentence_and_the_next_end_of_processes_tries_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, full: Full
) -> None:
    pauses: list[float] = []
    storage = tmp_path / "storage"
    with vault_thread(pause=pauses.append) as vault:
        dead = line(vault)
        fill(dead, storage, 5)
        dead.close()
        vault.flush()
        assert pauses == list(PAUSES)
        assert caplog.text.count("step 5 was not stored in") == 1
        successor = line(vault)
        assert not successor.buffers[0].wanted, "saves go on"
        successor.close()
        full.tidy_up()
        vault.flush()
        assert Storage(storage).steps() == [5]


def test_storage_that_will_never_take_a_step_is_said_once_and_held_up_for_by_nobody(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pauses: list[float] = []
    storage = tmp_path / "storage"
    storage.touch()
    why = f"checkpoints cannot be stored in {storage}: Not a directory"
    with vault_thread(pause=pauses.append) as vault:
        opened = line(vault)
        for step in (5, 6, 7):
            buffer, sequence = fill(opened, storage, step)
            buffer.want(sequence)
            begun = time.monotonic()
            assert opened.store(0, sequence)
            assert opened.wait(sequence, PATIENCE) == why
            assert time.monotonic() - begun < sum(PAUSES), "nothing was waited for"
            assert not buffer.wanted, "saves go on"
        assert caplog.text.count(why) == 1, caplog.text
        opened.close()
        vault.flush()
        assert f"the last checkpoint is not in storage: {why}" in caplog.text
        assert pauses == []
        storage.unlink()
        vault.flush()
        assert Storage(storage).steps() == [7], "once somebody has mended it, it is used"


def test_a_storage_that_refuses_holds_up_a_node_of_many_processes_no_longer_than_one_of_one(
    tmp_path: Path, full: Full
) -> None:
    pauses: list[float] = []
    storage = tmp_path / "storage"

    def pass_by(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 2 * len(PAUSES):
            full.tidy_up()

    with vault_thread(pause=pass_by) as vault:
        for rank in range(3):
            dead = line(vault, rank)
            fill(dead, storage, 5, rank, 3)
            dead.close()
        vault.flush()
        assert pauses == list(PAUSES)
        vault.flush()
    assert pauses == 2 * list(PAUSES)
    assert Storage(storage).steps() == [5], "all that is left is tried after each pause"


def test_what_a_process_asked_storage_for_is_not_waited_for_twice_at_the_end_of_its_node(
    tmp_path: Path, full: Full
) -> None:
    storage = tmp_path / "storage"
    with vault_thread(pause=full.tidy_up) as vault:
        dead = line(vault)
        _, sequence = fill(dead, storage, 5)
        for _ in range(3):
            assert dead.store(0, sequence)
        wait_until(lambda: len(vault.vault._storing.pending) == 3, "the vault to hear it")
        begun = time.monotonic()
        dead.close()
        vault.flush()
        assert time.monotonic() - begun < sum(PAUSES), "each of the requests would take so long"
        assert Storage(storage).steps() == [5]


def saves_what_all_have(rank: int, directory: str) -> bool:
    checkpointer = Checkpointer(directory)
    kept = checkpointer.save(7, uniform(7, 100))
    checkpointer.wait(PATIENCE)
    return kept


@pytest.mark.parametrize("lost", [0, 1])
def test_a_node_that_is_left_brings_what_all_ranks_have_to_storage_whichever_is_lost(tmp_path: Path, lost: int) -> None:
    with vault_thread() as first, vault_thread() as second:
        assert in_ranks(saves_what_all_have, 2, str(tmp_path), vault=[first, second]) == [True, True]
        (second, first)[lost].flush()
    state = uniform(0, 100)
    assert Checkpointer(tmp_path).restore(state) == 7
    assert is_uniform(state, 7)


def test_when_a_peer_is_lost_the_last_step_goes_to_storage_while_its_process_goes_on(tmp_path: Path) -> None:
    sleeping, go_on = threading.Event(), threading.Event()
    with vault_thread(pause=lambda seconds: (sleeping.set(), go_on.wait(PATIENCE))) as vault:
        opened = line(vault)
        layout = layout_of(tmp_path, rank=1, world=2, whole=True)
        assert opened.make_room(places(len(msgspec.json.encode(layout)), layout.length)[2]) == ""
        for step, buffer in ((4, opened.buffers[1]), (5, opened.buffers[0])):
            filled(layout, step, buffer=buffer)
        vault.do(vault.vault.rescue)
        assert sleeping.wait(PATIENCE)
        assert [buffer.wanted for buffer in opened.buffers] == [True, False], "the next save has a place"
        filled(layout, 6, buffer=opened.buffers[1])
        go_on.set()
        wait_until(lambda: not opened.buffers[0].wanted, "the buffer to be free")
        assert Storage(tmp_path).steps() == [5]
        vault.do(vault.vault.rescue)
        wait_until(lambda: Storage(tmp_path).steps() == [5, 6], "what was saved since")
        opened.close()


@pytest.mark.parametrize("vault", [{"token": lambda: b"secret"}], indirect=True)
def test_a_node_that_is_left_alone_gives_the_memory_of_copies_back_when_its_processes_have_saved(
    vault: VaultThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("resile.agent.checkpoints.checkpoint_server.LOOK_AGAIN", 0.02)
    opened, copies = line(vault), vault.vault.replicas
    fill(opened, "", 1)
    vault.do(lambda: vault.vault.keep_replicas("127.0.0.1", tls=False))
    other = ReplicaClient(lambda: b"secret", {})
    other.enter(Round(1), copies.replica_endpoint("127.0.0.1"))
    buffer, record = filled(layout_of(rank=1, world=2), 1)
    assert other.copy(0, buffer, record.sequence) == ""
    vault.do(lambda: vault.vault.enter(Round(2), None))
    (copy,) = opened.copies()
    assert copy.record() == record, "it is there for restoring"
    copy.close()
    fill(opened, "", 2)
    wait_until(lambda: copies.sizes() == (0, 0), "the memory to be given back")
    assert opened.copies() == []
    opened.close()


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
