"""The last failure of a job as text, for `describe` and the end of `submit`."""

from __future__ import annotations

from resile.cli.output.follow import clock
from resile.client.base import Failure, ProcessFailure


def failure_title(failure: Failure | None) -> str:
    return f" (first of round {failure.round})" if isinstance(failure, ProcessFailure) else ""


def failure_lines(failure: Failure | None) -> list[str]:
    """A failure as lines: a sentence, then the traceback and the last log lines if they are known. [] for None."""
    if failure is None:
        return []
    if isinstance(failure, ProcessFailure):
        said = failure.failure
        parts = [text.rstrip() for text in (said.traceback, said.log_tail) if text.strip()]
        return [f"on {failure.node} at {clock(said.at)}: {said}", *"\n".join(parts).splitlines()]
    if failure.log is None:
        return [failure.sentence]
    return [failure.sentence, *(["the last lines of its log:", *failure.log] if failure.log else ["its log is empty"])]
