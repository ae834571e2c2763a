"""Keeps a master alive on a machine without a cluster: started anew at once when it dies, from its journal.

A small process of its own, so that neither a killed master nor a killed agent takes the other down. It ends when the
job is over, when the master says that starting it again will not help, or when it keeps dying.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence

JOB_SUCCEEDED = 0
JOB_FAILED = 10
CANNOT_SERVE = 78  # `EX_CONFIG`
ALREADY_SERVED = 3
"""Exit codes of a master after which another start would change nothing. None of them is 1 or 2: the one is what Python
gives for an error that nobody caught, the other what shells and argument parsers give for words that they do not
understand. Neither comes from a master that has looked at its job, and such a one is started again."""

TRY_AGAIN = 75
"""`EX_TEMPFAIL`: what kept the master from serving may pass."""

FINAL = (JOB_SUCCEEDED, JOB_FAILED, CANNOT_SERVE, ALREADY_SERVED)
HEALTHY_SECONDS = 60.0
"""A master that lived so long was well; deaths before that count as one row."""
LONGEST_PAUSE = 5.0
MAX_STARTS = 100
"""Starts in a row, the first few at once and the later ones with pauses: about eight minutes of trying."""


def supervise(command: Sequence[str]) -> int:
    """Run a master until it ends for good; its last exit code.

    SIGTERM is passed on to the master and ends the supervision.
    """
    stopping = threading.Event()
    child: subprocess.Popen[bytes] | None = None

    def stop(*_: object) -> None:
        stopping.set()
        if child is not None:
            child.terminate()

    signal.signal(signal.SIGTERM, stop)
    starts = 0
    while True:
        begun = time.monotonic()
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL)
        if stopping.is_set():
            child.terminate()
        code = child.wait()
        if stopping.is_set() or code in FINAL:
            return code
        starts = 1 if time.monotonic() - begun > HEALTHY_SECONDS else starts + 1
        if starts >= MAX_STARTS:
            print(f"the master died {starts} times in a row; giving up", file=sys.stderr)
            return CANNOT_SERVE
        print(f"the master ended with {code}; starting it again", file=sys.stderr, flush=True)
        stopping.wait(pause(starts))
        if stopping.is_set():
            return code


def pause(starts: int) -> float:
    """How long to wait before the next start: nothing for a master that was killed, more for one that cannot live."""
    return 0.0 if starts < 5 else min(LONGEST_PAUSE, 0.1 * 2.0 ** (starts - 5))
