"""Checks that there is enough memory before it is allocated, because a container that exceeds its limit is killed."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from resile.api import quantity

LIMIT = "RESILE_CHECKPOINT_MEMORY"
"""Sets how much memory checkpoints may use on a node, as in `512Mi`; unset: all that the machine and container have."""
SPARE = 256 << 20
"""Bytes left free for everything else."""


def short_of(
    need: int,
    taken: int = 0,
    untouched: int = 0,
    *,
    what: str = "checkpoints",
    limit: str = LIMIT,
    environ: Mapping[str, str] = os.environ,
    proc: Path = Path("/proc"),
    cgroup: Path = Path("/sys/fs/cgroup"),
) -> str:
    """Return a sentence that says why `need` more bytes of memory are too many; empty if they are not.

    The node already uses `taken` bytes for the same purpose. `untouched` of them were never written to, so the kernel
    still counts these as free. `what` names the purpose. `limit` names the environment variable that limits it.
    """
    if bound := environ.get(limit, ""):
        try:
            allowed = quantity.size(bound)
        except quantity.BadQuantity as error:
            return f"{limit} {error}"
        if taken + need > allowed:
            return f"{_mib(taken + need)} of memory are needed for {what}, {limit} allows {_mib(allowed)}"
    for left, whose in ((_machine(proc), "this machine"), (_container(proc, cgroup), "this container")):
        if left is not None and need + untouched + SPARE > left:
            left = max(0, left - untouched)
            return f"{_mib(need)} of memory are needed for {what}, {whose} has {_mib(left)} left"
    return ""


def _machine(proc: Path) -> int | None:
    try:
        lines = (proc / "meminfo").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration, ValueError, IndexError):
        return None


def _container(proc: Path, cgroup: Path) -> int | None:
    left = [_left(group, names) for group, names in _groups(proc, cgroup)]
    return min((each for each in left if each is not None), default=None)


class _Names(NamedTuple):
    limit: str
    used: str
    droppable: str
    """The field of memory.stat with file pages that can be dropped; they count as free."""


_V2 = _Names("memory.max", "memory.current", "inactive_file")
_V1 = _Names("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def _groups(proc: Path, cgroup: Path) -> Iterator[tuple[Path, _Names]]:
    own = {_V2: "", _V1: ""}
    with contextlib.suppress(OSError, ValueError):
        for line in (proc / "self" / "cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers in ("", "memory"):
                own[_V1 if controllers else _V2] = path.strip("/")
    for names, path in own.items():
        top = cgroup if names is _V2 else cgroup / "memory"
        yield top, names
        if path:
            yield from ((top / each, names) for each in [Path(path), *Path(path).parents[:-1]])


def _left(group: Path, names: _Names) -> int | None:
    try:
        limit = int((group / names.limit).read_text())
        used = int((group / names.used).read_text())
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        return limit - used + int(stat.get(names.droppable, 0))
    except (OSError, ValueError):
        return None


def _mib(count: int) -> str:
    return f"{count / (1 << 20):.0f} MiB"
