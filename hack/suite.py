#!/usr/bin/env python3
"""Run a part of the test suite, and say where its time went.

A run counts once: what fails is a defect, of the test or of what it tests, and is mended and not repeated. Every run
ends with its slowest tests, the time of each file, and its own time beside what it may take, so that a suite that grows
slow is seen while it does.

    suite.py run [--budget SECONDS] PYTEST-ARGUMENTS...
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import time

SLOWEST = 20


def main(arguments: list[str]) -> int:
    """Run pytest; return its exit code."""
    budget = 0.0
    if arguments[:1] == ["--budget"]:
        budget, arguments = float(arguments[1]), arguments[2:]
    begun = time.monotonic()
    code = _pytest(arguments)
    took = time.monotonic() - begun
    print(f"took {took:.0f} s" + (f" of the {budget:.0f} s that it may take" if budget else ""), flush=True)
    return code


def _pytest(arguments: list[str]) -> int:
    """Run pytest in a directory with a short name, which is kept if something fails; return the exit code.

    Paths of Unix sockets have at most 107 characters, and some tests have long names.
    """
    directory = tempfile.mkdtemp(prefix="rs-")
    command = [sys.executable, "-m", "pytest", "--basetemp", directory, f"--durations={SLOWEST}", *arguments]
    code = subprocess.run(command, check=False).returncode
    if code == 0:
        shutil.rmtree(directory, ignore_errors=True)
    else:
        print(f"what the tests wrote is in {directory}", flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[2:]))
