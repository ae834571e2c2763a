"""What the user sees: one line per step with the time it took, one sentence per failure, and plain tables.

Also the one way to run a command here: with a deadline, and with its output in the error when it fails.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from settings import COMMAND_DEADLINE

LAST_LINES = 15


class ClusterError(Exception):
    """Something the user must know, said in one sentence; `detail` holds the log lines that go with it."""

    def __init__(self, sentence: str, detail: str = "") -> None:
        super().__init__(sentence)
        self.detail = detail


def say(line: str) -> None:
    """Print one line of progress at once."""
    print(line, flush=True)


@contextmanager
def step(name: str) -> Iterator[None]:
    """Announce a step and print how long it took; a step that raises prints nothing more."""
    say(f"  {name} ...")
    begun = time.monotonic()
    yield
    say(f"  {name}: {time.monotonic() - begun:.1f} s")


def tail(path: Path, lines: int = LAST_LINES) -> str:
    """Return the last lines of a log, or nothing if there is none."""
    try:
        with path.open("rb") as log:
            log.seek(0, 2)
            log.seek(max(0, log.tell() - 400 * lines))
            text = log.read().decode(errors="replace")
    except OSError:
        return ""
    return "\n".join(text.splitlines()[-lines:])


def run(
    command: Sequence[str | Path],
    *,
    deadline: float = COMMAND_DEADLINE,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    stdin: bytes | None = None,
) -> str:
    """Run a command and return its standard output.

    Raises:
        ClusterError: the command is missing, failed or outlived its deadline; the sentence names it, the detail holds
            the last lines it wrote.
    """
    argv = [str(part) for part in command]
    try:
        done = subprocess.run(argv, capture_output=True, timeout=deadline, cwd=cwd, env=env, input=stdin, check=False)
    except FileNotFoundError:
        raise ClusterError(f"the command {argv[0]} is not installed; run `hack/cluster/cluster.py build`") from None
    except subprocess.TimeoutExpired:
        raise ClusterError(f"`{' '.join(argv[:6])}` did not end within {deadline:.0f} s") from None
    if done.returncode != 0:
        text = (done.stderr + done.stdout).decode(errors="replace").strip()
        detail = "\n".join(text.splitlines()[-LAST_LINES:])
        raise ClusterError(f"`{' '.join(argv[:6])}` failed with code {done.returncode}", detail)
    return done.stdout.decode(errors="replace")


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Lay out rows under a header, each column as wide as its widest cell."""
    widths = [max(len(row[column]) for row in [header, *rows]) for column in range(len(header))]
    lines = ("   ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in [header, *rows])
    return "\n".join(line.rstrip() for line in lines)


def complain(error: ClusterError) -> None:
    """Print a failure: the detail first, so that the sentence is the last thing on the screen."""
    if error.detail:
        print(error.detail, file=sys.stderr)
    print(f"cluster: {error}", file=sys.stderr, flush=True)
