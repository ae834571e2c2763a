"""What storage refuses is of two kinds: what may pass (a full disk, a mount that is away), and what does not heal.

The second kind (a read-only file system, a file in place of the directory) is not tried again: it is said once, when
training begins if it is found then. Missing rights are of the second kind when training begins, and later of the first:
credentials expire and are renewed.
"""

from __future__ import annotations

import errno
import socket

LASTING = frozenset(
    {
        errno.EROFS,
        errno.ENOTDIR,
        errno.EEXIST,
        errno.ELOOP,
        errno.ENAMETOOLONG,
    }
)
"""Errors that do not heal by waiting."""


class StorageError(Exception):
    """A checkpoint did not come to storage; the text is one sentence."""


class NotWritable(StorageError):
    """Nor will any other: waiting does not mend it. The sentence is the same for every step."""


class NotReadable(Exception):
    """Storage does not answer as it should (a mount that is away, an I/O error, refused credentials); one sentence.

    What it holds may be sound all the same: unlike what is damaged (`IncompleteBuffer`), it is left as it is.
    """


class NeverReadable(NotReadable):
    """Nor will it: waiting does not mend it."""


def is_lasting(error: Exception) -> bool:
    """Whether waiting does not mend it. Libraries of object stores may give such errors no number."""
    return isinstance(error, OSError) and (
        error.errno in LASTING or isinstance(error, NotADirectoryError | FileExistsError)
    )


def is_hopeless(error: Exception) -> bool:
    """Whether no training should begin that relies on it."""
    return is_lasting(error) or isinstance(error, PermissionError)


def not_stored(error: Exception, step: int, place: str) -> StorageError:
    """What an error means for a step that was to be stored."""
    if is_lasting(error):
        return unwritable(error, place)
    return StorageError(f"step {step} was not stored in {place}: {reason(error)}")


def unwritable(error: Exception, place: str) -> NotWritable:
    """What an error means that stays."""
    taken = isinstance(error, FileExistsError)
    return NotWritable(f"checkpoints cannot be stored in {place}: {'it is no directory' if taken else reason(error)}")


def not_read(error: Exception, what: str) -> NotReadable:
    """What an error means for what was to be read."""
    kind = NeverReadable if is_lasting(error) else NotReadable
    return kind(f"{what} cannot be read: {reason(error)}")


def reason(error: Exception) -> str:
    """An error in the system's words."""
    return (error.strerror if isinstance(error, OSError) else "") or str(error)


def probe_name() -> str:
    """Of a file by which a machine finds out whether it can write: as many of them as machines, should one be left."""
    return f".probe-{socket.gethostname()}"
