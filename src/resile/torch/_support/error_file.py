"""Why a process ends, for its agent: what torch's `@record` leaves there, also of scripts that are not decorated."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from torch.distributed.elastic.multiprocessing.errors import get_error_handler

ERROR_FILE = "TORCHELASTIC_ERROR_FILE"


@contextlib.contextmanager
def recorded_in_error_file(*kinds: type[Exception]) -> Iterator[None]:
    """Around what may raise a sentence that should be the job's reason to fail, if the script lets it end this process.

    If it does not, and the process ends badly later without leaving other words, these are shown: scripts that catch
    such an error and go on are thought to be rarer than those that do not know of `@record`.
    """
    try:
        yield
    except kinds as error:
        if os.environ.get(ERROR_FILE):
            with contextlib.suppress(OSError):
                get_error_handler().record_exception(error)
        raise
