"""Counts the processes of this node's cgroup that the kernel killed for lack of memory."""

from __future__ import annotations

from pathlib import Path

_V1 = Path("/sys/fs/cgroup/memory")
_V2 = Path("/sys/fs/cgroup")


def oom_kills() -> int:
    """How many processes of this cgroup the kernel has killed for lack of memory; 0 if it does not say."""
    for path in _candidates():
        try:
            lines = path.read_text().splitlines()
        except OSError:
            continue
        for line in lines:
            name, _, value = line.partition(" ")
            if name == "oom_kill" and value.isdigit():
                return int(value)
    return 0


def _candidates() -> list[Path]:
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        below = path.lstrip("/")
        if controllers == "memory":
            found += [_V1 / below / "memory.oom_control", _V1 / "memory.oom_control"]
        elif not controllers:
            found += [_V2 / below / "memory.events", _V2 / "memory.events"]
    return found
