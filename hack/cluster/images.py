"""Images without a registry: a few kilobytes in the docker-archive format, imported on every node under any name.

The layer holds empty folders, a password file and busybox; everything else comes from the host at run time (see
`nodes.py`). So any name is the same image, and what it runs is the checkout as it is now: containers start in it, as
those of an image with the project's examples would, and /data is its folder of generated data.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import subprocess
import tarfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from console import ClusterError, run
from settings import (
    BUSYBOX_IMAGE,
    CHECKOUT,
    EXAMPLE_IMAGES,
    NODES,
    PAUSE_IMAGE,
    RESILE_IMAGE,
    RESILE_USER,
    STATE,
    VENV,
    Node,
)

FOLDER = STATE / "images"
NAME = re.compile(r"([\w.-]+(:\d+)?/)?[a-z\d]+([._/-]+[a-z\d]+)*(:\w[\w.-]{0,127})?", re.ASCII)
BUSYBOX = "/busybox"
LINKED = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")
USERS = {"root": (0, "/root"), "resile": (RESILE_USER, "/tmp"), "nobody": (65534, "/")}
PASSWD = "".join(f"{name}:x:{uid}:{uid}::{home}:/bin/sh\n" for name, (uid, home) in USERS.items())
GROUP = "".join(f"{name}:x:{uid}:\n" for name, (uid, _) in USERS.items())
NSSWITCH = "passwd: files\ngroup: files\nhosts: files dns\n"


@dataclass(frozen=True)
class Image:
    """One image: its name and what its containers do unless their pod says otherwise."""

    name: str
    command: tuple[str, ...] = ("sh",)
    user: str = ""


DEFAULTS = (
    Image(PAUSE_IMAGE, (f"{BUSYBOX}/busybox", "sleep", "infinity")),
    Image(BUSYBOX_IMAGE),
    Image(RESILE_IMAGE, ("resile", "--help"), f"{RESILE_USER}:{RESILE_USER}"),
    *(Image(name) for name in EXAMPLE_IMAGES),
)


def import_images(images: Sequence[Image], only_changed: bool = False) -> int:
    """Import images on all nodes and return how many imports that took.

    Args:
        images: what to import; an image of the same name is replaced.
        only_changed: leave a node alone that already has this very image. (Which checkout it runs is a part of it.)
    """
    FOLDER.mkdir(parents=True, exist_ok=True)
    archives = {image: _archive(image) for image in images}
    same = {image for image, (scratch, target) in archives.items() if _equal(scratch, target)}

    def on_node(node: Node) -> int:
        present = _names(node) if only_changed else set()
        wanted = [image for image in images if image not in same or _tagged(image.name) not in present]
        for image in wanted:
            run(["ctr", "-a", node.containerd_socket, "-n", "k8s.io", "images", "import", archives[image][0]])
        return len(wanted)

    with ThreadPoolExecutor(len(NODES)) as pool:
        imports = sum(pool.map(on_node, NODES))
    for scratch, target in archives.values():  # only now: an interrupted import is no reason to trust the next
        scratch.rename(target)
    return imports


def _equal(one: Path, other: Path) -> bool:
    return other.exists() and one.read_bytes() == other.read_bytes()


def _tagged(name: str) -> str:
    """Return a name with its tag, and say in one sentence what is wrong with one that cannot be an image's."""
    if not NAME.fullmatch(name):
        raise ClusterError(f"{name!r} is not the name of an image: NAME or NAME:TAG, the name in lower case")
    return name if ":" in name.rpartition("/")[2] else f"{name}:latest"


def _names(node: Node) -> set[str]:
    """Return the names of a node's images, as given and as completed by the runtime."""
    listed = run(["ctr", "-a", node.containerd_socket, "-n", "k8s.io", "images", "ls", "-q"]).split()
    return {"/".join(name.split("/")[start:]) for name in listed for start in range(3)}


def _archive(image: Image) -> tuple[Path, Path]:
    """Write the image's archive; return where it is, and where it belongs once every node has it.

    The same image gives the same bytes.
    """
    layer = _layer()
    path = [str(VENV / "bin"), "/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin", BUSYBOX]
    config = json.dumps(
        {
            "architecture": os.uname().machine.replace("x86_64", "amd64").replace("aarch64", "arm64"),
            "os": "linux",
            "config": {
                "Env": [f"PATH={':'.join(path)}"],
                "Cmd": list(image.command),
                "User": image.user,
                "WorkingDir": str(CHECKOUT),
            },
            "rootfs": {"type": "layers", "diff_ids": [f"sha256:{hashlib.sha256(layer).hexdigest()}"]},
        }
    ).encode()
    config_name = f"{hashlib.sha256(config).hexdigest()}.json"
    manifest = [{"Config": config_name, "RepoTags": [_tagged(image.name)], "Layers": ["layer.tar"]}]
    target = FOLDER / f"{_tagged(image.name).replace('/', '_').replace(':', '_')}.tar"
    scratch = target.with_suffix(".part")
    with tarfile.open(scratch, "w") as archive:
        for name, data in (
            ("layer.tar", layer),
            (config_name, config),
            ("manifest.json", json.dumps(manifest).encode()),
        ):
            _add(archive, name, data)
    return scratch, target


def _layer() -> bytes:
    """Return the one layer: folders, links as the host has them, busybox under a folder of its own."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as layer:
        for folder, mode in (("usr", 0o755), ("etc", 0o755), ("root", 0o755), ("var", 0o755), ("tmp", 0o1777)):
            _add_folder(layer, folder, mode)
        _add_folder(layer, "var/tmp", 0o1777)
        for name in LINKED:
            if (Path("/") / name).is_symlink():
                _add_link(layer, name, os.readlink(Path("/") / name))
        _add_link(layer, "data", str(CHECKOUT / ".cache"))
        _add(layer, "etc/passwd", PASSWD.encode())
        _add(layer, "etc/group", GROUP.encode())
        _add(layer, "etc/nsswitch.conf", NSSWITCH.encode())
        _add_folder(layer, BUSYBOX[1:], 0o755)
        program = Path(run(["sh", "-c", "command -v busybox"]).strip())
        _add(layer, f"{BUSYBOX[1:]}/busybox", program.read_bytes(), 0o755)
        applets = subprocess.run([program, "--list"], capture_output=True, text=True, check=True, timeout=10)
        for name in applets.stdout.split():
            if name != "busybox":
                _add_link(layer, f"{BUSYBOX[1:]}/{name}", "busybox")
    return buffer.getvalue()


def _add(archive: tarfile.TarFile, name: str, data: bytes, mode: int = 0o644) -> None:
    entry = tarfile.TarInfo(name)
    entry.size, entry.mode = len(data), mode
    archive.addfile(entry, io.BytesIO(data))


def _add_folder(archive: tarfile.TarFile, name: str, mode: int) -> None:
    entry = tarfile.TarInfo(name)
    entry.type, entry.mode = tarfile.DIRTYPE, mode
    archive.addfile(entry)


def _add_link(archive: tarfile.TarFile, name: str, target: str) -> None:
    entry = tarfile.TarInfo(name)
    entry.type, entry.linkname, entry.mode = tarfile.SYMTYPE, target, 0o777
    archive.addfile(entry)
