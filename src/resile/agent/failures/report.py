"""The report at the end of a failed run: which rank failed first, why, and which ranks followed.

It is written for a person who reads nothing else: the first line names the cause, the rest is evidence. It fits on one
screen, whatever the process printed.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import textwrap
from collections.abc import Sequence
from datetime import datetime

from resile.agent.failures.evidence import find_traceback, head, in_order, without_rank
from resile.protocol.reports import WorkerFailure, signal_name

WIDTH = 100
NARROWEST = 60
SHOWN_FRAMES = 16
SHOWN_LOG_LINES = 10
SHOWN_OTHERS = 8

_INDENT = "    "
_HINTS: dict[int, str] = {
    signal.SIGKILL: "killed from outside; if no person did it, the kernel may have, for want of memory (see dmesg)",
    signal.SIGSEGV: "native code touched memory that is not its own",
    signal.SIGABRT: "native code gave up: a failed assertion, or NCCL's watchdog after a time-out",
    signal.SIGBUS: "often /dev/shm is full; data loaders need more shared memory",
    signal.SIGFPE: "native code divided by zero",
    signal.SIGILL: "native code was built for another CPU",
    signal.SIGTERM: "asked to end from outside",
    signal.SIGINT: "interrupted from the keyboard",
    signal.SIGHUP: "its terminal went away",
}
_SHELL_SIGNALS = 128
_NOT_STARTED = (126, 127)
"""A shell's exit codes for a program that cannot be run or does not exist."""
_PYTHON_CANNOT_START = re.compile(
    r"^\S*python\S*: (can't open file|No module named|Error while finding module) ?.*", re.M
)


def terminal_width() -> int:
    try:
        columns = int(os.environ.get("COLUMNS", "")) or WIDTH
    except ValueError:
        try:
            columns = os.get_terminal_size(sys.__stderr__.fileno() if sys.__stderr__ else 2).columns
        except (OSError, ValueError):
            columns = WIDTH
    return max(NARROWEST, min(columns, WIDTH))


def report(
    failure: WorkerFailure,
    *,
    node: str,
    others: Sequence[WorkerFailure] = (),
    log_file: str = "",
    width: int = WIDTH,
) -> str:
    """Format a report for people about `failure`, the first failure of a run. Returns it without a final newline.

    `node` is where `failure` happened. At most `SHOWN_OTHERS` of the failures `others` are added in short.
    """
    facts = {
        "why": _why(failure),
        "how": _how(failure),
        "who": f"rank {failure.global_rank} (local rank {failure.local_rank}), pid {failure.pid}, on {node}",
        "when": datetime.fromtimestamp(failure.at).astimezone().isoformat(sep=" ", timespec="milliseconds"),
        "log": log_file,
    }
    parts = [_facts(facts, width)]
    stack = [line.rstrip() for line in failure.traceback.splitlines()]
    if stack:
        parts.append(_section("where", _last(stack, SHOWN_FRAMES), width))
    log = _log_lines(failure.log_tail, stack)
    if log:
        parts.append(_section("last lines of its log", _last(log, SHOWN_LOG_LINES), width))
    elif not stack:
        parts.append(_section("its log", ["not kept; run with --tee 3 to see its last lines here"], width))
    if others:
        parts.append(_section("others that followed", _others(failure, others), width))
    title = f"━━ rank {failure.global_rank} failed first "
    return "\n\n".join([title.ljust(width, "━"), *parts, "━" * width])


def _why(failure: WorkerFailure) -> str:
    if failure.error.strip():
        return _both_ends(failure.error.strip().splitlines()[0], 4 * WIDTH)
    if failure.oom:
        return "out of memory: the kernel killed it"
    if failure.signal:
        return _HINTS.get(failure.signal, "a signal ended it")
    if unstarted := _PYTHON_CANNOT_START.search(failure.log_tail):
        return _both_ends(unstarted[0], 4 * WIDTH)
    if failure.exit_code in _NOT_STARTED:
        return "the program could not be started"
    return "it left no exception; decorate its main function with torch's @record to have it here"


def _both_ends(text: str, limit: int) -> str:
    if len(text) <= limit:
        return text
    return f"{head(text, limit // 2)}{text[len(text) - limit + limit // 2 :]}"


def _how(failure: WorkerFailure) -> str:
    memory = ", out of memory" if failure.oom else ""
    if failure.signal:
        name = signal_name(failure.signal)
        return (name if name.endswith(str(failure.signal)) else f"{name} (signal {failure.signal})") + memory
    words = f"exit code {failure.exit_code}{memory}"
    inner = failure.exit_code - _SHELL_SIGNALS
    if inner in _HINTS:
        words += f", a shell's way to say {signal_name(inner)}: {_HINTS[inner]}"
    return words


def _facts(facts: dict[str, str], width: int) -> str:
    lines = []
    for name, words in facts.items():
        if words:
            wrapped = textwrap.wrap(words, width - 8, break_on_hyphens=False) or [""]
            lines.append(f"  {name:<6}{wrapped[0]}")
            lines.extend(" " * 8 + line for line in wrapped[1:])
    return "\n".join(lines)


def _section(title: str, lines: Sequence[str], width: int) -> str:
    room = width - len(_INDENT)
    return "\n".join([f"  {title}", *((_INDENT + head(line.expandtabs(4), room)).rstrip() for line in lines)])


def _last(lines: Sequence[str], count: int) -> list[str]:
    if len(lines) <= count:
        return list(lines)
    return [f"… {len(lines) - count} lines before", *lines[-count:]]


def _log_lines(tail: str, stack: Sequence[str]) -> list[str]:
    lines = [line.rstrip() for line in without_rank(tail).splitlines()]
    logged = find_traceback("\n".join(lines))
    if logged.error and logged.error in stack:
        end = len(lines) - lines[::-1].index(logged.error)
        lines = lines[: end - len(logged.traceback.splitlines())]
    while lines and not lines[-1]:
        lines.pop()
    return lines


def _others(first: WorkerFailure, others: Sequence[WorkerFailure]) -> list[str]:
    rank_width = max(len(str(other.global_rank)) for other in others)
    lines = []
    for other in in_order(others)[:SHOWN_OTHERS]:
        how = signal_name(other.signal) if other.signal else f"exit code {other.exit_code}"
        why = other.error.strip().splitlines()[0] if other.error.strip() else ""
        lines.append(f"rank {other.global_rank:<{rank_width}}  +{other.at - first.at:.1f} s  {how:<12}  {why}".rstrip())
    hidden = len(others) - SHOWN_OTHERS
    return [*lines, f"… and {hidden} more"] if hidden > 0 else lines
