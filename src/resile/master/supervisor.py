"""Keeps a master alive on a machine without a cluster: started anew at once when it dies, from its journal.

A small process of its own, so that neither a killed master nor a killed agent takes the other down. It ends when the
job is over, when the master says that starting it again will not help, or when it keeps dying.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Sequence

JOB_SUCCEEDED = 0
JOB_FAILED = 10
CANNOT_SERVE = 2
ALREADY_SERVED = 3
"""Exit codes of a master after which another start would change nothing. None of them is 1: that is what Python gives
for an error that nobody caught, and such a master is started again."""

FINAL = (JOB_SUCCEEDED, JOB_FAILED, CANNOT_SERVE, ALREADY_SERVED)
MAX_STARTS = 20
WINDOW_SECONDS = 60.0
"""A master that dies more often than this within the window is broken; waiting makes nothing better."""


def supervise(command: Sequence[str]) -> int:
    """Run a master until it ends for good; its last exit code.

    SIGTERM is passed on to the master and ends the supervision.
    """
    stopping = False
    starts: list[float] = []
    child: subprocess.Popen[bytes] | None = None

    def stop(*_: object) -> None:
        nonlocal stopping
        stopping = True
        if child is not None:
            child.terminate()

    signal.signal(signal.SIGTERM, stop)
    while True:
        now = time.monotonic()
        starts = [at for at in starts if now - at < WINDOW_SECONDS] + [now]
        if len(starts) > MAX_STARTS:
            print(f"the master died {MAX_STARTS} times within {WINDOW_SECONDS:g} s; giving up", file=sys.stderr)
            return CANNOT_SERVE
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL)
        if stopping:
            child.terminate()
        code = child.wait()
        if stopping or code in FINAL:
            return code
        print(f"the master ended with {code}; starting it again", file=sys.stderr, flush=True)
