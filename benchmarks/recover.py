"""A killed rank of a plain DDP job: from the kill -9 to the next completed step, under `resile run` and torchrun.

The script knows nothing of either: a small model, a checkpoint every 20 steps that every rank loads at its start, and a
time stamp for every step. The next step is the first one that the killed rank's replacement completes.
"""

from __future__ import annotations

import os
import signal
import statistics
import time
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path

from benchmarks.harness import BIN, Row, Workplace, percentile, say, wait_for

RANKS = 2
STEPS_BEFORE = 50
SCRIPT = """
import os, time, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
step = 0
if os.path.exists("checkpoint.pt"):
    saved = torch.load("checkpoint.pt", weights_only=True)
    model.load_state_dict(saved["model"])
    step = saved["step"]
ddp = DistributedDataParallel(model)
with open(f"steps.{rank}", "a", buffering=1) as steps:
    while True:
        loss = torch.nn.functional.cross_entropy(ddp(torch.randn(32, 256)), torch.randint(10, (32,)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        time.sleep(0.01)
        steps.write(f"{time.monotonic()} {os.getpid()} {step}\\n")
        if rank == 0 and step % 20 == 0:
            torch.save({"model": model.state_dict(), "step": step}, "checkpoint.new")
            os.replace("checkpoint.new", "checkpoint.pt")
"""


def run(quick: bool) -> list[Row]:
    times = 1 if quick else 3
    ours, theirs = (
        _seconds("resile run", [BIN / "resile", "run"], times),
        _seconds("torchrun", [BIN / "torchrun"], times),
    )
    return [
        Row(
            measure="killed rank of plain DDP: to the next step, median",
            value=statistics.median(ours),
            unit="s",
            peer=statistics.median(theirs),
            note=f"ours {_list(ours)}; torchrun's {_list(theirs)}",
        )
    ]


def _seconds(name: str, launcher: Sequence[str | Path], times: int) -> list[float]:
    seconds: list[float] = []
    with Workplace() as place:
        script = place.script("train.py", SCRIPT)
        words = ["--standalone", "--nproc-per-node", str(RANKS), "--max-restarts", "20", str(script)]
        place.start([*launcher, *words])
        for _ in range(times):
            steps, pid = wait_for(
                f"{STEPS_BEFORE} steps under {name}", lambda: _newest(place.path / "steps.1", STEPS_BEFORE)
            )
            killed = time.monotonic()
            os.kill(pid, signal.SIGKILL)
            after = wait_for("the next step", partial(_next, place.path / "steps.1", killed), 120.0)
            seconds.append(after - killed)
            say(f"recover: {name} steps {seconds[-1]:.2f} s after the kill (every {steps * 1000:.0f} ms before)")
    return seconds


def _newest(path: Path, steps: int) -> tuple[float, int] | None:
    """The usual time of a step and the pid of the process that took the last ones, if it took so many."""
    lines = _lines(path)[-steps:]
    if len(lines) < steps or len({pid for _, pid in lines}) > 1:
        return None
    gaps = [after[0] - before[0] for before, after in pairwise(lines)]
    return percentile(gaps, 0.5), lines[-1][1]


def _next(path: Path, killed: float) -> float | None:
    return next((at for at, _ in _lines(path) if at > killed), None)


def _lines(path: Path) -> list[tuple[float, int]]:
    """(when, pid) of every whole line."""
    if not path.exists():
        return []
    whole = path.read_text().rpartition("\n")[0].splitlines()
    return [(float(at), int(pid)) for at, pid, _ in (line.split() for line in whole)]


def _list(seconds: Sequence[float]) -> str:
    return ", ".join(f"{each:.2f}" for each in seconds) + " s"
