"""A command whose reader goes away, as in `resile --help | head -1`, ends without a traceback."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator

from resile.cli.exit_codes import FAILED


@contextlib.contextmanager
def quiet_if_reader_leaves() -> Iterator[None]:
    """Flush standard output on the way out; where the pipe is closed, end the process with exit code 1 instead."""
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the interpreter complains at its end
        sys.exit(FAILED)
