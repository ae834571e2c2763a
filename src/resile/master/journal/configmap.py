"""The journal as one ConfigMap, for a master whose disk goes with its pod.

    format, writer   the layout of the journal, and the master process that writes it
    snapshot         the job's state at one moment, and the number of the first log entry that follows
    log-000017 ...   the events since, one entry for each write
    story            the last job events before the snapshot

Every value is compressed and carries a checksum. A write is one merge patch that names the version it is based on, so
two masters can never both write: the older one gets a conflict and ends. A write costs one round trip and, inside the
API server, a write of the whole ConfigMap. Therefore the log is folded into the snapshot, by replaying it, long before
the megabyte that a ConfigMap may hold is full. Of the story only the last few hundred lines are kept.

If the ConfigMap is deleted while its master lives, the master writes all of it again once the operator has made a new
one. If no master lives, the journal and the job are lost. An empty journal of a job that was served before is refused,
because otherwise ids and shards would be handed out twice.
"""

from __future__ import annotations

import base64
import contextlib
import secrets
import threading
import zlib
from collections.abc import Iterator, Mapping, Sequence

import msgspec

from resile.api.ids import Bytes
from resile.api.job import JobSpec
from resile.api.job_view import JobEvent
from resile.api.kinds import registry
from resile.core.engine import Engine
from resile.core.events import AnyEvent
from resile.core.state import JobState
from resile.kube.client import BlockingClient
from resile.kube.errors import CONFLICT, KubeError
from resile.kube.kinds import CONFIG_MAPS, Object
from resile.kube.owner_references import is_owned_by
from resile.master.journal.base import History, JournalDamaged, JournalError, JournalGone, JournalTaken

FORMAT = "2"
FOLD_BYTES = Bytes(128 * 1024)
FOLD_ENTRIES = 200
"""A log with so many entries is folded into the snapshot: every write costs the API server the whole ConfigMap."""
LARGEST = Bytes(900 * 1024)
"""The most bytes of all values together: a little less than the 1 MiB that a ConfigMap holds."""
STORY_LINES = 300
LOADS = 10
"""How often `load` tries to become the writer while the previous master, which still lives, writes the journal."""
_SNAPSHOT, _STORY, _LOG = "snapshot", "story", "log-"

Values = dict[str, bytes]


class _Entry(msgspec.Struct, array_like=True):
    events: list[tuple[float, AnyEvent]]
    story: list[JobEvent]


class _Snapshot(msgspec.Struct, array_like=True):
    at: float
    following: int
    """The number of the first log entry after this snapshot."""
    state: JobState


_encode = msgspec.msgpack.Encoder().encode
_decode_entry = msgspec.msgpack.Decoder(_Entry).decode
_decode_snapshot = msgspec.msgpack.Decoder(_Snapshot).decode
_decode_story = msgspec.msgpack.Decoder(list[JobEvent]).decode


def seal(data: bytes) -> bytes:
    packed = zlib.compress(data)
    return zlib.crc32(packed).to_bytes(4, "big") + packed


def unseal(value: bytes) -> bytes:
    packed = value[4:]
    if zlib.crc32(packed).to_bytes(4, "big") != value[:4]:
        raise ValueError("a value does not match its checksum")
    return zlib.decompress(packed)


def _unpack(values: Values) -> tuple[History, list[JobEvent], int] | None:
    """Decode the values of the journal's ConfigMap; None if there are none.

    Returns the history, the job events, and the number of the next entry of the log.
    """
    if _SNAPSHOT not in values:
        if values:
            raise ValueError("there are events but no state")
        return None
    snapshot = _decode_snapshot(unseal(values[_SNAPSHOT]))
    there = {key for key in values if key.startswith(_LOG)}
    following = snapshot.following + len(there)
    entries = [f"{_LOG}{number:06d}" for number in range(snapshot.following, following)]
    if there != set(entries):
        raise ValueError("an entry of the log is missing")
    log = [_decode_entry(unseal(values[key])) for key in entries]
    story = _decode_story(unseal(values[_STORY])) if _STORY in values else []
    events = [pair for entry in log for pair in entry.events]
    history = History(state=snapshot.state, at=snapshot.at, events=events)
    return history, [*story, *(line for entry in log for line in entry.story)], following


def _values(config_map: Object) -> Values:
    return {key: base64.b64decode(value) for key, value in (config_map.get("binaryData") or {}).items()}


def peek(config_map: Object) -> JobState | None:
    """The job's state from the journal in `config_map`, without becoming its writer; None if it cannot be read."""
    if (config_map.get("data") or {}).get("format", FORMAT) != FORMAT:
        return None
    try:
        unpacked = _unpack(_values(config_map))
    except (ValueError, zlib.error, msgspec.MsgspecError):
        return None
    return Engine.replay(unpacked[0].state, unpacked[0].events).state if unpacked else None


