"""Signals to the agent reach the training processes, which get the time to save; a second one ends it."""

from __future__ import annotations

import signal
import time

import pytest

from tests.local.resile_run import Runs, alive, wait_until

SAVES = """
from probe import *
import signal

def save(number, frame):
    note("asked", number=number, child=os.path.exists(f"/proc/{child}"))
    deadline = time.monotonic() + 2
    while time.monotonic() < deadline:
        time.sleep(0.05)
    note("saved", loader=child_lives())
    print("saved by rank", RANK, flush=True)
    sys.exit(0)

def child_lives():
    with open(f"/proc/{child}/stat") as file:
        return file.read().rpartition(")")[2].split()[0] != "Z"

child = os.fork()
if child == 0:
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: note("loader was told"))
    while True:
        time.sleep(1)
for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, save)
note("start", round=1, child=child)
while True:
    time.sleep(1)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_leaves_time_to_save_and_then_nothing_is_left(runs: Runs, number: signal.Signals) -> None:
    run = runs.start("--nproc-per-node=2", runs.script(SAVES))
    starts = runs.await_world(2)
    run.signal(number)
    assert run.wait() == 128 + number
    assert [note["number"] for note in runs.notes("asked")] == [number, number]
    assert [note["loader"] for note in runs.notes("saved")] == [True, True], "a data loader lives until the last save"
    assert runs.notes("loader was told") == []
    assert run.out.count("saved by rank") == 2, "the last words are printed"
    for start in starts.values():
        wait_until(lambda: not alive(start["child"]), "the end of the data loader")  # noqa: B023
    assert "━━" not in run.err, "leaving on request is no failure"
    runs.nothing_is_left()


def test_a_second_signal_kills_at_once(runs: Runs) -> None:
    stubborn = (
        "from probe import *\nimport signal\nsignal.signal(signal.SIGTERM, lambda *_: note('asked'))\n"
        "note('start', round=1)\nwhile True:\n    time.sleep(1)\n"
    )
    run = runs.start(runs.script(stubborn))
    runs.await_world(1)
    run.signal(signal.SIGTERM)
    wait_until(lambda: runs.notes("asked"), "the first signal")
    assert run.running
    asked = time.monotonic()
    run.signal(signal.SIGTERM)
    assert run.wait() == 128 + signal.SIGTERM
    assert time.monotonic() - asked < 5
    runs.nothing_is_left()


def test_processes_that_do_not_end_in_time_are_killed(runs: Runs) -> None:
    stubborn = (
        "from probe import *\nimport signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "note('start', round=1)\nwhile True:\n    time.sleep(1)\n"
    )
    run = runs.start("--shutdown-timeout=1", runs.script(stubborn))
    runs.await_world(1)
    asked = time.monotonic()
    run.signal(signal.SIGTERM)
    assert run.wait() == 128 + signal.SIGTERM
    assert 0.9 < time.monotonic() - asked < 6
    runs.nothing_is_left()


def test_a_signal_before_anything_runs_ends_the_command_and_leaves_nothing(runs: Runs) -> None:
    alone = runs.start(runs.script("raise SystemExit(1)"))
    lonely = runs.node(runs.script("raise SystemExit(1)"), nnodes="2")
    lonely.says("this node is worker-0")
    for run in (alone, lonely):
        run.signal(signal.SIGTERM)
        assert run.wait() in (1, -signal.SIGTERM, 128 + signal.SIGTERM)
    assert lonely.process.returncode == 128 + signal.SIGTERM
    runs.nothing_is_left(20)
