"""Reads why a training process failed, from what it left behind.

There are three sources, the best first: the error file that torch's `@record` writes, a Python traceback at the end of
the log, and the exit status. A process that crashed may have written half a file or anything else, and its failure must
be reported in any case, so no source is trusted to be well-formed. All texts are cut to a size that 10,000 failing
processes can send to one master.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from resile.protocol.reports import MAX_ERROR, MAX_LOG_TAIL, WorkerFailure

MAX_ERROR_FILE = 1024 * 1024
UNCAUGHT_ERROR = 1
"""The exit code of a Python program that an exception ended."""

_CUT = "…"
_CLOCKS_AGREE = 2.0
"""A file's modification time is used, as it is finer, if it is within so many seconds of the time noted in the file."""

_ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-Z\\-_])")
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")
_RANK = re.compile(r"^\[rank\d+\]: ", re.MULTILINE)
_FRAME = re.compile(r'  File ".*", line \d+')
_TRACEBACK = "Traceback (most recent call last):"
_CHAINED = (
    "During handling of the above exception, another exception occurred:",
    "The above exception was the direct cause of the following exception:",
)
_CGROUP_V1 = Path("/sys/fs/cgroup/memory")
_CGROUP_V2 = Path("/sys/fs/cgroup")
_NO_HOST_MEMORY = ("MemoryError", "DefaultCPUAllocator: can't allocate memory", "Cannot allocate memory")


class ErrorFile(NamedTuple):
    """What an error file, or a traceback in a log, says of a failure. Fields are empty if nothing was found."""

    error: str = ""
    traceback: str = ""
    at: float | None = None
    permanent: bool = False


def read_failure(
    *,
    returncode: int,
    global_rank: int,
    local_rank: int,
    pid: int,
    ended_at: float,
    error_file: str = "",
    log_tail: bytes = b"",
    oom_killed: bool = False,
) -> WorkerFailure:
    """The failure of a process that ended with `returncode` (negative for a signal) at `ended_at`. Never raises.

    `error_file` is its TORCHELASTIC_ERROR_FILE, which need not exist; `log_tail` is the end of its output.
    """
    tail = readable(log_tail.decode("utf-8", errors="replace"))
    recorded = read_error_file(error_file)
    if not recorded.error:
        recorded = find_traceback(tail)._replace(at=recorded.at)
    at = ended_at if recorded.at is None else min(recorded.at, ended_at)
    return WorkerFailure(
        global_rank=global_rank,
        local_rank=local_rank,
        pid=pid,
        at=at,
        exit_code=max(returncode, 0),
        signal=max(-returncode, 0),
        error=head(recorded.error, MAX_ERROR),
        traceback=last_part(recorded.traceback, MAX_ERROR),
        log_tail=last_part(tail, MAX_LOG_TAIL),
        permanent=recorded.permanent and returncode == UNCAUGHT_ERROR,
        oom=oom_killed or any(word in recorded.error for word in _NO_HOST_MEMORY),
    )


def in_order(failures: Iterable[WorkerFailure]) -> list[WorkerFailure]:
    """The failures, the earliest first. It usually caused the others."""
    return sorted(failures, key=lambda failure: (failure.at, failure.global_rank))


def tail_of(path: str, limit: int = MAX_LOG_TAIL) -> bytes:
    """The last `limit` bytes of a log file; empty if it cannot be read. Quick for files of any size."""
    return _read(path, limit, from_end=True)[0]


def read_error_file(path: str) -> ErrorFile:
    """Read an error that `@record` of torch wrote, in either of its formats. Fields are empty if there is none."""
    data, written = _read(path, MAX_ERROR_FILE + 1)
    if not data or len(data) > MAX_ERROR_FILE:
        return ErrorFile()
    try:
        content: Any = msgspec.json.decode(data)
    except (ValueError, RecursionError):  # no JSON, or no text
        return ErrorFile()
    message = content.get("message") if isinstance(content, dict) else None
    if isinstance(message, str):
        return ErrorFile(readable(message), "", _moment(content.get("timestamp"), written))
    if not isinstance(message, dict):
        return ErrorFile()
    extra = message.get("extraInfo")
    extra = extra if isinstance(extra, dict) else {}
    stack = extra.get("py_callstack")
    stack = readable(stack) if isinstance(stack, str) else ""
    text = message.get("message")
    error = readable(text) if isinstance(text, str) else find_traceback(stack).error
    return ErrorFile(error, stack, _moment(extra.get("timestamp"), written), extra.get("permanent") is True)


