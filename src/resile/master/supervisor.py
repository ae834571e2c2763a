"""Keeps a master alive on a machine without a cluster: a master that dies is started again at once, from its journal.

It is a small separate process, so that neither a killed master nor a killed agent takes the other down. It ends when
the job is over, when the master says that another start will not help, or when the master keeps dying.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence

from resile.api.master_exit_codes import ALREADY_SERVED, CANNOT_SERVE, FINAL
from resile.common.backoff import Backoff

BACKOFF = Backoff(first=0.1, limit=5.0)
FREE_STARTS = 4
"""How many starts of a master in a row come without a pause."""
HEALTHY_SECONDS = 60.0
"""If a master lived this long, the count of starts in a row begins anew."""
MAX_STARTS = 100
"""The most starts in a row; then the supervisor gives up. With the pauses they take about eight minutes."""


def supervise(command: Sequence[str]) -> int:
    """Run a master with `command`, and start another whenever one dies, until one ends with a final exit code.

    Returns the exit code of the last master, or `CANNOT_SERVE` if `MAX_STARTS` masters died in a row. SIGTERM ends the
    supervisor and the master.
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
        if stopping.is_set() or code in (*FINAL, ALREADY_SERVED):
            return code
        starts = 1 if time.monotonic() - begun > HEALTHY_SECONDS else starts + 1
        if starts >= MAX_STARTS:
            print(f"the master died {starts} times in a row; giving up", file=sys.stderr)
            return CANNOT_SERVE
        print(f"the master ended with {code}; starting it again", file=sys.stderr, flush=True)
        stopping.wait(BACKOFF.after(starts - FREE_STARTS))
        if stopping.is_set():
            return code
