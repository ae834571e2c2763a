"""The last failure of a job as text, for `describe` and the end of `submit`."""

from __future__ import annotations

from resile.cli.output.follow import clock
from resile.client.base import Failure, ProcessFailure


def failure_title(failure: Failure | None) -> str:
    """The words in a title after `last failure`: the round that the failed process broke; empty if a node failed."""
    return f" (first of round {failure.round})" if isinstance(failure, ProcessFailure) else ""


def failure_lines(failure: Failure | None) -> list[str]:
    """The lines that tell of a failure: a sentence, a process's traceback, the last log lines. None gives no lines."""
    if failure is None:
        return []
    if isinstance(failure, ProcessFailure):
        said = failure.failure
        parts = [text.rstrip() for text in (said.traceback, said.log_tail) if text.strip()]
        return [f"on {failure.node} at {clock(said.at)}: {said}", *"\n".join(parts).splitlines()]
    if failure.log is None:
        return [failure.sentence]
    return [failure.sentence, *(["the last lines of its log:", *failure.log] if failure.log else ["its log is empty"])]
