"""Writes files so that no reader ever sees half of one."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def new_file(path: Path, mode: int = 0o666) -> Iterator[int]:
    """Open a new file for writing. It appears at `path`, in place of an old one, only when it is completely on disk.

    Until then its name has a random part, so no other writer uses it, not even a process with the same pid.
    """
    draft = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    descriptor = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_TRUNC, mode)
    try:
        yield descriptor
        os.fsync(descriptor)
        os.replace(draft, path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
    finally:
        os.close(descriptor)


def write_atomically(path: Path, data: bytes, mode: int = 0o644) -> None:
    """Replace the contents of a file. Readers see all of the old or all of the new, even after a power cut."""
    with new_file(path, mode) as descriptor, open(descriptor, "wb", closefd=False) as file:
        file.write(data)