def find_traceback(text: str) -> ErrorFile:
    """Find the last Python traceback in `text`. The beginning of the traceback may be missing.

    Returns the error and the lines of the traceback, with the tracebacks chained before it. Fields are empty if there
    is no traceback.
    """
    lines = without_rank(text).splitlines()
    frames = [number for number, line in enumerate(lines) if _FRAME.match(line)]
    if not frames:
        return ErrorFile()
    end = next((n for n in range(frames[-1] + 1, len(lines)) if lines[n] and not lines[n].startswith(" ")), None)
    if end is None:
        return ErrorFile()
    start = frames[-1]
    while start and (lines[start - 1].startswith("  ") or lines[start - 1] == _TRACEBACK):
        start -= 1
        if lines[start] == _TRACEBACK:
            linked = next((n for n in range(start - 1, -1, -1) if lines[n]), -1)
            if linked < 0 or lines[linked] not in _CHAINED:
                break
            start = linked
            while start and lines[start] != _TRACEBACK:
                start -= 1
    return ErrorFile(lines[end], "\n".join(lines[start : end + 1]))


def without_rank(text: str) -> str:
    """The text without the `[rank0]: ` that torch puts before each line of an exception."""
    return _RANK.sub("", text)


def readable(text: str) -> str:
    """The text without escape sequences and control characters. Of a progress bar, only the last state is left."""
    text = _ESCAPES.sub("", text).replace("\r\n", "\n")
    text = "\n".join(line.rstrip("\r").rpartition("\r")[2] for line in text.split("\n"))
    return _CONTROLS.sub("", text).encode("utf-8", errors="replace").decode("utf-8")


def head(text: str, limit: int) -> str:
    return text if len(text) <= limit else text[: limit - len(_CUT)] + _CUT


def last_part(text: str, limit: int) -> str:
    """The last lines of a text, at most `limit` characters; they begin with "…" if the text was cut."""
    if len(text) <= limit:
        return text
    kept = text[len(text) - limit + len(_CUT) + 1 :]
    _, newline, rest = kept.partition("\n")
    return f"{_CUT}\n{rest}" if newline and rest else f"{_CUT}{kept}"


def _read(path: str, limit: int, from_end: bool = False) -> tuple[bytes, float]:
    """The contents of a file, up to `limit` bytes, and its modification time. If it cannot be read, it counts as empty.

    A FIFO at this path must not block the agent; hence O_NONBLOCK and the check for a regular file.
    """
    with contextlib.suppress(OSError, ValueError), open(path, "rb", opener=_without_waiting) as file:
        status = os.fstat(file.fileno())
        if stat.S_ISREG(status.st_mode):
            at = max(0, status.st_size - limit) if from_end else 0
            return os.pread(file.fileno(), limit, at), status.st_mtime
    return b"", 0.0


def _without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)


def _moment(noted: Any, written: float) -> float:
    try:
        seconds = float(noted)
    except (TypeError, ValueError):
        return written
    return seconds if 0 < seconds < float("inf") and abs(written - seconds) > _CLOCKS_AGREE else written


def oom_kills() -> int:
    """How many processes of this cgroup the kernel has killed for lack of memory; 0 if the kernel does not say."""
    for path in _memory_events():
        with contextlib.suppress(OSError, KeyError, ValueError):
            return int(dict(line.split() for line in path.read_text().splitlines())["oom_kill"])
    return 0


def _memory_events() -> list[Path]:
    found = []
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            below = path.lstrip("/")
            if controllers == "memory":
                found += [_CGROUP_V1 / below / "memory.oom_control", _CGROUP_V1 / "memory.oom_control"]
            elif not controllers:
                found += [_CGROUP_V2 / below / "memory.events", _CGROUP_V2 / "memory.events"]
    return found
