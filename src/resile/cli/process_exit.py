"""How a command ends: its exit codes, and no traceback if its output is a pipe that is closed early.

A failed job and a request that cannot be carried out both give 1.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator

FAILED = 1
BAD_USAGE = 2
INTERRUPTED = 130
SIGNALLED = 128
"""Added to the number of the signal that ended a command."""


@contextlib.contextmanager
def quiet_if_reader_leaves() -> Iterator[None]:
    """Flush standard output at the end of the context.

    If standard output is a pipe and its reader has closed it, as in `resile --help | head -1`, end the process quietly
    with exit code 1.
    """
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        # The interpreter flushes standard output at its end, and would print an error.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(FAILED)