class ConfigMapJournal:
    """The journal of one job, in a ConfigMap of the job's namespace. Only the process that loaded it last can write."""

    folds_itself = True

    def __init__(self, spec: JobSpec, client: BlockingClient, *, served: str = "") -> None:
        """Prepare. `served` names a sign that the job had a master before; empty if there is no sign.

        If there is a sign, `load` counts an empty journal as damaged.
        """
        self._spec = spec
        self._client = client
        self._served = served
        self._name = registry.job_kind(spec.kind).master_name(spec.name)
        self._writer = secrets.token_hex(8)
        self._version = ""
        self._values: Values = {}
        self._next = 1
        self._story: tuple[JobEvent, ...] = ()
        self._memos: dict[str, str] = {}
        self._unwritten_memos: dict[str, str] = {}
        self._lock = threading.Lock()

    def load(self) -> History | None:
        """Load the journal as `Journal.load` says, and become its only writer, until another process loads it.

        Raises `JournalError` also if the journal does not exist, or still belongs to an earlier job of this name.
        """
        for _ in range(LOADS):
            with contextlib.suppress(_Conflict):
                return self._load()
        raise JournalError(self._restless)

    def _load(self) -> History | None:
        found = self._get()
        if found is None:
            raise JournalError(
                f"the journal {self._name} is not there: the operator makes it, together with the master"
            )
        if not is_owned_by(found, self._spec.uid):
            raise JournalError(f"the journal {self._name} is still that of an earlier job of this name")
        data = found.get("data") or {}
        if data.get("format", FORMAT) != FORMAT:
            raise JournalDamaged(
                f"the journal {self._name} has format {data['format']}, and this version reads format {FORMAT}"
            )
        self._memos = {key[5:]: value for key, value in data.items() if key.startswith("memo.")}
        self._version = found["metadata"]["resourceVersion"]
        with self._clear_words():
            values = _values(found)
            unpacked = _unpack(values)
        if unpacked is None and self._served:
            raise JournalDamaged(
                f"the journal {self._name} is empty, but {self._served}: what was in it was deleted; "
                "restore it from a copy, or delete the job to start it anew"
            )
        self._values = values
        history, story, self._next = unpacked or (None, [], 1)
        self._story = tuple(story[-STORY_LINES:])
        self._patch({}, first=True)  # a conflict here means that what was read is not the newest
        return history

    def append(self, events: Sequence[tuple[float, AnyEvent]], story: Sequence[JobEvent]) -> None:
        log = self._log()
        if len(log) >= FOLD_ENTRIES or sum(len(self._values[key]) for key in log) >= FOLD_BYTES:
            self._fold()
        entry = seal(_encode(_Entry(list(events), list(story))))
        if sum(map(len, self._values.values())) + len(entry) > LARGEST:
            self._fold(events, story)  # thousands of nodes at once take less room in the state than as events
            return
        self._patch({f"{_LOG}{self._next:06d}": entry})
        self._next += 1
        self._story = (*self._story, *story)[-STORY_LINES:]

    def snapshot(self, state: JobState, at: float, story: Sequence[JobEvent] = ()) -> None:
        """Replace the old snapshot and all events by `state`, and add `story` to the story."""
        snapshot = seal(_encode(_Snapshot(at, self._next, state)))
        if len(snapshot) > LARGEST:
            raise JournalError(
                f"the job's state takes {len(snapshot) // 1024} KiB, and the journal {self._name} holds "
                f"{LARGEST // 1024} KiB at most"
            )
        lines = (*self._story, *story)[-STORY_LINES:]
        told = seal(_encode(lines))
        if len(snapshot) + len(told) > LARGEST:
            told = seal(_encode(lines[-1:]))
        self._patch({**{key: None for key in self._log()}, _SNAPSHOT: snapshot, _STORY: told})
        self._story = lines

    def story(self, after: int = 0, limit: int = 1000) -> list[JobEvent]:
        return [line for line in self._story if line.number > after][:limit]

    def last_told(self) -> int:
        return self._story[-1].number if self._story else 0

    def close(self) -> None:
        self._client.close()

    # short texts that the next master on a cluster needs --------------------------------------------------------

    def recall(self, key: str) -> str:
        """The text that this master or an earlier one last passed to `remember` under `key`; empty if there is none."""
        with self._lock:
            return self._memos.get(key, "")

    def remember(self, key: str, value: str) -> None:
        """Store a short text under `key`, for `recall`. It is written to the ConfigMap together with the next events.

        If this master ends before that, the text is lost.
        """
        with self._lock:
            self._memos[key] = self._unwritten_memos[key] = value

    # reading and writing --------------------------------------------------------------------------------------------

    def _log(self) -> list[str]:
        return [key for key in self._values if key.startswith(_LOG)]

    def _fold(self, more: Sequence[tuple[float, AnyEvent]] = (), story: Sequence[JobEvent] = ()) -> None:
        with self._clear_words():
            unpacked = _unpack(self._values)
        assert unpacked is not None  # the first snapshot is older than all events
        history, _, _ = unpacked
        history.events += more
        state = Engine.replay(history.state, history.events).state
        self.snapshot(state, history.until, story)

    def _patch(self, values: Mapping[str, bytes | None], *, first: bool = False) -> None:
        """Write `values` and the texts of `remember` to the ConfigMap; a key whose value is None is removed from it.

        Raises `JournalTaken` if another master has become the writer. With `first`, this process becomes the writer,
        and `_Conflict` is raised if the ConfigMap has changed after it was read.
        """
        with self._lock:
            memos, self._unwritten_memos = self._unwritten_memos, {}
        data = {f"memo.{key}": value for key, value in memos.items()}
        if first:
            data |= {"format": FORMAT, "writer": self._writer}
        binary = {key: value if value is None else base64.b64encode(value).decode() for key, value in values.items()}
        try:
            self._send(data, binary, first=first)
        except BaseException:
            with self._lock:
                self._unwritten_memos = {**memos, **self._unwritten_memos}
            raise
        self._values = {key: value for key, value in {**self._values, **values}.items() if value is not None}

    def _send(self, data: dict[str, str], binary: dict[str, str | None], *, first: bool) -> None:
        for again in (True, False):
            patch = {"metadata": {"resourceVersion": self._version}, "data": data, "binaryData": binary}
            try:
                with self._asking("written"):
                    written = self._client.patch(CONFIG_MAPS, self._spec.namespace, self._name, patch)
                self._version = written["metadata"]["resourceVersion"]
                return
            except _Conflict:
                if first:
                    raise
                # The ConfigMap was labelled, or the answer to a patch was lost, or another master has taken over.
                if self._look(data, binary):
                    return
                if not again:
                    raise JournalError(self._restless) from None

    def _look(self, data: dict[str, str], binary: dict[str, str | None]) -> bool:
        """Read the ConfigMap again after a conflict, and return True if it already holds `binary`.

        If it returns False, the caller must write `data` and `binary` again, with the new `_version`. If the ConfigMap
        was made anew and is empty, the whole journal is added to `data` and `binary`. Raises `JournalTaken` if another
        master is the writer, and `JournalGone` if there is no ConfigMap.
        """
        found = self._get()
        if found is None:
            raise JournalGone(self._gone)
        there = found.get("binaryData") or {}
        writer = (found.get("data") or {}).get("writer")
        if not writer and not there and is_owned_by(found, self._spec.uid):
            memos = {f"memo.{key}": value for key, value in self._memos.items()}
            data |= {"format": FORMAT, "writer": self._writer, **memos}
            for key, value in self._values.items():
                binary.setdefault(key, base64.b64encode(value).decode())
        elif writer != self._writer:
            raise JournalTaken(f"another master has taken over the journal {self._name}")
        self._version = found["metadata"]["resourceVersion"]
        for key in there:
            if key.startswith(_LOG) and key not in self._values and key not in binary:
                binary[key] = None  # written by an earlier patch whose answer was lost; this patch holds it, too
        return bool(binary) and all(there.get(key) == value for key, value in binary.items())

    def _get(self) -> Object | None:
        with self._asking("read"):
            return self._client.get(CONFIG_MAPS, self._spec.namespace, self._name)

    @contextlib.contextmanager
    def _asking(self, verb: str) -> Iterator[None]:
        try:
            yield
        except KubeError as error:
            if error.code == CONFLICT:
                raise _Conflict from error
            if error.is_absent:
                raise JournalGone(self._gone) from error
            raise JournalError(f"the journal {self._name} cannot be {verb}: {error}") from error

    @property
    def _gone(self) -> str:
        return f"the journal {self._name} was deleted; it is written again once the operator has made a new one"

    @property
    def _restless(self) -> str:
        return f"the journal {self._name} is changed by another program all the time"

    @contextlib.contextmanager
    def _clear_words(self) -> Iterator[None]:
        try:
            yield
        except (ValueError, zlib.error, msgspec.MsgspecError) as error:
            raise JournalDamaged(
                f"the journal {self._name} is damaged ({error}); it was left as it is: "
                "restore it from a copy, or delete the job to start it anew"
            ) from error


class _Conflict(Exception):
    """Raised if the ConfigMap has changed since this process last read or wrote it."""
