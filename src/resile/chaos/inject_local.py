"""Fault injection into jobs of this machine: the work of `resile chaos`.

A fault only signals processes that are found through the job's own records, never by name. The start time of each
process is checked, and a pidfd holds it while it is signalled: a process that got the same pid later is never hit.
Every function raises `NothingToInjectError` if the job has no such process, node or master.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterable
from pathlib import Path

import msgspec

from resile.api.defaults import LOCAL_NODE_VARIABLE
from resile.chaos.faults import (
    Fault,
    FreezeNode,
    Injected,
    KillMaster,
    KillNode,
    KillProcess,
    NothingToInjectError,
    ThawNode,
)
from resile.platform.local import files, processes
from resile.platform.local.shim import start_time, stat_of
from resile.wire.env import WORKER
from resile.wire.job_directory import JobDirectory

SWEEPS = 10
"""How often at most `FreezeNode` lists a node's processes, to find those that were forked meanwhile."""


class TrainingProcess(msgspec.Struct, frozen=True, kw_only=True):
    node: str
    pid: int
    start: int
    rank: int
    """The global rank; -1 if the process has none yet."""


def inject(directory: JobDirectory, fault: Fault) -> Injected:
    """Inject `fault` into a job. The shims of its nodes and the supervisor of its master stay alive."""
    match fault:
        case KillProcess(node, rank):
            return _kill_process(directory, node, rank)
        case KillNode(node):
            return _signal_node(directory, node, signal.SIGKILL, "killed")
        case FreezeNode(node):
            return _signal_node(directory, node, signal.SIGSTOP, "froze", sweeps=SWEEPS)
        case ThawNode(node):
            return _signal_node(directory, node, signal.SIGCONT, "thawed")
        case KillMaster():
            return kill_master(directory)


def _kill_process(directory: JobDirectory, node: str | None, rank: int | None) -> Injected:
    nodes = [_node(directory, node)] if node else _running(directory)
    found = [process for record in nodes for process in _training_processes(directory, record)]
    if rank is not None:
        found = sorted((process for process in found if process.rank == rank), key=lambda process: process.start)
    if not found:
        where = f" on {node}" if node else ""
        which = f"training process with rank {rank}" if rank is not None else "training process"
        raise NothingToInjectError(f"there is no {which}{where}")
    # Of several processes with one rank, the older ones are left from a node that was lost and is being removed.
    victim = found[0] if node and rank is None else found[-1]
    at = time.time()
    pids = _send([(victim.pid, victim.start)], signal.SIGKILL)
    if not pids:
        raise NothingToInjectError(f"the training process {victim.pid} of {victim.node} ended by itself")
    named = f"rank {victim.rank} of {victim.node}" if victim.rank >= 0 else f"a training process of {victim.node}"
    return Injected(what=f"killed {named}", at=at, pids=pids, node=victim.node)


def _signal_node(directory: JobDirectory, name: str, number: signal.Signals, verb: str, *, sweeps: int = 1) -> Injected:
    record = _node(directory, name)
    at = time.time()
    pids: list[int] = []
    for _ in range(sweeps):
        fresh = [process for process in _processes(directory, record) if process[0] not in pids]
        if not fresh:
            break
        pids += _send(fresh, number)
    if not pids:
        raise NothingToInjectError(f"{record.node} has ended by itself")
    return Injected(what=f"{verb} {record.node} as a whole", at=at, pids=pids, node=str(record.node))


def kill_master(directory: JobDirectory) -> Injected:
    """SIGKILL the job's master, which `master.json` names. Its supervisor stays alive."""
    address = directory.address()
    if address is None or not directory.master_lives():
        raise NothingToInjectError("the job has no master that lives")
    pidfd = processes.open_pidfd(address.pid, start_time(address.pid))
    if pidfd is None:
        raise NothingToInjectError(f"the master (pid {address.pid}) is gone")
    try:
        # The pidfd holds the process. A process that began after the file was written did not write it.
        written = (directory.path / "master.json").stat().st_mtime
        if _began(address.pid) > written or not _is_master(address.pid, directory.path):
            raise NothingToInjectError(f"pid {address.pid} is no longer the job's master")
        at = time.time()
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    except ProcessLookupError:
        raise NothingToInjectError(f"the master (pid {address.pid}) is gone") from None
    finally:
        os.close(pidfd)
    return Injected(what="killed the master", at=at, pids=[address.pid])


def _training_processes(directory: JobDirectory, record: files.NodeRecord) -> list[TrainingProcess]:
    """The training processes of a node, sorted by rank; not their children, such as data loaders."""
    found: list[TrainingProcess] = []
    pids = [process for process in _processes(directory, record) if _variable(process[0], WORKER) is not None]
    workers = {pid for pid, _ in pids}
    for pid, start in pids:
        fields = stat_of(str(pid))
        if fields and int(fields[1]) not in workers:
            rank = _variable(pid, "RANK") or ""
            number = int(rank) if rank.isdigit() else -1
            found.append(TrainingProcess(node=str(record.node), pid=pid, start=start, rank=number))
    return sorted(found, key=lambda process: (process.rank, process.pid))


def _running(directory: JobDirectory) -> list[files.NodeRecord]:
    return [record for record in files.read_nodes(directory.path) if record.pid]


def _node(directory: JobDirectory, name: str) -> files.NodeRecord:
    running = _running(directory)
    for record in running:
        if name in (str(record.node), record.name):
            return record
    known = ", ".join(str(record.node) for record in running)
    raise NothingToInjectError(f"no node {name} runs; " + (f"running are {known}" if known else "no other node does"))


def _processes(directory: JobDirectory, record: files.NodeRecord) -> list[tuple[int, int]]:
    """Pids and start times of all processes of a node, the main one first; empty if the main process has ended."""
    node = files.read(files.node_directory(directory.path, record.node) / "node.json", files.NodeFile)
    if node is None or not processes.is_alive(node.pid, node.pid_start, node.boot):
        return []
    mark = f"{LOCAL_NODE_VARIABLE}={files.node_directory(directory.path, record.node)}".encode()
    below = [(pid, start_time(pid)) for pid in processes.tree(node.pid)[1:]]
    return [
        (node.pid, node.pid_start),
        *((pid, start) for pid, start in below if start and mark in processes.environ(pid)),
    ]


def _send(targets: Iterable[tuple[int, int]], number: signal.Signals) -> list[int]:
    """Send a signal to processes, in order. Each target is a pid and the start time of its process.

    Processes that have ended are skipped. Returns the pids of the others.
    """
    held = [(pid, pidfd) for pid, start in targets if (pidfd := processes.open_pidfd(pid, start)) is not None]
    for _, pidfd in held:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            signal.pidfd_send_signal(pidfd, number)
        os.close(pidfd)
    return [pid for pid, _ in held]


def _began(pid: int) -> float:
    """When a process began, by the wall clock, in seconds since 1970, exact to 0.01 s."""
    uptime = float(Path("/proc/uptime").read_text(encoding="ascii").split()[0])
    return time.time() - uptime + start_time(pid) / os.sysconf("SC_CLK_TCK")


def _is_master(pid: int, directory: Path) -> bool:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
    return b"resile.master" in words and os.fsencode(directory) in words


def _variable(pid: int, name: str) -> str | None:
    start = f"{name}=".encode()
    return next((os.fsdecode(entry[len(start) :]) for entry in processes.environ(pid) if entry.startswith(start)), None)
