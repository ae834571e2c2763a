"""What the cluster touches of the machine outside its own folder, and how it is put back.

A kubelet sets kernel settings, mounts need folders to be mounted on, containers need cgroups. Each of these is made or
noted here before the first program starts, and undone here after the last one has ended.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from pathlib import Path

from console import ClusterError, run
from processes import Process, boot
from settings import NODES, POLL, RESOLV_CONF, STATE, STOP_DEADLINE, Node

# Folders whose place is fixed in kubelet, containerd or CNI: every node gets one of its own mounted there.
PRIVATE = {
    "/var/log": "log",
    "/var/lib/kubelet": "kubelet",
    "/var/lib/cni": "cni-state",
    "/run/containerd": "run",
}
# What a kubelet writes at its start.
SYSCTLS = (
    "vm/overcommit_memory",
    "vm/panic_on_oom",
    "kernel/panic",
    "kernel/panic_on_oops",
    "kernel/keys/root_maxkeys",
    "kernel/keys/root_maxbytes",
)
# Made by the first `ip netns add`, and a mount of its own then.
NETWORK_NAMESPACES = Path("/run/netns")
NOTES = STATE / "host.json"
NAMESPACES = STATE / "namespaces"


def note_host() -> None:
    """Remember, once, which settings and folders the machine had before the cluster."""
    if NOTES.exists():
        return
    settings = {name: _sysctl(name).read_text().strip() for name in SYSCTLS if _sysctl(name).exists()}
    folders = [folder for folder in (*PRIVATE, str(NETWORK_NAMESPACES)) if not Path(folder).exists()]
    scratch = NOTES.with_suffix(".part")
    scratch.write_text(json.dumps({"sysctls": settings, "folders": folders, "boot": boot()}))
    scratch.rename(NOTES)


def noted_boot() -> str | None:
    """Return which start of the machine the cluster belongs to, or nothing if there is no cluster."""
    try:
        return str(json.loads(NOTES.read_text())["boot"])
    except FileNotFoundError:
        return None


def restore_host() -> None:
    """Put settings back to what they were and remove the folders that were not there."""
    if not NOTES.exists():
        return
    notes = json.loads(NOTES.read_text())
    for name, value in notes["sysctls"].items():
        if _sysctl(name).read_text().strip() != value:
            _sysctl(name).write_text(value)
    if str(NETWORK_NAMESPACES) in notes["folders"] and not any(NETWORK_NAMESPACES.iterdir()):
        run(["umount", NETWORK_NAMESPACES])
    for folder in notes["folders"]:
        with contextlib.suppress(OSError):  # somebody else has put something there since
            Path(folder).rmdir()


def ensure_mount_namespace(node: Node) -> bool:
    """Give a node its own view of the file system; return whether it was made.

    The kubelet and containerd of a node share it, so volumes mounted by one are seen by the other, and neither the host
    nor the other nodes see any of it. When the last process in it has ended, its mounts are gone by themselves.
    """
    if str(node.mount_namespace) in mounts():
        return False
    NAMESPACES.mkdir(parents=True, exist_ok=True)
    if str(NAMESPACES) not in mounts():
        run(["mount", "--bind", NAMESPACES, NAMESPACES])
        run(["mount", "--make-private", NAMESPACES])  # the kernel keeps no mount namespace on a shared mount
    node.mount_namespace.touch()
    script = ["mount --make-rshared /"]
    for place, folder in PRIVATE.items():
        Path(place).mkdir(parents=True, exist_ok=True)
        (node.home / folder).mkdir(parents=True, exist_ok=True)
        script.append(f"mount --bind '{node.home / folder}' '{place}'")
    script.append(f"mount --bind '{RESOLV_CONF}' /etc/resolv.conf")  # the host's name server is out of reach in a node
    unshare = ["unshare", f"--mount={node.mount_namespace}", "--propagation=private"]
    try:
        run([*unshare, "sh", "-ec", "\n".join(script)])
    except ClusterError:
        remove_mounts()  # a half-furnished namespace must not be found by the next `up`
        raise
    return True


def mounts() -> list[str]:
    """Return every place something is mounted on in the host's view, innermost last."""
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    return [line.split()[4].replace("\\040", " ") for line in lines]


def remove_mounts() -> None:
    """Unmount whatever is mounted under the state folder.

    Raises:
        ClusterError: something cannot be unmounted; nothing under the folder may be deleted then.
    """
    mine = [place for place in mounts() if Path(place).is_relative_to(STATE)]
    for place in reversed(mine):
        run(["umount", "--lazy", place])
    left = [place for place in mounts() if Path(place).is_relative_to(STATE)]
    if left:
        raise ClusterError(f"{left[0]} cannot be unmounted")


def ensure_cgroup(node: Node) -> None:
    """Make the cgroup under which all containers of a node live, in every hierarchy that has controllers.

    (A machine with both versions keeps its controllers in the first; runc makes what it wants in the second.)
    """
    for hierarchy in hierarchies(("cgroup",)) or hierarchies(("cgroup2",)):
        folder = hierarchy / node.name
        if folder.is_dir():
            continue
        if (hierarchy / "cgroup.controllers").exists():
            controllers = (hierarchy / "cgroup.controllers").read_text().split()
            (hierarchy / "cgroup.subtree_control").write_text(" ".join(f"+{name}" for name in controllers))
        folder.mkdir()
        for name in ("cpuset.cpus", "cpuset.mems"):  # version 1 starts with none, and then nothing may run there
            if (folder / name).exists() and (hierarchy / name).exists():
                (folder / name).write_text((hierarchy / name).read_text())


def processes_of(node: Node) -> list[Process]:
    """Return every process that lives in the node: in its mount namespace (shims) or under its cgroup (containers)."""
    pids: set[int] = set()
    for hierarchy in hierarchies():
        for folder, _, _ in os.walk(hierarchy / node.name):
            with contextlib.suppress(OSError):  # a container's cgroup that vanished meanwhile
                pids.update(int(line) for line in (Path(folder) / "cgroup.procs").read_text().split())
    if str(node.mount_namespace) in mounts():
        inside = node.mount_namespace.stat().st_ino
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):  # a process that ended meanwhile
                if (entry / "ns/mnt").stat().st_ino == inside:
                    pids.add(int(entry.name))
    return [process for pid in sorted(pids) if (process := Process.of(pid)) is not None]


def remove_cgroups() -> None:
    """Remove the nodes' cgroups, from the leaves up; the kernel may need a moment after the last process."""
    end = time.monotonic() + STOP_DEADLINE
    for hierarchy in hierarchies():
        for node in NODES:
            while (hierarchy / node.name).is_dir():
                for folder, _, _ in os.walk(hierarchy / node.name, topdown=False):
                    with contextlib.suppress(OSError):  # still busy: the next turn tries again
                        os.rmdir(folder)
                if time.monotonic() > end:
                    raise ClusterError(f"the cgroup {hierarchy / node.name} cannot be removed; something runs in it")
                if (hierarchy / node.name).is_dir():
                    time.sleep(POLL)


def hierarchies(kinds: tuple[str, ...] = ("cgroup", "cgroup2")) -> list[Path]:
    """Return the roots of the cgroup hierarchies of these kinds."""
    lines = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
    return sorted({Path(fields[1]) for fields in lines if fields[2] in kinds})


def _sysctl(name: str) -> Path:
    return Path("/proc/sys") / name
