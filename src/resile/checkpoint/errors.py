"""Errors of storage. Some may pass, others last.

A full disk or an unreachable mount may pass, so the write is tried again. A read-only file system or a file in place of
the directory lasts: it is reported once, if possible before training begins, and not tried again. Missing permissions
last when training begins. Later they may pass, because credentials expire and are renewed.
"""

from __future__ import annotations

import errno
import socket

LASTING = frozenset({errno.EROFS, errno.ENOTDIR, errno.EEXIST, errno.ELOOP, errno.ENAMETOOLONG})


class StorageError(Exception):
    """Raised if a checkpoint was not stored. The message is one sentence."""


class NotWritable(StorageError):
    """Raised if no checkpoint can be stored, and waiting does not cure that. The message does not name a step."""


class NotReadable(Exception):
    """Raised if storage cannot be read (missing mount, I/O error, refused credentials). The message is one sentence.

    The checkpoint itself may be sound, so it is left in place. For a damaged one, `IncompleteBuffer` is raised instead.
    """


class NeverReadable(NotReadable):
    """Raised if storage cannot be read, and waiting does not cure that."""


def is_lasting(error: Exception) -> bool:
    """True if waiting does not cure the error.

    Checks the class of the error as well as its errno, because libraries of object stores set no errno.
    """
    return isinstance(error, OSError) and (
        error.errno in LASTING or isinstance(error, NotADirectoryError | FileExistsError)
    )


def is_hopeless(error: Exception) -> bool:
    """True if `error` is lasting or says that permissions are missing. Training should not begin with such storage."""
    return is_lasting(error) or isinstance(error, PermissionError)


def not_stored(error: Exception, step: int, place: str) -> StorageError:
    if is_lasting(error):
        return unwritable(error, place)
    return StorageError(f"step {step} was not stored in {place}: {reason(error)}")


def unwritable(error: Exception, place: str) -> NotWritable:
    taken = isinstance(error, FileExistsError)
    return NotWritable(f"checkpoints cannot be stored in {place}: {'it is no directory' if taken else reason(error)}")


def not_read(error: Exception, what: str) -> NotReadable:
    kind = NeverReadable if is_lasting(error) else NotReadable
    return kind(f"{what} cannot be read: {reason(error)}")


def reason(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else "") or str(error)


def probe_name() -> str:
    """The name of the file that tests whether storage is writable. The host name in it keeps machines apart."""
    return f".probe-{socket.gethostname()}"
