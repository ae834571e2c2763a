"""What killed agents and ended runs left on this machine: directories with sockets, logs and journals.

An agent removes its own directory when it ends, and a run of one node the run's. Those that were killed cannot, so each
holds locks as long as it lives, and later ones look for directories whose locks are free. The first to find one marks
it, and it stays for an hour, for a person who wants to know what happened and for processes that are just ending; then
it is removed. A lock is free for an instant while a process starts, so the mark also keeps a newcomer safe.
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
"""What tells an agent's directory from others of that name."""
KEPT_SECONDS = 3600.0
"""How long a directory stays after it was found without a process that holds it."""
_MARK = b"no process held this when another one looked; it will be removed\n"


def hold(directory: Path) -> int:
    """Keep this agent's directory from being removed, as long as the descriptor is open.

    Raises:
        OSError: nothing can be written there.
    """
    descriptor = os.open(directory / LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return descriptor


def is_file_at(descriptor: int, path: Path) -> bool:
    """Whether an open file is still the one of this name: the lock on one that was removed keeps no process out."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False


def sweep_agents(home: Path, kept: float = KEPT_SECONDS) -> None:
    """Remove directories of this user's agents, `kept` seconds after they were first found without their agent."""
    with contextlib.suppress(OSError):
        for entry in list(os.scandir(home)):
            directory = Path(entry.path)
            with contextlib.suppress(OSError):
                if (
                    entry.name.startswith(PREFIX)
                    and entry.is_dir(follow_symlinks=False)
                    and entry.stat(follow_symlinks=False).st_uid == os.geteuid()
                ):
                    _sweep([directory / LOCK], kept, lambda: _remove_agent(directory))  # noqa: B023 - called at once


def sweep_runs(runs: Path, kept: float = KEPT_SECONDS) -> None:
    """Remove what runs left, `kept` seconds after they were first found without an agent and a supervisor."""
    for launch in runs.glob("*.launch"):
        present = launch.with_suffix(".present")

        def remove() -> None:
            shutil.rmtree(launch.with_suffix(""), ignore_errors=True)  # noqa: B023 - called at once
            present.unlink()  # noqa: B023
            launch.unlink()  # noqa: B023

        with contextlib.suppress(OSError):
            present.touch(mode=0o600)
            _sweep([launch, present], kept, remove)


def _sweep(locks: Sequence[Path], kept: float, remove: Callable[[], None]) -> None:
    """Mark the first lock, or remove what was marked `kept` seconds ago.

    Raises:
        OSError: a process holds one of the locks, or removes the same just now.
    """
    with contextlib.ExitStack() as held:
        descriptors = [held.enter_context(_locked(lock)) for lock in locks]
        mark = os.fstat(descriptors[0])
        if not mark.st_size:
            os.write(descriptors[0], _MARK)
        elif mark.st_mtime <= time.time() - kept:
            remove()


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[int]:
    descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not is_file_at(descriptor, path):
            raise FileNotFoundError(path)
        yield descriptor
    finally:
        os.close(descriptor)


def _remove_agent(directory: Path) -> None:
    for inside in list(os.scandir(directory)):  # the lock last: what is left of it is found again
        if inside.is_dir(follow_symlinks=False):
            shutil.rmtree(inside.path, ignore_errors=True)
        elif inside.name != LOCK:
            os.unlink(inside.path)
    (directory / LOCK).unlink()
    directory.rmdir()
