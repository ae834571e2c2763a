"""Removes directories that killed agents and ended runs left on this machine, with their sockets, logs and journals.

An agent removes its own directory when it ends, and the directory of a run of one node. A killed agent cannot. So each
agent holds locks while it lives, and later agents look for directories whose locks are free. The first agent that finds
such a directory marks it. The directory stays for an hour, for a person who wants to know what happened and for
processes that are just ending, and is removed then. A lock is free for an instant while an agent starts; the mark also
keeps the directory of that agent safe.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

PREFIX = "resile-"
LOCK = "agent.lock"
"""The lock file in an agent's directory. A directory with the same prefix and no such file is never removed."""
KEPT_SECONDS = 3600.0
"""How long a directory stays after an agent found its locks free."""
HOLD_SECONDS = 2.0
"""How long an agent that starts waits for the lock of its new directory, which another agent may just be marking."""
HOLD_RETRY_SECONDS = 0.01
_MARK = b"no process held this when another one looked; it will be removed\n"


def hold(directory: Path) -> int:
    """Lock an agent's directory. The lock is released when the returned descriptor is closed.

    Raises OSError if another process does not release the lock within HOLD_SECONDS.
    """
    descriptor = os.open(directory / LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    until = time.monotonic() + HOLD_SECONDS
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(descriptor, 0)  # removes the mark of an agent that held the lock just now
            return descriptor
        except BlockingIOError:
            if time.monotonic() > until:
                os.close(descriptor)
                raise
        time.sleep(HOLD_RETRY_SECONDS)


def sweep_agents(home: Path, kept: float = KEPT_SECONDS) -> None:
    """Mark directories in `home` that this user's killed agents left. Remove those whose mark is `kept` seconds old."""
    with contextlib.suppress(OSError):
        for entry in list(os.scandir(home)):
            directory = Path(entry.path)
            with contextlib.suppress(OSError):
                if (
                    entry.name.startswith(PREFIX)
                    and entry.is_dir(follow_symlinks=False)
                    and entry.stat(follow_symlinks=False).st_uid == os.geteuid()
                ):
                    _sweep([directory / LOCK], kept, _remove_agent, directory)


def sweep_runs(runs: Path, kept: float = KEPT_SECONDS) -> None:
    """Mark directories of runs that have no agent and no supervisor. Remove those whose mark is `kept` seconds old."""
    for launch in runs.glob("*.launch"):
        present = launch.with_suffix(".present")
        with contextlib.suppress(OSError):
            present.touch(mode=0o600)
            _sweep([launch, present], kept, _remove_run, launch)


def _sweep(locks: Sequence[Path], kept: float, remove: Callable[[Path], None], path: Path) -> None:
    """Mark the file `locks[0]` if it has no mark. If its mark is at least `kept` seconds old, call `remove(path)`.

    Raises OSError if another process has locked one of the files `locks`.
    """
    with contextlib.ExitStack() as held:
        descriptors = [held.enter_context(locked(lock)) for lock in locks]
        mark = os.fstat(descriptors[0])
        if not mark.st_size:
            os.write(descriptors[0], _MARK)
        elif mark.st_mtime <= time.time() - kept:
            remove(path)


@contextlib.contextmanager
def locked(path: Path, flags: int = 0) -> Iterator[int]:
    """Lock the file `path`, and yield its descriptor. `flags` are for `os.open`.

    Raises BlockingIOError if another process has locked the file, and FileNotFoundError if it was just removed.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | flags, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not os.path.samestat(os.fstat(descriptor), path.stat()):  # the lock of a removed file keeps no process out
            raise FileNotFoundError(path)
        yield descriptor
    finally:
        os.close(descriptor)


def _remove_run(launch: Path) -> None:
    shutil.rmtree(launch.with_suffix(""), ignore_errors=True)
    launch.with_suffix(".present").unlink()
    launch.unlink()


def _remove_agent(directory: Path) -> None:
    for inside in list(os.scandir(directory)):  # the lock goes last: a later sweep finds the rest by it
        if inside.is_dir(follow_symlinks=False):
            shutil.rmtree(inside.path, ignore_errors=True)
        elif inside.name != LOCK:
            os.unlink(inside.path)
    (directory / LOCK).unlink()
    directory.rmdir()
