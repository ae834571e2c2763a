"""The files of local nodes, by which platform, shims, command line and chaos tools know of a node.

    <job directory>/nodes/<role>-<id>/node.json   the launch of the node, and its processes (the shim adds those)
                                      stop.json   the request to end it, and how long it has
                                      exit.json   how it ended
    <job directory>/logs/<pod name>.log           its standard output and error

Reading needs no platform and no master. Every file is replaced as a whole: a reader sees the old one or the new one. A
file that cannot be understood counts as missing.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path
from typing import TypeVar

import msgspec

from resile.api.ids import MiB, NodeId, NodeKey
from resile.platform.local import processes
from resile.protocol.reports import NodeEnd, NodeStatus, signal_name

LAUNCH_WINDOW = 2.0
"""For so many seconds after its launch, a node without a process counts as starting, and not as lost."""


class NodeFile(msgspec.Struct, frozen=True, kw_only=True):
    """The content of `node.json`. Pids and start times are 0 until the shim has started the command."""

    name: str
    role: str
    id: int
    rank: int
    address: str
    command: list[str]
    workdir: str
    log: str
    relaunch_count: int = 0
    memory: int = 0
    """The enforced memory limit in bytes; 0 without a limit."""
    cgroup: str = ""
    launched_at: float = 0.0
    started_at: float = 0.0
    boot: str = ""
    shim_pid: int = 0
    shim_start: int = 0
    pid: int = 0
    pid_start: int = 0

    @property
    def key(self) -> NodeKey:
        return NodeKey(self.role, NodeId(self.id))


class StopFile(msgspec.Struct, frozen=True, kw_only=True):
    """The content of `stop.json`: the seconds between SIGTERM and SIGKILL."""

    grace: float


class ExitFile(msgspec.Struct, frozen=True, kw_only=True):
    """The content of `exit.json`: how the node's main process ended."""

    exit_code: int
    signal: int = 0
    oom: bool = False
    started_at: float = 0.0
    ended_at: float = 0.0
    error: str = ""
    """Why the command could not be started; empty if it was started."""
    survivors: int = 0
    """How many processes of the node not even SIGKILL ended."""


class NodeRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a node at the call of `read_nodes`, from the node's files and from /proc."""

    node: NodeKey
    name: str
    status: NodeStatus
    log: Path
    pid: int
    """The main process, which leads the node's process group and session; 0 if the node does not run."""


F = TypeVar("F", bound=msgspec.Struct)


def node_directory(directory: Path, node: NodeKey) -> Path:
    return directory / "nodes" / str(node)


def read(path: Path, kind: type[F]) -> F | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (OSError, ValueError):
        return None


def write(path: Path, content: NodeFile | StopFile | ExitFile) -> None:
    """Replace a file in one step. If that raises `OSError`, the file is as it was before.

    The file is not synced to disk, so a crash of the machine may lose it. But such a crash ends the nodes as well.
    """
    temporary = path.with_name(path.name + ".tmp")
    try:
        temporary.write_bytes(msgspec.json.encode(content))
        temporary.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def node_directories(directory: Path) -> list[Path]:
    """The node directories of a job, oldest id first."""
    try:
        names = os.listdir(directory / "nodes")
    except OSError:
        return []
    found = [(role, int(number)) for role, _, number in (name.rpartition("-") for name in names) if number.isdigit()]
    return [directory / "nodes" / f"{role}-{number}" for role, number in sorted(found, key=lambda item: item[::-1])]


def outcome(ended: ExitFile, memory: int = 0) -> tuple[NodeStatus, NodeEnd]:
    """The status and end of a node, given its `exit.json` and its memory limit (0 if it has none).

    The reason of the end is worded as in Kubernetes, such as `OOMKilled`.
    """
    if ended.error:
        return NodeStatus.FAILED, NodeEnd(exit_code=ended.exit_code, reason="StartError", message=ended.error)
    left = f"; {ended.survivors} of its processes could not be killed" if ended.survivors else ""
    if ended.exit_code == 0:
        return NodeStatus.SUCCEEDED, NodeEnd(exit_code=0, reason="Completed", message=left.lstrip("; "))
    if ended.oom:
        limit = f" of {memory / MiB:g} MiB" if memory else ""
        reason, message = "OOMKilled", f"it exceeded its memory limit{limit}"
    elif ended.signal:
        reason = "Killed" if ended.signal == signal.SIGKILL else "Error"
        message = f"ended by {signal_name(ended.signal)}"
    else:
        reason, message = "Error", f"exited with code {ended.exit_code}"
    return NodeStatus.FAILED, NodeEnd(exit_code=ended.exit_code, reason=reason, message=message + left)


def lost(record: NodeFile) -> NodeEnd:
    """The end of a node whose shim is gone and wrote no `exit.json`."""
    if record.boot and record.boot != processes.boot_id():
        return NodeEnd(reason="Lost", message="the machine was restarted while the node ran")
    if not record.shim_pid:
        return NodeEnd(reason="Lost", message="the master ended before the node had been started")
    message = f"the process that watches the node (pid {record.shim_pid}) was killed, and the node with it"
    return NodeEnd(exit_code=128 + signal.SIGKILL, reason="Killed", message=message)


def read_nodes(directory: Path) -> list[NodeRecord]:
    """Read the present state of every node of a job directory, oldest id first. Reads three small files per node."""
    found: list[NodeRecord] = []
    for path in node_directories(directory):
        record = read(path / "node.json", NodeFile)
        if record is not None:
            status = _status(path, record)
            pid = record.pid if status is NodeStatus.RUNNING else 0
            found.append(NodeRecord(node=record.key, name=record.name, status=status, log=Path(record.log), pid=pid))
    return found


def _status(directory: Path, record: NodeFile) -> NodeStatus:
    ended = read(directory / "exit.json", ExitFile)
    if ended is None:
        if record.shim_pid:
            lives = processes.is_alive(record.shim_pid, record.shim_start, record.boot)
        else:
            lives = processes.find_shim(directory) is not None or time.time() - record.launched_at < LAUNCH_WINDOW
        if lives:
            return NodeStatus.RUNNING if record.pid else NodeStatus.STARTING
        ended = read(directory / "exit.json", ExitFile)  # it may have ended since the first look
    if read(directory / "stop.json", StopFile) is not None:
        return NodeStatus.DELETED
    return NodeStatus.FAILED if ended is None else outcome(ended)[0]
