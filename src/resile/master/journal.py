"""The journal: what a master must not forget, and the story people read.

A port with adapters. A journal holds a snapshot of the job's state, the durable events since, and the story (every
decision that people may want to know about, in order, for ever). `append` returns only when the events would survive
the death of this process; a power cut may cost the last moments, which agents then tell again.
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

import msgspec

from resile.core.events import AnyEvent
from resile.core.state import JobState

FORMAT = 1
"""Raised whenever old events or snapshots would be read wrongly."""

BUSY_TIMEOUT_MS = 2000


class JournalError(Exception):
    """The journal cannot be read or written; the text is one sentence."""


class Told(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the story. `number` grows by one; `node` is empty where a line is about the whole job."""

    number: int
    at: float
    reason: str
    message: str
    node: str = ""
    warning: bool = False


class History(msgspec.Struct, kw_only=True):
    """What a journal knows."""

    state: JobState
    events: list[tuple[float, AnyEvent]]


class Journal(Protocol):
    """Where a master keeps what it must not forget."""

    def load(self) -> History | None:
        """What was written before, or None if nothing was."""

    def append(self, events: Sequence[tuple[float, AnyEvent]], story: Sequence[Told]) -> None:
        """Write all of it or nothing."""

    def snapshot(self, state: JobState) -> None:
        """Replace everything but the story by this state."""

    def story(self, after: int = 0, limit: int = 1000) -> list[Told]:
        """Lines of the story with a number above `after`."""

    def last_told(self) -> int:
        """The number of the story's newest line, 0 if there is none."""

    def close(self) -> None:
        """Let go of it."""


_encode = msgspec.msgpack.Encoder().encode
_decode_event = msgspec.msgpack.Decoder(AnyEvent).decode
_decode_state = msgspec.msgpack.Decoder(JobState).decode

_TABLES = """
create table if not exists meta (key text primary key, value text not null) without rowid;
create table if not exists snapshot (id integer primary key check (id = 0), state blob not null);
create table if not exists log (number integer primary key autoincrement, at real not null, event blob not null);
create table if not exists story (
    number integer primary key, at real not null, reason text not null, message text not null,
    node text not null, warning integer not null
);
"""


class SQLiteJournal:
    """A journal in one SQLite file, on a local disk or a volume. One writer, any number of readers."""

    def __init__(self, path: Path, *, read_only: bool = False) -> None:
        self._path = path
        if read_only and not path.exists():
            raise JournalError(f"there is no journal at {path}")
        target = f"{path.absolute().as_uri()}?mode={'ro' if read_only else 'rwc'}"
        with self._clear_words("opened"):
            self._db = sqlite3.connect(target, uri=True, isolation_level=None, timeout=BUSY_TIMEOUT_MS / 1000)
            try:
                self._open(read_only)
            except BaseException:
                self._db.close()
                raise

    def _open(self, read_only: bool) -> None:
        if not read_only:
            self._db.execute("pragma journal_mode = wal")
            self._db.execute("pragma synchronous = normal")
            self._db.executescript(_TABLES)
            self._db.execute("insert or ignore into meta values ('format', ?)", (str(FORMAT),))
        (known,) = self._db.execute("select value from meta where key = 'format'").fetchone()
        if known != str(FORMAT):
            raise JournalError(f"the journal {self._path} has format {known}, and this version reads format {FORMAT}")

    def load(self) -> History | None:
        """What was written before; a damaged journal is refused as a whole, and left as it is."""
        with self._clear_words("read"):
            row = self._db.execute("select state from snapshot").fetchone()
            if row is None:
                return None
            (check,) = self._db.execute("pragma quick_check(1)").fetchone()
            if check != "ok":
                raise sqlite3.DatabaseError(check)
            log = self._db.execute("select at, event from log order by number").fetchall()
            return History(state=_decode_state(row[0]), events=[(at, _decode_event(event)) for at, event in log])

    def append(self, events: Sequence[tuple[float, AnyEvent]], story: Sequence[Told]) -> None:
        """Write all of it or nothing, in one transaction."""
        with self._clear_words("written"), self._transaction():
            self._db.executemany(
                "insert into log (at, event) values (?, ?)", [(at, _encode(event)) for at, event in events]
            )
            self._db.executemany(
                "insert into story values (?, ?, ?, ?, ?, ?)",
                [(t.number, t.at, t.reason, t.message, t.node, t.warning) for t in story],
            )

    def snapshot(self, state: JobState) -> None:
        """Replace everything but the story by this state, so that a restart need not replay a long life."""
        with self._clear_words("written"), self._transaction():
            self._db.execute("insert or replace into snapshot values (0, ?)", (_encode(state),))
            self._db.execute("delete from log")

    def story(self, after: int = 0, limit: int = 1000) -> list[Told]:
        """Lines of the story with a number above `after`."""
        with self._clear_words("read"):
            rows = self._db.execute(
                "select number, at, reason, message, node, warning from story where number > ? order by number limit ?",
                (after, limit),
            ).fetchall()
        return [
            Told(number=number, at=at, reason=reason, message=message, node=node, warning=bool(warning))
            for number, at, reason, message, node, warning in rows
        ]

    def last_told(self) -> int:
        """The number of the story's newest line, 0 if there is none."""
        with self._clear_words("read"):
            (number,) = self._db.execute("select coalesce(max(number), 0) from story").fetchone()
            return int(number)

    def close(self) -> None:
        """Let go of the file."""
        self._db.close()

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        self._db.execute("begin immediate")
        try:
            yield
            self._db.execute("commit")
        except BaseException:
            with contextlib.suppress(sqlite3.Error):
                self._db.execute("rollback")
            raise

    @contextlib.contextmanager
    def _clear_words(self, verb: str) -> Iterator[None]:
        try:
            yield
        except sqlite3.OperationalError as error:
            raise JournalError(f"the journal {self._path} cannot be {verb}: {error}") from error
        except (sqlite3.DatabaseError, msgspec.MsgspecError, TypeError) as error:
            raise JournalError(
                f"the journal {self._path} is damaged ({error}); it was left as it is: "
                "restore it from a copy, or move it away to start the job anew"
            ) from error
