"""Tells the agent, and the user, in one sentence why this process ends.

torch's `@record` leaves an error file for the agent; here the same is written for scripts that are not decorated. The
file and what the interpreter prints begin at the script's own line: what lies below it is resile's and torch's, says
nothing to the user, and would be printed by every rank.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
import traceback
from collections.abc import Iterable, Iterator
from pathlib import Path

ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
_RESILE, _STDLIB = str(Path(__file__).parents[2]), os.path.dirname(os.__file__)
_LOSSES = ("Connection closed by peer", "Connection reset by peer", "Broken pipe")
"""How gloo says that a rank is gone."""


@contextlib.contextmanager
def recorded_in_error_file(*kinds: type[Exception], permanent: bool = False) -> Iterator[None]:
    """Make an error of these kinds the job's reason to fail, if the script lets it end this process.

    If the script catches the error, and the process ends badly later without another one, this one is shown all the
    same: such scripts are thought to be rarer than those that do not know of `@record`.

    Args:
        kinds: their text is one sentence that says all.
        permanent: another try would fail in the same way, so the job ends at once, whatever restarts are left.
    """
    try:
        yield
    except kinds as error:
        print_briefly(error)
        if path := os.environ.get(ERROR_FILE):
            with contextlib.suppress(OSError):
                Path(path).write_text(_record(error, permanent))
        raise


def print_briefly(error: BaseException) -> None:
    """Have the interpreter print the script's own lines alone, should this error end it."""
    previous = sys.excepthook

    def hook(kind: type[BaseException], raised: BaseException, trace: object) -> None:
        if raised is error:
            sys.stderr.write(_brief(raised, traceback.extract_tb(raised.__traceback__)))
        else:
            previous(kind, raised, trace)  # type: ignore[arg-type]

    sys.excepthook = hook


def is_peer_loss(error: BaseException) -> bool:
    """Whether gloo raised this error because a rank is gone."""
    return isinstance(error, RuntimeError) and any(loss in str(error) for loss in _LOSSES)


def in_brief(error: BaseException) -> str:
    """The first sentence of an error, without the line of gloo's source that it comes from."""
    line = str(error).strip().partition("\n")[0]
    if line.startswith("[/"):
        line = line.partition("] ")[2]
    return line.partition(". This is typically")[0] or type(error).__name__


def _record(error: Exception, permanent: bool) -> str:
    """What `@record` writes. The call stack is that of the script, which has not seen the error yet."""
    outside = traceback.extract_stack(error.__traceback__.tb_frame if error.__traceback__ else None)
    extra = {"py_callstack": _brief(error, outside), "timestamp": str(int(time.time())), "permanent": permanent}
    return json.dumps({"message": {"message": f"{type(error).__name__}: {error}", "extraInfo": extra}})


def _brief(error: BaseException, frames: Iterable[traceback.FrameSummary]) -> str:
    """A traceback without the frames of resile and of installed packages."""
    own = [frame for frame in frames if not _is_library(frame.filename)]
    text = in_brief(error) if is_peer_loss(error) else str(error)
    lines = traceback.format_list(own)
    return "".join(["Traceback (most recent call last):\n", *lines, f"{type(error).__name__}: {text}\n"])


def _is_library(path: str) -> bool:
    return path.startswith((_RESILE, _STDLIB, "<frozen")) or "-packages" in path
