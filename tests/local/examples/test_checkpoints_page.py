"""The scripts of the page about checkpoints do what the page says, without a word about logging in them."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections import Counter
from typing import Any

import pytest

from tests.local.resile_run import Runs, wait_until
from tests.support.paths import ROOT

PAGE = ROOT / "docs" / "checkpoints.md"
ELASTIC, DDP, READ = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.S | re.M)
SLOW = 300.0
"""Seconds for torch to start, on a machine that has other work."""
pytestmark = pytest.mark.timeout(600)


def test_the_script_goes_on_after_an_interruption_and_says_so_and_then_has_nothing_to_do(
    runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = runs.script(ELASTIC)
    first = runs.start("--standalone", "--nproc-per-node=2", script, "0.1")
    wait_until(lambda: "step = 5," in first.out, "five steps", SLOW)
    first.signal(signal.SIGINT)
    assert first.wait(SLOW) == 128 + signal.SIGINT
    stored = re.search(r"the last checkpoint is in storage: (\S+/step-(\d+)); the same command goes on", first.err)
    assert stored, first.err
    assert int(stored[2]) in range(4, 32, 2), "`every` is 2"

    second = runs.start("--standalone", "--nproc-per-node=2", script)
    assert second.wait(SLOW) == 0, second.err
    assert second.err.count(f"[INFO] restored step {stored[2]} from storage: {stored[1]}\n") == 1, "rank 0 alone"
    assert len(re.findall(rf"\[INFO\] round \d+: rank \d of 2 at step {stored[2]}, ", second.err)) == 2
    assert re.findall(r"step = (\d+),", second.out) == [str(step) for step in range(int(stored[2]) + 1, 33)]

    third = subprocess.run(
        [sys.executable, script], cwd=runs.directory, capture_output=True, text=True, timeout=SLOW, check=True
    )
    assert "[INFO] restored step 32 from storage: " in third.stderr
    assert third.stderr.count("[INFO] nothing left to do: 2 epochs are done\n") == 1
    assert "step =" not in third.stdout

    monkeypatch.chdir(runs.directory)
    names: dict[str, Any] = {}
    with pytest.warns(UserWarning, match="single process"):  # dcp says so
        exec(READ, names)
    assert names["model"].weight.detach().flatten().tolist() == pytest.approx([1.0] * 8, abs=0.1), "it adds up"


SAVED = "        checkpointer.save(step, state)\n"
TELL_AND_END = """\
        own = [(inputs == row).all(dim=1).nonzero().item() for row in x[: share.count]]
        open(f"took-{dist.get_rank()}", "a").write(f"[{epoch}, {own}]\\n")
        if step == 13:
            dist.barrier()
            raise SystemExit("half way")
"""


def test_the_script_without_the_elastic_loop_takes_every_sample_once_and_then_does_nothing(runs: Runs) -> None:
    assert DDP.count(SAVED) == 1
    script = runs.script(DDP.replace(SAVED, SAVED + TELL_AND_END))
    first = runs.start("--standalone", "--nproc-per-node=2", script)
    assert first.wait(SLOW) == 1
    assert re.findall(r"step = (\d+),", first.out) == [str(step) for step in range(1, 13)]

    second = runs.start("--standalone", "--nproc-per-node=3", script)
    assert second.wait(SLOW) == 0, second.err
    assert re.findall(r"step = (\d+),", second.out) == [str(step) for step in range(14, 33)]
    taken: Counter[tuple[int, int]] = Counter()
    for told in runs.directory.glob("took-*"):
        for epoch, samples in map(json.loads, told.read_text().splitlines()):
            taken.update((epoch, sample) for sample in samples)
    assert taken == Counter((epoch, sample) for epoch in (0, 1) for sample in range(1000))

    third = runs.start("--standalone", "--nproc-per-node=1", script)
    assert third.wait(SLOW) == 0, third.err
    assert "[INFO] restored step 32 from storage: " in third.err
    assert "step =" not in third.out
