"""Reading the logs of jobs of this machine: whole lines, as they are written, and never a whole file in memory."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path

from resile.client.base import LogLine
from resile.client.errors import CommandError
from resile.client.local.job_reader import JobReader
from resile.client.local.jobs import LocalJob
from resile.platform.local import files

POLL_SECONDS = 0.15
STATUS_SECONDS = 0.5
"""Between two questions whether the job is over."""
CHUNK = 1 << 20
BATCH = 1000
"""Lines that are handed on at once."""


def read(job: LocalJob, pod: str, tail: int | None, *, master: bool, follow: bool) -> Iterator[list[LogLine]]:
    """The lines of a pod, of the master, or of all nodes if `pod` is empty; with `follow`, until that has ended.

    Raises:
        CommandError: the pod has no log.
    """
    logs = _Logs(job, pod, tail, master=master)
    if pod and not master and not logs.paths():
        raise CommandError(f"there is no log of {pod}; `resile get nodes {job.name} --deleted` lists the pods")
    yield from logs.batches()
    if follow:
        with JobReader(job) as reader:
            is_over = _pod_over(job, pod) if pod and not master else _job_over(reader)
            asked = 0.0
            while True:
                now = time.monotonic()
                if now - asked >= STATUS_SECONDS:
                    asked = now
                    if is_over():
                        break
                yield from logs.batches()
                time.sleep(POLL_SECONDS)
    yield from logs.batches(to_the_end=True)


class Log:
    """One log file, read as it grows."""

    def __init__(self, path: Path, tail: int | None) -> None:
        self._path = path
        self._at = 0
        self._part: list[bytes] = []
        """The pieces of a last line that has no end yet."""
        if tail is not None:
            self._at = _tail_offset(path, tail)

    def lines(self, *, to_the_end: bool = False) -> Iterator[bytes]:
        """The lines that are new, read as they are asked for; with `to_the_end` also a last one that has no end yet."""
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
    """The logs of a job's nodes, of one pod, or of the master; pods that appear later are read from their start."""

    def __init__(self, job: LocalJob, pod: str, tail: int | None, *, master: bool) -> None:
        self._job = job
        self._pod = pod
        self._master = master
        self._tail = tail
        self._known: dict[Path, Log] = {}
        self._alone = True

    def paths(self) -> list[Path]:
        """The files there are now, oldest pod first."""
        directory = self._job.directory
        if self._master:
            return [directory.log]
        found = [record.log for record in files.read_nodes(directory.path)]
        return [path for path in found if path.exists() and (not self._pod or path.stem == self._pod)]

    def batches(self, *, to_the_end: bool = False) -> Iterator[list[LogLine]]:
        """What is new."""
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


def _job_over(reader: JobReader) -> Callable[[], bool]:
    def is_over() -> bool:
        if reader.status().ended_at is None:
            return False
        return all(record.status.ended for record in files.read_nodes(reader.directory.path))

    return is_over


def _pod_over(job: LocalJob, pod: str) -> Callable[[], bool]:
    def is_over() -> bool:
        return all(record.status.ended for record in files.read_nodes(job.directory.path) if record.name == pod)

    return is_over


def _tail_offset(path: Path, lines: int) -> int:
    """Where the last lines of a file begin; reads from its end, as much as it needs, and keeps none of it."""
    try:
        with open(path, "rb") as file:
            end = at = file.seek(0, os.SEEK_END)
            if lines == 0:
                return end
            before = end - 1  # the last line's own end is not the end of the one before
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
