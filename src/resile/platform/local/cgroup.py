"""Memory limits for local nodes, by the kernel's memory controller (cgroup version 1 or 2).

With a limit a laptop behaves like a cluster: a node that takes too much memory is killed and reported as `OOMKilled`,
and the machine lives on. Limits need root and a mounted memory controller; without them nodes run without limits, and a
warning says so.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from resile.api.ids import Bytes
from resile.platform.local.shim import remove_cgroup

ROOT = "resile"
MOUNTS = Path("/proc/self/mounts")


class NoMemoryLimitsError(RuntimeError):
    """Raised if memory limits cannot be enforced on this machine; the text is one sentence for the user."""


class MemoryLimits:
    """The memory cgroups of one job: `resile/<job>/<node>` below the controller's mount point."""

    def __init__(self, job: str) -> None:
        """Find the memory controller and try it; raises `NoMemoryLimitsError` if there is no usable one."""
        mount, self._version = _controller()
        self._job = mount / ROOT / job.replace("/", "_")
        self._mount = mount
        try:
            self._make(self._job)
        except OSError as error:
            raise NoMemoryLimitsError(
                f"memory limits are not enforced: cannot create {error.filename or self._job} ({error.strerror})"
            ) from error
        for path in (self._job, self._job.parent):  # nodes make them again
            with contextlib.suppress(OSError):
                path.rmdir()

    def create(self, node: str, limit: Bytes) -> Path:
        """Make a node's cgroup with this limit. Replaces an empty one of the same name. Raises `OSError` on failure."""
        path = self._job / node
        with contextlib.suppress(FileNotFoundError):
            path.rmdir()
        self._make(path)
        try:
            if self._version == 1:
                (path / "memory.limit_in_bytes").write_text(str(limit))
                with contextlib.suppress(OSError):  # kernels without swap accounting do not have it
                    (path / "memory.memsw.limit_in_bytes").write_text(str(limit))
            else:
                (path / "memory.max").write_text(str(limit))
                with contextlib.suppress(OSError):
                    (path / "memory.swap.max").write_text("0")
        except OSError:
            remove_cgroup(str(path))
            raise
        return path

    def _make(self, path: Path) -> None:
        parts = path.relative_to(self._mount).parts
        for attempt in range(3):  # the shim of another node may be removing an empty parent right now
            try:
                at = self._mount
                for part in parts:
                    if self._version == 2:
                        (at / "cgroup.subtree_control").write_text("+memory")
                    at = at / part
                    at.mkdir(exist_ok=True)
                return
            except FileNotFoundError:
                if attempt == 2:
                    raise


def _controller() -> tuple[Path, int]:
    try:
        mounts = MOUNTS.read_text(encoding="utf-8")
    except OSError:
        mounts = ""
    for line in mounts.splitlines():
        _, point, kind, options, *_ = line.split()
        mount = Path(point)
        if kind == "cgroup" and "memory" in options.split(","):
            return _writable(mount), 1
        if kind == "cgroup2":
            with contextlib.suppress(OSError):
                if "memory" in (mount / "cgroup.controllers").read_text().split():
                    return _writable(mount), 2
    raise NoMemoryLimitsError("memory limits are not enforced: this machine has no memory controller mounted (cgroup)")


def _writable(mount: Path) -> Path:
    if not os.access(mount, os.W_OK):
        raise NoMemoryLimitsError(f"memory limits are not enforced: no permission to create cgroups in {mount}")
    return mount
