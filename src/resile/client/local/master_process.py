"""Starting the supervised master of a job of this machine, checking if it runs, and killing a job's processes.

`supervisor.json` in the job directory identifies the supervisor by pid, start time and boot, so that another process is
never mistaken for it. A job is killed supervisor first, because the supervisor would start the master again.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from resile.api.ids import Seconds
from resile.chaos.faults import NothingToInjectError
from resile.chaos.inject_local import kill_master
from resile.client.errors import CommandError
from resile.client.local.master_client import wait_until
from resile.common.atomic_files import write_atomically
from resile.platform.local import files, processes
from resile.platform.local.shim import start_time
from resile.wire.job_directory import JobDirectory

START_SECONDS = 30.0
"""How long a master may take to listen; it takes a third of a second on an idle machine."""
MASTER_SAYS = "resile master: "
"""How the sentence begins with which a master says in its log why it cannot serve."""
BEYOND_GRACE = 5.0
"""Seconds that a node may outlive its grace before its shim is killed, and the node with it."""


class SupervisorFile(msgspec.Struct, frozen=True, kw_only=True):
    """The content of `supervisor.json`: which process is the supervisor, and the command line that started it."""

    pid: int
    start: int
    boot: str
    command: list[str] = []


def start_master(directory: JobDirectory, workdir: Path, options: Sequence[str]) -> subprocess.Popen[bytes]:
    """Start a supervisor in its own session, and return its process. The supervisor starts the master.

    Waits until the master listens. If that takes too long, raises `CommandError`, which quotes the master's log.
    """
    command = [sys.executable, "-m", "resile.master", "--supervise", "--directory", str(directory.path)]
    return _start(directory, [*command, "--platform", "local", "--workdir", str(workdir), *options])


def restart_master(directory: JobDirectory) -> None:
    """Start supervisor and master again with the command line of their first start."""
    record = _record(directory)
    if record is None or not record.command:
        raise CommandError(f"it is not known how the master in {directory.path} was started")
    _start(directory, record.command)


def _start(directory: JobDirectory, command: list[str]) -> subprocess.Popen[bytes]:
    before = directory.address()
    process = None
    try:
        with open(directory.log, "ab") as log:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, cwd="/"
            )
        started, boot = start_time(process.pid), processes.boot_id()
        record = SupervisorFile(pid=process.pid, start=started, boot=boot, command=command)
        write_atomically(directory.path / "supervisor.json", msgspec.json.encode(record))
    except OSError as error:
        if process is not None:  # without a record, no command could find the process again
            process.terminate()
            process.wait()
        raise CommandError(f"cannot start a master in {directory.path}: {os.strerror(error.errno or 0)}") from error
    wait_until(lambda: directory.address() != before or process.poll() is not None, START_SECONDS, every=0.02)
    if directory.address() == before:
        process.terminate()
        raise CommandError(f"the master did not come up: {_last_words(directory)}")
    return process


def served(directory: JobDirectory) -> bool:
    """True if the job has a master, or a supervisor that will start one at once."""
    record = _record(directory)
    is_supervised = record is not None and processes.is_alive(record.pid, record.start, record.boot)
    return is_supervised or directory.master_lives()


def end_by_force(directory: JobDirectory, grace: Seconds) -> None:
    """Kill supervisor and master, end every node, and wait until all are gone.

    Nodes get SIGTERM, and SIGKILL after `grace` seconds. Processes whose shim is gone get SIGKILL without grace.
    """
    record = _record(directory)
    if record is not None and record.boot == processes.boot_id():
        _signal(record.pid, record.start, signal.SIGKILL)
    with contextlib.suppress(NothingToInjectError):
        kill_master(directory)
    wait_until(lambda: not served(directory), BEYOND_GRACE, every=0.02)
    end_nodes(directory.path, grace)


def end_nodes(directory: Path, grace: Seconds) -> None:
    """End every node of a job. Call this only if the master has ended."""
    for record in _living(directory):
        at = files.node_directory(directory, record.node)
        with contextlib.suppress(OSError):
            files.write(at / "stop.json", files.StopFile(grace=grace))
        _signal_shim(at, signal.SIGTERM)
    wait_until(lambda: not _living(directory), grace + BEYOND_GRACE, every=0.05)
    for record in _living(directory):
        _signal_shim(files.node_directory(directory, record.node), signal.SIGKILL)
    for at in files.node_directories(directory):
        processes.kill_strays(at, session=None)


def _living(directory: Path) -> list[files.NodeRecord]:
    return [record for record in files.read_nodes(directory) if not record.status.ended]


def _signal_shim(at: Path, number: signal.Signals) -> None:
    node = files.read(at / "node.json", files.NodeFile)
    if node is not None:
        _signal(node.shim_pid, node.shim_start, number)


def _signal(pid: int, start: int, number: signal.Signals) -> None:
    pidfd = processes.open_pidfd(pid, start)
    if pidfd is not None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(pidfd, number)
        os.close(pidfd)


def _record(directory: JobDirectory) -> SupervisorFile | None:
    return files.read(directory.path / "supervisor.json", SupervisorFile)


def _last_words(directory: JobDirectory) -> str:
    try:
        lines = directory.log.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    sentences = [text.removeprefix(MASTER_SAYS) for text in lines if text.startswith(MASTER_SAYS)]
    return next(reversed(sentences or [text for text in lines if text.strip()]), "it said nothing")
