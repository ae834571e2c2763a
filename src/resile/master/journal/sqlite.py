"""The journal in one SQLite file, for masters on bare machines."""

from __future__ import annotations

import contextlib
import sqlite3
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from resile.api.job_view import JobEvent
from resile.core.events import AnyEvent
from resile.core.state import JobState
from resile.master.journal.base import History, JournalDamaged, JournalError

FORMAT = 2
"""The version of the journal's format. Increase it when older events or snapshots would be read wrongly."""

BUSY_SECONDS = 2.0

_encode = msgspec.msgpack.Encoder().encode
_decode_event = msgspec.msgpack.Decoder(AnyEvent).decode
_decode_state = msgspec.msgpack.Decoder(JobState).decode

_TABLES = """
create table if not exists meta (key text primary key, value text not null) without rowid;
create table if not exists snapshot (
    id integer primary key check (id = 0), at real not null, state blob not null, crc integer not null
);
create table if not exists log (
    number integer primary key autoincrement, at real not null, event blob not null, crc integer not null
);
create table if not exists story (
    number integer primary key, at real not null, reason text not null, message text not null,
    node text not null, warning integer not null
);
"""


class SQLiteJournal:
    """A journal in one SQLite file, on a local disk or a volume. One process writes it, any number may read it."""

    folds_itself = False

    def __init__(self, path: Path, *, read_only: bool = False) -> None:
        """Open the file, or make it unless `read_only`. Raises `JournalError`; `JournalDamaged` if it is no journal."""
        self._path = path
        if read_only and not path.exists():
            raise JournalError(f"there is no journal at {path}")
        with self._clear_words("opened"), contextlib.ExitStack() as opened:
            self._db = opened.enter_context(contextlib.closing(self._connect("ro" if read_only else "rwc")))
            self._prepare(read_only)
            self._reader = self._connect("ro")
            opened.pop_all()

    def _connect(self, mode: str) -> sqlite3.Connection:
        target = f"{self._path.absolute().as_uri()}?mode={mode}"
        return sqlite3.connect(target, uri=True, isolation_level=None, timeout=BUSY_SECONDS, check_same_thread=False)

    def _prepare(self, read_only: bool) -> None:
        if not read_only:
            self._db.execute("pragma journal_mode = wal")
            self._db.execute("pragma synchronous = full")
            self._db.executescript(_TABLES)
            self._db.execute("insert or ignore into meta values ('format', ?)", (str(FORMAT),))
        (known,) = self._db.execute("select value from meta where key = 'format'").fetchone()
        if known != str(FORMAT):
            raise JournalDamaged(f"the journal {self._path} has format {known}, and this version reads format {FORMAT}")

    def load(self) -> History | None:
        with self._clear_words("read"):
            row = self._db.execute("select at, state, crc from snapshot").fetchone()
            if row is None:
                return None
            (check,) = self._db.execute("pragma quick_check(1)").fetchone()
            if check != "ok":
                raise sqlite3.DatabaseError(check)
            at, state, crc = row
            log = self._db.execute("select at, event, crc from log order by number").fetchall()
            return History(
                state=_decode_state(_checked(state, crc)),
                at=at,
                events=[(at, _decode_event(_checked(event, crc))) for at, event, crc in log],
            )

    def append(self, events: Sequence[tuple[float, AnyEvent]], story: Sequence[JobEvent]) -> None:
        rows = [(at, data, zlib.crc32(data)) for at, event in events for data in (_encode(event),)]
        with self._clear_words("written"), self._transaction():
            self._db.executemany("insert into log (at, event, crc) values (?, ?, ?)", rows)
            lines = map(msgspec.structs.astuple, story)
            self._db.executemany("insert into story values (?, ?, ?, ?, ?, ?)", lines)

    def snapshot(self, state: JobState, at: float) -> None:
        data = _encode(state)
        with self._clear_words("written"), self._transaction():
            self._db.execute("insert or replace into snapshot values (0, ?, ?, ?)", (at, data, zlib.crc32(data)))
            self._db.execute("delete from log")

    def story(self, after: int = 0, limit: int = 1000) -> list[JobEvent]:
        with self._clear_words("read"):
            rows = self._reader.execute(
                "select number, at, reason, message, node, warning from story where number > ? order by number limit ?",
                (after, limit),
            ).fetchall()
        return [
            JobEvent(number=number, at=at, reason=reason, message=message, node=node, warning=bool(warning))
            for number, at, reason, message, node, warning in rows
        ]

    def last_told(self) -> int:
        with self._clear_words("read"):
            (number,) = self._reader.execute("select coalesce(max(number), 0) from story").fetchone()
            return int(number)

    def close(self) -> None:
        self._reader.close()
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
        except (sqlite3.DatabaseError, ValueError, TypeError) as error:
            raise JournalDamaged(
                f"the journal {self._path} is damaged ({error}); it was left as it is: "
                "restore it from a copy, or move it away to start the job anew"
            ) from error


def _checked(data: bytes, crc: int) -> bytes:
    if zlib.crc32(data) != crc:
        raise sqlite3.DatabaseError("a record does not match its checksum")
    return data
