"""Finds processes by pid, start time and boot, which together identify a process for good.

A bare pid from a file may belong to another process by the time it is read. Every function here that returns a pid or a
pidfd has checked that it is still the same process. Linux only: reads /proc, needs pidfd_open (kernel 5.3).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from resile.api.defaults import LOCAL_NODE_VARIABLE
from resile.platform.local.shim import descendants, kill, start_time, stat_of


@cache
def boot_id() -> str:
    """The id of this boot of the machine; empty if it cannot be read. A pid of another boot is no longer valid."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""


def is_alive(pid: int, start: int, boot: str) -> bool:
    """True if the process with this pid, start time and boot still runs, and is no zombie."""
    if pid <= 0 or boot != boot_id():
        return False
    fields = stat_of(str(pid))
    return bool(fields) and int(fields[19]) == start and fields[0] not in "ZX"


def open_pidfd(pid: int, start: int) -> int | None:
    """A pidfd of the process with this pid and start time, readable when the process ends; None if it has ended."""
    if pid <= 0:
        return None
    try:
        fd = os.pidfd_open(pid)
    except OSError:
        return None
    if is_alive(pid, start, boot_id()):  # checked after opening: now the descriptor cannot come to mean another
        return fd
    if start_time(pid) == start:
        collect(fd)
    os.close(fd)
    return None


def collect(pidfd: int) -> None:
    """Reap the process of `pidfd` if it has ended and is a child of this process."""
    with contextlib.suppress(ChildProcessError):
        os.waitid(os.P_PIDFD, pidfd, os.WEXITED | os.WNOHANG)


def all_pids() -> Iterator[int]:
    return (int(name) for name in os.listdir("/proc") if name.isdigit())


def environ(pid: int) -> list[bytes]:
    """The environment with which a process was started, one `NAME=value` each; empty if it cannot be read."""
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return []


def find_shim(node_directory: Path) -> int | None:
    """Search /proc for a node's living shim by its command line, and return the pid; None if there is none."""
    mark = [os.fsencode(Path(__file__).parent), os.fsencode(node_directory)]
    for pid in all_pids():
        with contextlib.suppress(OSError):
            arguments = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            if any(arguments[at : at + 2] == mark for at in range(len(arguments))):
                return pid
    return None


def tree(root: int) -> list[int]:
    """The pids of `root` and all its descendants, parents first; empty if `root` is gone. Reads all of /proc."""
    if not os.path.exists(f"/proc/{root}"):
        return []
    return [root, *(pid for pid, fields in descendants(root).items() if fields[0] not in "ZX")]


def kill_strays(node_directory: Path, session: int | None) -> None:
    """Kill the processes of a node whose shim is gone.

    A process belongs to the node if its `LOCAL_NODE_VARIABLE` names the directory, or if it is in `session`. Give
    `session` only if the shim ended just now, because the number may be used again later. Costs two or more scans of
    /proc, a few milliseconds each.
    """
    mark = f"{LOCAL_NODE_VARIABLE}={node_directory}".encode()
    killed: set[int] = set()
    while fresh := {pid for pid in all_pids() if pid not in killed and _belongs(pid, mark, session)}:
        for pid in fresh:
            kill(pid)
        killed |= fresh


def _belongs(pid: int, mark: bytes, session: int | None) -> bool:
    fields = stat_of(str(pid))
    if not fields or fields[0] in "ZX":
        return False
    return (session is not None and int(fields[3]) == session) or mark in environ(pid)
