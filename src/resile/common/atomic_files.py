"""Writes files so that no reader ever sees half of one."""

from __future__ import annotations

import os
import secrets
from pathlib import Path


def draft_of(path: Path) -> Path:
    """Return a path in the folder of `path`, to which a new version of the file can be written.

    The name has a random part, so no other writer uses the same path, not even a process with the same pid.
    """
    return path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")


def write_atomically(path: Path, data: bytes, mode: int = 0o644) -> None:
    """Replace the contents of a file. Readers see all of the old or all of the new, even after a power cut."""
    draft = draft_of(path)
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
    try:
        with open(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
