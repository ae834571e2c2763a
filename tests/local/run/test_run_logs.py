"""Where the output of training processes goes, and that no amount or stuck reader of it stops the agent."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

from resile.api.timeouts import derive
from tests.local.resile_run import Runs, wait_until

TALKS = """
import os, sys
print("out of", os.environ["RANK"], flush=True)
print("err of", os.environ["RANK"], file=sys.stderr, flush=True)
"""


def files(directory: Path) -> dict[str, str]:
    (run,) = directory.iterdir()
    return {
        str(path.relative_to(run)): path.read_text()
        for path in sorted(run.rglob("*.log"))  # error.json is not there unless something failed
    }


def test_redirected_streams_go_to_files_alone(runs: Runs) -> None:
    logs = runs.directory / "logs"
    run = runs.run("--nproc-per-node=2", "--redirects=0:3,1:1", "--log-dir", str(logs), runs.script(TALKS))
    assert run.process.returncode == 0, run.err
    assert files(logs) == {
        "attempt_0/0/stdout.log": "out of 0\n",
        "attempt_0/0/stderr.log": "err of 0\n",
        "attempt_0/1/stdout.log": "out of 1\n",
    }
    assert run.out == ""
    assert "err of 1" in run.err
    assert "err of 0" not in run.err


def test_teed_streams_go_to_files_and_with_a_prefix_to_the_console(runs: Runs) -> None:
    logs = runs.directory / "logs"
    run = runs.run(
        "--nproc-per-node=2", "--tee=3", "--local-ranks-filter=0", "--log-dir", str(logs), runs.script(TALKS)
    )
    assert run.out == "[default0]:out of 0\n"
    assert "[default0]:err of 0\n" in run.err
    assert "of 1" not in run.err
    assert files(logs)["attempt_0/1/stderr.log"].endswith("err of 1\n")
    assert len(files(logs)) == 4


def test_redirected_logs_are_kept_and_named_if_nobody_said_where(runs: Runs) -> None:
    run = runs.run("--redirects=3", runs.script("raise OSError('in the file alone')"))
    assert run.process.returncode == 1
    (line,) = [line for line in run.err.splitlines() if "log directory set to: " in line]
    kept = Path(line.partition("log directory set to: ")[2])
    log = kept / "attempt_0" / "0" / "stderr.log"
    assert "in the file alone" in log.read_text()
    told = run.err[run.err.index("━━ rank 0 failed first") :].replace("\n        ", "")
    assert f"  log   {log}\n" in told, "the report names the file of the process that failed"
    assert "why   OSError: in the file alone" in run.err, "the report reads what the file got"


def test_fifty_megabytes_pass(runs: Runs) -> None:
    lines = 50 * 1024 * 1024 // 64
    script = runs.script(f"import sys\nfor n in range({lines}):\n    sys.stdout.write(f'{{n:063d}}\\n')\n")
    run = runs.run(script)
    assert run.process.returncode == 0
    path = runs.directory / "0.out"
    assert path.stat().st_size == lines * 64
    with path.open("rb") as file:
        file.seek(-64, os.SEEK_END)
        assert int(file.read()) == lines - 1


def test_a_long_line_without_an_end_passes_too(runs: Runs) -> None:
    run = runs.run(runs.script("import sys\nsys.stdout.write('x' * 3000000)\nsys.stdout.flush()\n"))
    assert run.process.returncode == 0
    assert run.out == "x" * 3_000_000


def test_an_agent_whose_console_is_not_read_is_not_taken_for_lost(runs: Runs) -> None:
    # stdout and stderr are one pipe that nobody reads: both the processes' and the agent's own words pile up.
    stuck = runs.start(
        "--nnodes=1:2",
        f"--rdzv-endpoint=127.0.0.1:{runs.port}",
        "--rdzv-conf=last_call_timeout=0.1",
        "--max-restarts=100",
        runs.script("from probe import *\nnote('start', round=1)\nprint('x' * 3000000, flush=True)\nnote('through')\n"),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    runs.await_world(1)
    master = runs.master()
    wait_until(lambda: len(runs.story()) > 2, "a story")
    began = runs.story()[-1].at
    wait_until(
        lambda: time.time() - began > 2 * derive().heartbeat_timeout, "twice the time after which silence is noticed"
    )
    assert runs.notes("through") == [], "the process waits for its reader, as it would without us"
    assert stuck.running
    assert [line.reason for line in runs.story() if line.warning] == []
    assert runs.master() == master
    assert stuck.process.stdout is not None
    said = stuck.process.stdout.read()
    assert said.count(b"x") >= 3_000_000
    assert stuck.wait() == 0
