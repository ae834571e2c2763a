#!/usr/bin/env python3
"""Run a part of the test suite, and run once more by itself what failed in it.

A test may fail because the machine was busy; then it passes alone, and the run says which ones it was. Only a run that
went through to its end and failed in some tests is given this second chance: one that could not collect its tests, was
interrupted or died has not run the others, and repeating the few that are known would prove nothing.

    suite.py run PYTEST-ARGUMENTS...    run, and remember how it ended
    suite.py again                      run what failed in that run
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

NOTE = Path(".pytest_cache/resile-last-run.json")
FAILED = Path(".pytest_cache/v/cache/lastfailed")
SOME_FAILED = 1


def run(arguments: list[str]) -> int:
    """Run pytest and remember how it ended; return its exit code."""
    NOTE.parent.mkdir(exist_ok=True)
    for old in (NOTE, FAILED):  # neither may speak of an earlier run, even if this one is killed
        old.unlink(missing_ok=True)
    code = _pytest(arguments)
    settings = {name: value for name, value in os.environ.items() if name.startswith("RESILE_")}
    NOTE.write_text(json.dumps({"arguments": arguments, "code": code, "settings": settings}))
    return code


def again() -> int:
    """Run what failed; return 0 only if all of it passes now."""
    try:
        note = json.loads(NOTE.read_text())
        failed = sorted(json.loads(FAILED.read_text()))
    except FileNotFoundError:
        return _refuse("no run with failed tests is on record")
    if note["code"] != SOME_FAILED or not failed:
        return _refuse(f"the run before ended with code {note['code']}, which is not about single tests")
    print(f"again: {len(failed)} failed, each is run once more by itself:", *failed, sep="\n  ", flush=True)
    NOTE.unlink()  # one second chance, not two
    alone = ["-n", "0"]  # one after the other, however the whole run was shared out
    code = _pytest(["--last-failed", "--last-failed-no-failures=none", *note["arguments"], *alone], note["settings"])
    words = "pass when run by themselves" if code == 0 else "do not all pass when run by themselves either"
    print(f"again: of the whole run, these failed and {words}:", *failed, sep="\n  ", flush=True)
    return code


def _pytest(arguments: list[str], settings: dict[str, str] | None = None) -> int:
    """Run pytest in a directory with a short name, which is kept if something fails; return the exit code.

    Paths of Unix sockets have at most 107 characters, and some tests have long names.
    """
    place = tempfile.mkdtemp(prefix="rs-")
    command = [sys.executable, "-m", "pytest", "--basetemp", place, *arguments]
    code = subprocess.run(command, env=os.environ | (settings or {}), check=False).returncode
    if code == 0:
        shutil.rmtree(place, ignore_errors=True)
    else:
        print(f"what the tests wrote is in {place}", flush=True)
    return code


def _refuse(why: str) -> int:
    print(f"again: nothing is repeated: {why}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(again() if sys.argv[1:] == ["again"] else run(sys.argv[2:]))
