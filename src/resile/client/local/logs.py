"""Reading the logs of jobs of this machine, line by line while they grow. No file is loaded into memory as a whole."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from resile.client.base import LogLine
from resile.client.errors import CommandError
from resile.client.local.job_reader import JobReader
from resile.client.local.jobs import LocalJob
from resile.platform.local import files

POLL_SECONDS = 0.15
STATUS_SECONDS = 0.5
"""How often to check if the job is over."""
CHUNK = 1 << 20
BATCH = 1000
"""How many lines are yielded at once."""


def read(job: LocalJob, pod: str, tail: int | None, *, master: bool, follow: bool) -> Iterator[list[LogLine]]:
    """Yield the log lines of one pod, or of all nodes if `pod` is empty. With `master`, yield those of the master.

    Begins with the last `tail` lines of each log; if `tail` is None, with the first line. With `follow`, also yields
    lines that are written later, until the pod or the job has ended. Raises `CommandError` if the pod has no log.
    """
    logs = _Logs(job, pod, tail, master=master)
    if pod and not master and not logs.paths():
        raise CommandError(f"there is no log of {pod}; `resile get nodes {job.name} --deleted` lists the pods")
    yield from logs.batches()
    if follow:
        with JobReader(job) as reader:
            asked = 0.0
            while True:
                now = time.monotonic()
                if now - asked >= STATUS_SECONDS:
                    asked = now
                    if _is_over(reader, "" if master else pod):
                        break
                yield from logs.batches()
                time.sleep(POLL_SECONDS)
    yield from logs.batches(to_the_end=True)


class Log:
    """Reads one log file while it grows."""

    def __init__(self, path: Path, tail: int | None) -> None:
        self._path = path
        self._at = 0 if tail is None else _tail_offset(path, tail)
        self._part: list[bytes] = []
        """The pieces of the last line, whose line end was not written yet."""

    def lines(self, *, to_the_end: bool = False) -> Iterator[bytes]:
        """The lines that were written since the last call; with `to_the_end`, also a last line without line end."""
        try:
            with open(self._path, "rb") as file:
                file.seek(self._at)
                while chunk := file.read(CHUNK):
                    self._at += len(chunk)
                    end, newline, rest = chunk.partition(b"\n")
                    self._part.append(end)
                    if newline:
                        *whole, part = rest.split(b"\n")
                        yield b"".join(self._part)
                        yield from whole
                        self._part = [part]
        except OSError:
            return
        if to_the_end and any(self._part):
            yield b"".join(self._part)
            self._part = []


class _Logs:
    def __init__(self, job: LocalJob, pod: str, tail: int | None, *, master: bool) -> None:
        self._job = job
        self._pod = pod
        self._master = master
        self._tail = tail
        self._known: dict[Path, Log] = {}
        self._alone = True

    def paths(self) -> list[Path]:
        directory = self._job.directory
        if self._master:
            return [directory.log]
        found = [record.log for record in files.read_nodes(directory.path)]
        return [path for path in found if path.exists() and (not self._pod or path.stem == self._pod)]

    def batches(self, *, to_the_end: bool = False) -> Iterator[list[LogLine]]:
        paths = self.paths()
        self._alone = self._alone and len(paths) <= 1
        for path in paths:
            if path not in self._known:
                self._known[path] = Log(path, self._tail)
        self._tail = None
        for path, log in self._known.items():
            lines = (LogLine(path.stem, line, self._alone) for line in log.lines(to_the_end=to_the_end))
            while batch := list(islice(lines, BATCH)):
                yield batch


def _is_over(reader: JobReader, pod: str) -> bool:
    if not pod and reader.status().ended_at is None:
        return False
    return all(record.status.ended for record in files.read_nodes(reader.directory.path) if pod in ("", record.name))


def _tail_offset(path: Path, lines: int) -> int:
    """The offset at which the last `lines` lines of a file begin. Reads the file backwards, no further than needed."""
    try:
        with open(path, "rb") as file:
            end = at = file.seek(0, os.SEEK_END)
            if lines == 0:
                return end
            before = end - 1  # skips the line end of the last line
            while at > 0:
                start = max(0, at - CHUNK)
                file.seek(start)
                chunk = file.read(at - start)
                target = before - start if before < at else len(chunk)
                while (target := chunk.rfind(b"\n", 0, target)) >= 0:
                    lines -= 1
                    if lines == 0:
                        return start + target + 1
                at = start
    except OSError:
        return 0
    return 0
