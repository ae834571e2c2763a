"""Ends a command without a traceback if its output is a pipe that is closed early, as in `resile --help | head -1`."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator

from resile.cli.exit_codes import FAILED


@contextlib.contextmanager
def quiet_if_reader_leaves() -> Iterator[None]:
    """Flush standard output at the end of the context.

    If standard output is a pipe and its reader has closed it, end the process quietly with exit code 1.
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
