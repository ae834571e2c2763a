"""Whether there is memory for checkpoints: asked before it is taken, as a container that takes too much is killed."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from resile.api import quantity

LIMIT = "RESILE_CHECKPOINT_MEMORY"
"""How much memory checkpoints may take on a node, as in `512Mi`; without it, what machine and container have."""
SPARE = 256 << 20
"""Bytes that are left for everything else."""


def short_of(
    need: int,
    taken: int = 0,
    *,
    environ: Mapping[str, str] = os.environ,
    proc: Path = Path("/proc"),
    cgroup: Path = Path("/sys/fs/cgroup"),
) -> str:
    """Why there is no room for `need` more bytes beside the `taken` ones: one sentence; empty if there is.

    Args:
        need: bytes that are asked for.
        taken: bytes that checkpoints have on this node already.
        environ: where the limit is set.
        proc: where the kernel tells of the machine's memory.
        cgroup: where it tells of the container's.
    """
    limit = environ.get(LIMIT, "")
    if limit:
        try:
            allowed = quantity.size(limit)
        except quantity.BadQuantity as error:
            return f"{LIMIT} {error}"
        if taken + need > allowed:
            return f"{_mib(taken + need)} of memory are needed for checkpoints, {LIMIT} allows {_mib(allowed)}"
    for left, whose in ((_machine(proc), "this machine"), (_container(cgroup), "this container")):
        if left is not None and need + SPARE > left:
            return f"{_mib(need)} of memory are needed for checkpoints, {whose} has {_mib(max(0, left))} left"
    return ""


def _machine(proc: Path) -> int | None:
    try:
        lines = (proc / "meminfo").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration, ValueError, IndexError):
        return None


def _container(cgroup: Path) -> int | None:
    """What is left of the container's limit; pages of files that can be dropped count as free. None: no limit."""
    try:
        limit = int((cgroup / "memory.max").read_text())
        used = int((cgroup / "memory.current").read_text())
        stat = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
        return limit - used + int(stat.get("inactive_file", 0))
    except (OSError, ValueError):
        return None


def _mib(count: int) -> str:
    return f"{count / (1 << 20):.0f} MiB"
