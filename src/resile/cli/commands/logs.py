"""`resile logs`: what nodes and masters wrote, of one pod or of all pods of a job."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import click
import msgspec

from resile.api.manifests.names import master_name
from resile.cli.common_options import output_option, target_options
from resile.client.errors import CommandError
from resile.client.local.job_reader import JobReader
from resile.client.local.jobs import LocalJob, find_pod, is_master, pod_name
from resile.client.target import Target
from resile.platform.local import files

POLL_SECONDS = 0.15
STATUS_SECONDS = 0.5
"""Between two questions whether the job is over."""
CHUNK = 1 << 20


@click.command()
@click.argument("name", metavar="JOB|POD")
@click.argument("node", required=False)
@target_options
@click.option("-f", "--follow", is_flag=True, help="go on until the job (or the pod) has ended")
@click.option("--tail", type=click.IntRange(min=0), metavar="N", help="begin with the last N lines of each log")
@click.option("--master", is_flag=True, help="the master's log instead of the nodes'")
@output_option("text", "json")
def logs(
    name: str, node: str | None, target: Target, follow: bool, tail: int | None, master: bool, output: str
) -> None:
    """Print the log of a pod, or of a NODE of a job such as worker-1, or the logs of all nodes of a job.

    With several nodes each line begins with its pod's name. With `-o json` each line is an object of its own. On a
    cluster the logs of finished pods stay until the job is deleted; those of deleted pods are gone.

    \b
    resile logs torch-mnist -f                          all nodes, those that come later, too
    resile logs torch-mnist worker-1 --tail 20          one of them
    resile logs torch-mnist --master                    why the job did what it did
    """  # noqa: D301
    if node:
        name = pod_name(name, node) or node
    if not target.here(name):
        from resile.cli.cluster.logs import logs_there

        logs_there(target, name, follow=follow, tail=tail, master=master, as_json=output == "json")
        return
    job, pod = find_pod(name, target.namespace)
    if master:
        pod = master_name(job.name)
    reader = Logs(job, pod, tail, as_json=output == "json")
    if pod and not is_master(pod) and not reader.paths():
        raise CommandError(f"there is no log of {pod}; `resile get nodes {job.name} --deleted` lists the pods")
    reader.read()
    if follow:
        _follow(reader)
    reader.finish()


class Log:
    """One log file, read as it grows."""

    def __init__(self, path: Path, tail: int | None) -> None:
        self._path = path
        self._at = 0
        self._part: list[bytes] = []
        """The pieces of a last line that has no end yet."""
        if tail is not None:
            self._at = _tail_offset(path, tail)

    def lines(self, *, all_of_it: bool = False) -> Iterator[bytes]:
        """The lines that are new, read as they are asked for; with `all_of_it` also a last one that has no end yet."""
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
        if all_of_it and any(self._part):
            yield b"".join(self._part)
            self._part = []


class Logs:
    """The logs of a job's nodes, of one pod, or of the master; pods that appear later are read from their start."""

    def __init__(self, job: LocalJob, pod: str, tail: int | None, *, as_json: bool = False) -> None:
        self._as_json = as_json
        self.job = job
        self.pod = pod
        self._tail = tail
        self._known: dict[Path, Log] = {}
        self._prefix = False

    def paths(self) -> list[Path]:
        """The files there are now, oldest pod first."""
        directory = self.job.directory
        if self.pod and is_master(self.pod):
            return [directory.log]
        found = [record.log for record in files.read_nodes(directory.path)]
        return [path for path in found if path.exists() and (not self.pod or path.stem == self.pod)]

    def read(self, *, all_of_it: bool = False) -> bool:
        """Print what is new; whether anything was."""
        paths = self.paths()
        self._prefix = self._prefix or len(paths) > 1
        for path in paths:
            if path not in self._known:
                self._known[path] = Log(path, self._tail)
        self._tail = None
        anything = False
        for path, log in self._known.items():
            for line in log.lines(all_of_it=all_of_it):
                anything = True
                sys.stdout.buffer.write(self._shown(path.stem, line) + b"\n")
        sys.stdout.buffer.flush()
        return anything

    def _shown(self, pod: str, line: bytes) -> bytes:
        if self._as_json:
            return msgspec.json.encode({"pod": pod, "line": line.decode(errors="replace")})
        return f"[{pod}] ".encode() + line if self._prefix else line

    def finish(self) -> None:
        """Print the rest, a last line without an end included."""
        self.read(all_of_it=True)


def _follow(reader: Logs) -> None:
    with JobReader(reader.job) as look:
        over = _pod_over(reader) if reader.pod and not is_master(reader.pod) else _job_over(look)
        asked = 0.0
        while True:
            now = time.monotonic()
            if now - asked >= STATUS_SECONDS:
                asked = now
                if over():
                    return
            reader.read()
            time.sleep(POLL_SECONDS)


def _job_over(look: JobReader) -> Callable[[], bool]:
    def over() -> bool:
        if look.status().ended_at is None:
            return False
        return all(record.status.ended for record in files.read_nodes(look.directory.path))

    return over


def _pod_over(reader: Logs) -> Callable[[], bool]:
    def over() -> bool:
        nodes = files.read_nodes(reader.job.directory.path)
        return all(record.status.ended for record in nodes if record.name == reader.pod)

    return over


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
