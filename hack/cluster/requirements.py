"""Whether this machine can run the cluster, found out before anything is built: each need is tried, not guessed.

Every trial undoes itself. What only a package can try (it is installed by `build`) is not tried here.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from build import PACKAGES_TO_BUILD, PACKAGES_TO_RUN, missing_binaries, missing_packages
from console import ClusterError, run
from host import hierarchies
from settings import CACHE, CHECKOUT, VENV

GIB = 1024**3
MEMORY = 4 * GIB
DISK_TO_BUILD = 5 * GIB
DISK_TO_RUN = 1 * GIB
SMALL_PACKAGE = "socat"
APT_DEADLINE = 120.0
CONTROLLERS = ("cpu", "memory", "pids")


def check() -> str:
    """Return one sentence that says why the cluster can run here.

    Raises:
        ClusterError: it cannot; the sentence names the first need that is not met.
    """
    for need in (_root, _system, _room, _readable, _namespaces, _cgroups):
        need()
    to_do = "nothing has to be built" if not missing_binaries() else "the first start builds it (8 minutes)"
    return f"this machine can run the cluster; {to_do}"


def _root() -> None:
    if os.geteuid() != 0:
        raise ClusterError("the cluster needs root: it makes network namespaces, mounts and cgroups")


def _system() -> None:
    """Packages and sources are Debian's; a machine that has every program already may be another."""
    wanted = PACKAGES_TO_RUN | (PACKAGES_TO_BUILD if missing_binaries() else {})
    missing = missing_packages(wanted)
    if not missing and not missing_binaries():
        return
    fields = dict(line.split("=", 1) for line in _lines("/etc/os-release") if "=" in line)
    found = fields.get("PRETTY_NAME", "this system").strip('"')
    if (fields.get("ID"), fields.get("VERSION_ID", "").strip('"')) != ("debian", "12"):
        raise ClusterError(f"the cluster is built from packages of Debian 12, and this is {found}")
    if os.uname().machine not in ("x86_64", "aarch64"):
        raise ClusterError(f"the cluster was never built for {os.uname().machine}")
    with tempfile.TemporaryDirectory() as scratch:
        try:
            run(["apt-get", "update", "-qq"], deadline=APT_DEADLINE)
            run(["apt-get", "download", "-qq", SMALL_PACKAGE], cwd=Path(scratch), deadline=APT_DEADLINE)
        except ClusterError as error:
            raise ClusterError(
                "the cluster has to be built, and apt cannot get Debian's packages", error.detail
            ) from error


def _room() -> None:
    total = int(_lines("/proc/meminfo")[0].split()[1]) * 1024
    if total < MEMORY:
        raise ClusterError(f"the cluster needs {MEMORY // GIB} GB of memory, and there are {total / GIB:.1f}")
    folder = next(parent for parent in (CACHE, *CACHE.parents) if parent.exists())
    needed = DISK_TO_BUILD if missing_binaries() else DISK_TO_RUN
    if (free := shutil.disk_usage(folder).free) < needed:
        raise ClusterError(f"the cluster needs {needed // GIB} GB of disk in {folder}, and {free / GIB:.1f} are free")


def _readable() -> None:
    """Pods see the checkout at its own path and read it as another user."""
    for path in (CHECKOUT, CHECKOUT / "src/resile/__init__.py", VENV):
        needed = 0o005 if path.is_dir() else 0o004
        if path.exists() and path.stat().st_mode & needed != needed:
            raise ClusterError(f"pods run as another user, who may not read {path}; run chmod -R o+rX on it")


def _namespaces() -> None:
    if not any(line.split()[-1] == "overlay" for line in _lines("/proc/filesystems")):
        with contextlib.suppress(ClusterError):
            run(["modprobe", "overlay"])
        if not any(line.split()[-1] == "overlay" for line in _lines("/proc/filesystems")):
            raise ClusterError("the cluster needs overlayfs, and the kernel does not offer it")
    trial = ["mount --make-rprivate /", "mount -t tmpfs none /mnt"]
    if shutil.which("ip"):
        trial += ["ip link add try0 type veth peer name try1", "ip link add try2 type bridge", "ip link set try2 up"]
    try:
        run(["unshare", "--net", "--mount", "--pid", "--fork", "--uts", "--ipc", "sh", "-ec", "\n".join(trial)])
    except ClusterError as error:
        raise ClusterError(
            "the cluster needs namespaces with links and mounts, and may not make them", error.detail
        ) from error


def _cgroups() -> None:
    found = hierarchies(("cgroup",)) or hierarchies(("cgroup2",))
    held = {name for folder in found for name in _controllers(folder)}
    if missing := [name for name in CONTROLLERS if name not in held]:
        raise ClusterError(f"the cluster needs the cgroup controllers {', '.join(CONTROLLERS)}; missing: {missing}")
    for folder in found:
        trial = folder / f"resile-check-{os.getpid()}"
        try:
            trial.mkdir()
            trial.rmdir()
        except OSError as error:
            raise ClusterError(f"the cluster makes cgroups, and none can be made in {folder}: {error}") from error


def _controllers(hierarchy: Path) -> Iterator[str]:
    if (hierarchy / "cgroup.controllers").exists():
        yield from (hierarchy / "cgroup.controllers").read_text().split()
    for line in _lines("/proc/self/mounts"):
        fields = line.split()
        if fields[1] == str(hierarchy):
            yield from fields[3].split(",")


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []
