"""Errors of storage. Some may pass, others last.

A full disk or an unreachable mount may pass, so the write is tried again. A read-only file system or a file in place of
the directory lasts: it is reported once, if possible before training begins, and not tried again. Missing permissions
last when training begins. Later they may pass, because credentials expire and are renewed.
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
"""Errors that waiting does not cure."""


class StorageError(Exception):
    """A checkpoint was not stored; the text is one sentence."""


class NotWritable(StorageError):
    """No checkpoint can be stored, and waiting does not cure that. The sentence is the same for every step."""


class NotReadable(Exception):
    """Storage does not answer properly (missing mount, I/O error, refused credentials); the text is one sentence.

    The checkpoint there may be sound, so it stays as it is, unlike a damaged one (`IncompleteBuffer`).
    """


class NeverReadable(NotReadable):
    """Storage cannot be read, and waiting does not cure that."""


def is_lasting(error: Exception) -> bool:
    """True if waiting does not cure the error. Libraries of object stores may give such errors no number."""
    return isinstance(error, OSError) and (
        error.errno in LASTING or isinstance(error, NotADirectoryError | FileExistsError)
    )


def is_hopeless(error: Exception) -> bool:
    """True if training that relies on this storage should not begin."""
    return is_lasting(error) or isinstance(error, PermissionError)


def not_stored(error: Exception, step: int, place: str) -> StorageError:
    """The error to raise for a step that could not be stored."""
    if is_lasting(error):
        return unwritable(error, place)
    return StorageError(f"step {step} was not stored in {place}: {reason(error)}")


def unwritable(error: Exception, place: str) -> NotWritable:
    """The error to raise for storage that stays unwritable."""
    taken = isinstance(error, FileExistsError)
    return NotWritable(f"checkpoints cannot be stored in {place}: {'it is no directory' if taken else reason(error)}")


def not_read(error: Exception, what: str) -> NotReadable:
    """The error to raise for something that could not be read."""
    kind = NeverReadable if is_lasting(error) else NotReadable
    return kind(f"{what} cannot be read: {reason(error)}")


def reason(error: Exception) -> str:
    """The operating system's words for an error."""
    return (error.strerror if isinstance(error, OSError) else "") or str(error)


def probe_name() -> str:
    """Name of the file that tests for writability. One per machine, so that a file left behind disturbs no other."""
    return f".probe-{socket.gethostname()}"
