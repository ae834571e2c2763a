"""The journal: all or nothing, readable while it is written, refused as a whole when damaged."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from resile.api.ids import NodeId, NodeKey
from resile.api.job import JobSpec
from resile.api.job_view import JobEvent
from resile.core.engine import Engine
from resile.core.events import AgentSaid, AnyEvent, ChangeWanted, Started
from resile.core.state import new_state
from resile.master.journal.base import JournalDamaged, JournalError
from resile.master.journal.sqlite import SQLiteJournal
from resile.protocol.agent_to_master import ShardsFreed
from resile.protocol.job_changes import Scale

NODE = NodeKey("worker", NodeId(0))


def told(number: int, message: str = "something") -> JobEvent:
    return JobEvent(number=number, at=1.0, reason="Test", message=message)


def started(path: Path) -> SQLiteJournal:
    journal = SQLiteJournal(path)
    journal.snapshot(new_state(JobSpec(name="job", kind="elasticjob"), 1.0), 1.0)
    return journal


def test_a_new_journal_knows_nothing(tmp_path: Path) -> None:
    assert SQLiteJournal(tmp_path / "j.db").load() is None


def test_what_was_appended_is_there_after_reopening_in_order(tmp_path: Path) -> None:
    journal = started(tmp_path / "j.db")
    events: list[tuple[float, AnyEvent]] = [
        (2.0, Started()),
        (3.0, AgentSaid(node=NODE, message=ShardsFreed(worker="w"))),
    ]
    journal.append(events, [told(1)])
    journal.close()

    history = SQLiteJournal(tmp_path / "j.db").load()
    assert history is not None
    assert history.events == events
    assert history.state == new_state(JobSpec(name="job", kind="elasticjob"), 1.0)


def test_a_snapshot_replaces_the_events_and_keeps_the_story(tmp_path: Path) -> None:
    journal = started(tmp_path / "j.db")
    journal.append([(2.0, Started())], [told(1, "first")])
    state = Engine.replay(new_state(JobSpec(name="job", kind="elasticjob"), 1.0), [(2.0, Started())]).state
    journal.snapshot(state, 5.0)

    history = journal.load()
    assert history is not None
    assert (history.state, history.events, history.until) == (state, [], 5.0)
    assert [line.message for line in journal.story()] == ["first"]
    assert journal.last_told() == 1


def test_the_story_is_read_from_any_line_on(tmp_path: Path) -> None:
    journal = started(tmp_path / "j.db")
    journal.append([], [told(1), told(2), told(3)])
    assert [line.number for line in journal.story(after=1)] == [2, 3]
    assert [line.number for line in journal.story(limit=2)] == [1, 2]


def test_others_can_read_while_the_master_writes(tmp_path: Path) -> None:
    journal = started(tmp_path / "j.db")
    reader = SQLiteJournal(tmp_path / "j.db", read_only=True)
    journal.append([(2.0, Started())], [told(1)])
    history = reader.load()
    assert history is not None
    assert len(history.events) == 1
    with pytest.raises(JournalError, match="cannot be written"):
        reader.append([(2.0, Started())], [])


def test_a_full_disk_is_one_sentence_and_loses_nothing(small_disk: Path) -> None:
    journal = started(small_disk / "j.db")
    batch: list[tuple[float, AnyEvent]] = [(2.0, AgentSaid(node=NODE, message=ShardsFreed(worker="w" * 1000)))] * 20
    written = 0

    def fill() -> None:
        nonlocal written
        for _ in range(100):
            journal.append(batch, [])
            written += len(batch)

    with pytest.raises(JournalError, match=r"the journal .* cannot be written: .*full"):
        fill()
    assert written > 0
    history = journal.load()
    assert history is not None
    assert len(history.events) == written, "the batch that did not fit left nothing behind"


def test_garbage_in_place_of_a_journal_is_refused_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "j.db"
    path.write_bytes(b"this is no journal at all" * 100)
    with pytest.raises(JournalDamaged, match=r"is damaged .* it was left as it is"):
        SQLiteJournal(path)
    assert path.read_bytes() == b"this is no journal at all" * 100


def test_flipped_bytes_in_a_journal_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "j.db"
    journal = started(path)
    for number in range(200):
        journal.append(
            [(float(number), ChangeWanted(change=Scale(role="worker", replicas=number)))], [told(number + 1)]
        )
    journal.close()
    data = bytearray(path.read_bytes())
    for page in range(1, len(data) // 4096):
        data[page * 4096 : page * 4096 + 64] = b"\xff" * 64
    path.write_bytes(data)
    with pytest.raises(JournalDamaged, match="is damaged"):
        SQLiteJournal(path).load()


def test_a_single_changed_byte_in_an_event_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "j.db"
    journal = started(path)
    journal.append([(2.0, ChangeWanted(change=Scale(role="worker", replicas=100)))], [])
    journal.close()
    data = path.read_bytes()
    assert data.count(b"replicas\x64") == 1
    path.write_bytes(data.replace(b"replicas\x64", b"replicas\x63"))
    with pytest.raises(JournalDamaged, match="a record does not match its checksum"):
        SQLiteJournal(path).load()


def test_an_event_that_cannot_be_read_is_refused_and_not_skipped(tmp_path: Path) -> None:
    path = tmp_path / "j.db"
    journal = started(path)
    journal.append([(2.0, Started())], [])
    journal.close()
    db = sqlite3.connect(path)
    db.execute("insert into log (at, event, crc) values (3.0, x'c1c1', 2136671958)")
    db.commit()
    db.close()
    with pytest.raises(JournalDamaged, match="is damaged"):
        SQLiteJournal(path).load()


def test_a_journal_of_another_format_is_refused_with_both_numbers(tmp_path: Path) -> None:
    path = tmp_path / "j.db"
    started(path).close()
    db = sqlite3.connect(path)
    db.execute("update meta set value = '99' where key = 'format'")
    db.commit()
    db.close()
    with pytest.raises(JournalError, match="has format 99, and this version reads format 2"):
        SQLiteJournal(path)


def test_a_reader_of_a_journal_that_is_not_there_gets_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(JournalError, match="there is no journal at"):
        SQLiteJournal(tmp_path / "none.db", read_only=True)
