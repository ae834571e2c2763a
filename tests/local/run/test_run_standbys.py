"""`resile run` restarts processes from warm standbys; scripts need not know of it."""

from __future__ import annotations

import pytest

from tests.local.resile_run import PATIENCE, Runs, alive, kill, wait_until

WAITS = """
import torch
from probe import *
note("start", round=ATTEMPT, warm=torch.made_by != os.getpid(), made_by=torch.made_by)
wait_for(f"release{ATTEMPT}")
sys.exit(ATTEMPT)
"""


def small_torch(runs: Runs) -> None:
    """Something by the name of torch that costs little to import, and yet more than it takes to form a round."""
    (runs.directory / "torch.py").write_text("import os, time\ntime.sleep(1.0)\nmade_by = os.getpid()\n")


def test_a_killed_rank_restarts_with_its_siblings_from_standbys_and_nothing_is_left(runs: Runs) -> None:
    small_torch(runs)
    run = runs.start("--nproc-per-node=2", "--max-restarts=3", runs.script(WAITS))
    first = runs.await_world(2, after=-1)
    assert len({note["made_by"] for note in first.values()}) == 1, "they share one import"
    run.says("2 standbys are ready")
    kill(first[1]["pid"])
    warm = runs.await_world(2, after=0)
    assert all(note["warm"] for note in warm.values())
    assert {note["agent"] for note in warm.values()} == {run.pid}, "they are children of the agent, as ever"
    for note in warm.values():
        run.says(f"began in a standby (pid {note['pid']})")
    wait_until(lambda: run.err.count("2 standbys are ready") == 2, "others in their place")
    runs.release("release1")  # both end with 1, of their own accord
    again = runs.await_world(2, after=1)
    assert all(note["warm"] for note in again.values())
    assert "ended with exit code 1" in run.err
    kill(run.pid)
    for note in again.values():
        wait_until(lambda pid=note["pid"]: not alive(pid), "the end of a process whose agent was killed")  # type: ignore[misc]
    wait_until(lambda: not any("standby" in words for words in runs.left_over().values()), "the end of all standbys")


@pytest.mark.parametrize("how", ["shell", "off"])
def test_other_programs_and_other_wishes_start_from_scratch(runs: Runs, how: str) -> None:
    small_torch(runs)
    script = runs.script(WAITS)
    shell = runs.directory / "wrapper"
    shell.write_text(f"#!/bin/sh\nexec python {script}\n")
    shell.chmod(0o755)
    words = ["--no-python", str(shell)] if how == "shell" else ["--standbys=0", script]
    run = runs.start("--max-restarts=1", *words)
    (first,) = runs.await_world(1, after=-1).values()
    assert first["made_by"] == first["pid"], "the import is its own"
    kill(first["pid"])
    (again,) = runs.await_world(1, after=0).values()
    assert again["made_by"] == again["pid"]
    assert "standby" not in run.err
    runs.release("release1")
    run.wait()


RECORDS = """
from probe import *
import torch, torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.parallel import DistributedDataParallel

@record
def main():
    dist.init_process_group("gloo")
    model = DistributedDataParallel(torch.nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.randn(2, 4)).sum().backward()
    optimizer.step()
    note("start", round=ATTEMPT)
    wait_for("go")
    if RANK == 1:
        raise RuntimeError(f"attempt {ATTEMPT} fails")
    time.sleep(60)

main()
"""


def test_plain_ddp_restarts_from_a_standby_and_its_errors_are_told_as_ever(runs: Runs) -> None:
    script = runs.script(RECORDS)
    run = runs.start("--nproc-per-node=2", "--max-restarts=1", "--recovery-budget=10", script)
    wait_until(lambda: runs.notes("start"), "the first step", 4 * PATIENCE)
    run.says("2 standbys are ready", 4 * PATIENCE)
    runs.release("go")
    assert run.wait(2 * PATIENCE) == 1
    warm = {note["rank"]: note["pid"] for note in runs.notes("start") if note["attempt"] == 1}
    assert all(f"began in a standby (pid {pid})" in run.err for pid in warm.values())
    report = run.err[run.err.index("━━") :]
    assert f"rank 1 (local rank 1), pid {warm[1]}" in report
    assert "why   RuntimeError: attempt 1 fails" in report
    assert f'File "{script}", line {len(RECORDS.splitlines())}, in <module>' in run.err
    assert "resile/agent" not in run.err, "of the standby nothing is to be seen"
    runs.nothing_is_left()
