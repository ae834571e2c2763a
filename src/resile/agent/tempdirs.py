"""The directories for temporary files of agents on this machine: sockets, logs, the journal of a run of one node.

An agent removes its own when it ends. One that was killed cannot, so every agent holds a lock in its directory, and
later ones look for directories whose lock nobody holds. The first to find one marks it, and it stays for a while, for
whoever wants to know what happened and for processes that are just ending; then it is removed.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import time
from pathlib import Path

PREFIX = "resile-"
LOCK = "agent.lock"
"""What tells an agent's directory from others of that name."""
KEPT_SECONDS = 3600.0
"""How long a directory stays after it was found without its agent."""


def hold(directory: Path) -> int:
    """This process's directory, as long as the descriptor is open.

    Raises:
        OSError: nothing can be written there.
    """
    descriptor = os.open(directory / LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return descriptor


def sweep(home: Path, kept: float = KEPT_SECONDS) -> None:
    """Mark the directories that nobody holds, and remove those that were marked `kept` seconds ago; only our own."""
    with contextlib.suppress(OSError):
        for entry in list(os.scandir(home)):
            with contextlib.suppress(OSError):  # it is held, or another one's, or just being removed
                if entry.name.startswith(PREFIX) and entry.stat(follow_symlinks=False).st_uid == os.geteuid():
                    _sweep_one(Path(entry.path), kept)


def _sweep_one(directory: Path, kept: float) -> None:
    lock = directory / LOCK
    if directory.is_symlink():
        return
    descriptor = os.open(lock, os.O_RDWR | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        found = os.fstat(descriptor)
        if not found.st_size:
            os.write(descriptor, b"nobody held this when another agent looked; it will be removed\n")
        elif found.st_mtime <= time.time() - kept:
            for inside in list(os.scandir(directory)):  # the lock last: what is left of it is found again
                if inside.is_dir(follow_symlinks=False):
                    shutil.rmtree(inside.path, ignore_errors=True)
                elif inside.name != LOCK:
                    os.unlink(inside.path)
            lock.unlink()
            directory.rmdir()
    finally:
        os.close(descriptor)
