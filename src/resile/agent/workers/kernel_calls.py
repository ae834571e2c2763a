"""Linux calls of agents and standbys: parent-death signals, adopting orphans, OOM scores, and what `ps` shows.

Imports nothing but the standard library, because every standby imports it and becomes a training process.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import struct
from collections.abc import Mapping, Sequence

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_PR_SET_MM = 35
_PR_SET_MM_MAP = 14
_PR_SET_CHILD_SUBREAPER = 36

_MM_MAP = struct.Struct("=11Q Q I I")
"""`struct prctl_mm_map`: eleven addresses, the auxiliary vector and its size, the executable's descriptor."""
_NO_EXECUTABLE = 0xFFFFFFFF
_FIRST_FIELD = 3
"""The number in proc(5) of the first field after the name in /proc/PID/stat."""
_LOWER = 5
"""Niceness to add, which leaves a third of the usual CPU time. With less, imports on a busy machine take too long."""
_OOM_SCORE = "/proc/self/oom_score_adj"

_libc = ctypes.CDLL(None, use_errno=True)
_shown: list[ctypes.Array[ctypes.c_char]] = []
"""The memory that /proc/PID/cmdline shows; it must live as long as this process."""


def die_with(parent: int) -> bool:
    """Have the kernel kill this process when its parent dies. False if `parent` is not its parent any more."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    return os.getppid() == parent


def adopt_orphans(on: bool) -> None:
    """Choose whether descendants of this process become its children when their parent ends."""
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, int(on), 0, 0, 0)


def show_name(name: str) -> None:
    """Set the short name that `ps` and `top` show, of at most 15 bytes."""
    _libc.prctl(_PR_SET_NAME, os.fsencode(name), 0, 0, 0)


def show_command(words: Sequence[str], environment: Mapping[str, str]) -> None:
    """Make /proc/PID/cmdline and environ show these. Raises OSError if the kernel lacks CONFIG_CHECKPOINT_RESTORE."""
    command = b"".join(os.fsencode(word) + b"\0" for word in words)
    variables = b"".join(os.fsencode(f"{name}={value}") + b"\0" for name, value in environment.items())
    shown = ctypes.create_string_buffer(command + variables)
    start = ctypes.addressof(shown)
    middle, end = start + len(command), start + len(command) + len(variables)
    with open("/proc/self/stat", encoding="utf-8", errors="replace") as file:
        fields = file.read().rpartition(")")[2].split()
    start_code, end_code, start_stack = (int(fields[number - _FIRST_FIELD]) for number in (26, 27, 28))
    start_data, end_data, start_brk = (int(fields[number - _FIRST_FIELD]) for number in (45, 46, 47))
    _libc.sbrk.restype = ctypes.c_void_p
    brk = _libc.sbrk(ctypes.c_ssize_t(0))
    words_at = (start, middle, middle, end)
    segments = (start_code, end_code, start_data, end_data, start_brk, brk, start_stack)
    map_ = ctypes.create_string_buffer(_MM_MAP.pack(*segments, *words_at, 0, 0, _NO_EXECUTABLE), _MM_MAP.size)
    address, size = ctypes.c_ulong(ctypes.addressof(map_)), ctypes.c_ulong(_MM_MAP.size)
    if _libc.prctl(_PR_SET_MM, ctypes.c_ulong(_PR_SET_MM_MAP), address, size, ctypes.c_ulong(0)) != 0:
        raise OSError(ctypes.get_errno(), "the kernel does not let a process change what it shows of itself")
    _shown[:] = [shown]


def die_first() -> int:
    """Have the kernel kill this process first when memory is short. Returns the previous OOM score."""
    with open(_OOM_SCORE, encoding="ascii") as file:
        before = int(file.read())
    set_oom_score(1000)
    return before


def set_oom_score(score: int) -> None:
    """Set how likely the kernel kills this process when memory is short. Raises OSError if that is not allowed."""
    with open(_OOM_SCORE, "w", encoding="ascii") as file:
        file.write(str(score))


def yield_cpu() -> None:
    """Lower the CPU priority of this process, unless it would not be allowed to raise it again."""
    before = os.getpriority(os.PRIO_PROCESS, 0)
    lower = min(before + _LOWER, 19)
    probe = os.fork()
    if probe == 0:  # rights and limits decide whether it can be raised again: a child tries it
        try:
            os.setpriority(os.PRIO_PROCESS, 0, lower)
            os.setpriority(os.PRIO_PROCESS, 0, before)
        finally:
            os._exit(os.getpriority(os.PRIO_PROCESS, 0) != before)
    _, status = os.waitpid(probe, 0)
    if status == 0:
        os.setpriority(os.PRIO_PROCESS, 0, lower)


def memory_of(pid: int) -> int:
    """Memory of a process in bytes (PSS: shared pages count in part); 0 if it is gone."""
    try:
        with open(f"/proc/{pid}/smaps_rollup", encoding="ascii") as file:
            return next((int(line.split()[1]) * 1024 for line in file if line.startswith("Pss:")), 0)
    except OSError:
        return 0


def adopted(name: str) -> list[int]:
    """Pids of children that this process may have adopted, also of ended ones; empty where the kernel cannot tell.

    A child counts as adopted if its short name (`comm`) is `name`, or if its process group is neither its own nor that
    of this process.
    """
    found = []
    with contextlib.suppress(OSError):
        with open(f"/proc/self/task/{os.getpid()}/children", encoding="ascii") as file:
            pids = [int(pid) for pid in file.read().split()]
        for pid in pids:
            with contextlib.suppress(OSError), open(f"/proc/{pid}/comm", encoding="utf-8", errors="replace") as file:
                found += [pid] if file.read().strip() == name or os.getpgid(pid) not in (pid, os.getpgid(0)) else []
    return found
