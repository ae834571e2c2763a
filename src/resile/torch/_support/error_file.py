"""Tells the agent and the user in one sentence why this process ends.

Torch's `@record` writes an error file for the agent. This module writes the same file for scripts without that
decorator. The traceback in the file, and the one that the interpreter prints, have only the script's own lines. The
frames of resile and torch do not help the user, and every rank would print them.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
import time
import traceback
from collections.abc import Iterable, Iterator
from pathlib import Path

ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
_RESILE, _STDLIB = str(Path(__file__).parents[2]), os.path.dirname(os.__file__)
_LOSSES = ("Connection closed by peer", "Connection reset by peer", "Broken pipe")
"""Gloo's messages when a rank is gone."""
_SOURCE = re.compile(r"\[/\S+:\d+\] ")
"""The file and line of gloo's C++ source, with which its messages begin."""


@contextlib.contextmanager
def recorded_in_error_file(*kinds: type[Exception], permanent: bool = False) -> Iterator[None]:
    """If an error of these kinds leaves this context and ends this process, write it to the error file.

    The job then reports this error as its reason to fail. Only the interpreter's excepthook writes the file. An error
    that the script catches is not written, because the process may be killed hours later for another reason.

    Args:
        kinds: errors whose text is one complete sentence.
        permanent: True if another try would fail in the same way. The job then ends at once, whatever restarts are
            left.
    """
    try:
        yield
    except kinds as error:
        print_briefly(error, _record(error, permanent))
        raise


def print_briefly(error: BaseException, record: str = "") -> None:
    """If `error` ends the interpreter, print it with only the script's own lines. This sets an excepthook.

    The hook also writes `record` to the error file, unless `record` is empty. Other errors are printed as before.
    """
    previous = sys.excepthook

    def hook(kind: type[BaseException], raised: BaseException, trace: object) -> None:
        if raised is not error:
            previous(kind, raised, trace)  # type: ignore[arg-type]
            return
        if record and (path := os.environ.get(ERROR_FILE)):
            with contextlib.suppress(OSError):
                Path(path).write_text(record)
        sys.stderr.write(_brief(raised, traceback.extract_tb(raised.__traceback__)))

    sys.excepthook = hook


def is_peer_loss(error: BaseException) -> bool:
    return isinstance(error, RuntimeError) and any(loss in str(error) for loss in _LOSSES)


def in_brief(error: BaseException) -> str:
    """The first line of an error for a log, without gloo's source locations. An error without text gives its type."""
    line = _SOURCE.sub("", str(error).strip().partition("\n")[0])
    return line.partition(". This is typically")[0] or type(error).__name__


def _record(error: Exception, permanent: bool) -> str:
    """The contents of the error file, in the format of torch's `@record`, with the script's current call stack."""
    outside = traceback.extract_stack(error.__traceback__.tb_frame if error.__traceback__ else None)
    extra = {"py_callstack": _brief(error, outside), "timestamp": str(int(time.time())), "permanent": permanent}
    return json.dumps({"message": {"message": f"{type(error).__name__}: {error}", "extraInfo": extra}})


def _brief(error: BaseException, frames: Iterable[traceback.FrameSummary]) -> str:
    own = [frame for frame in frames if not _is_library(frame.filename)]
    text = in_brief(error) if is_peer_loss(error) else str(error)
    lines = traceback.format_list(own)
    return "".join(["Traceback (most recent call last):\n", *lines, f"{type(error).__name__}: {text}\n"])


def _is_library(path: str) -> bool:
    return path.startswith((_RESILE, _STDLIB, "<frozen")) or "-packages" in path
