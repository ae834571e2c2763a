"""A killed rank of a plain DDP job: from the kill -9 to the next step, under `resile run`, torchrun and DLRover.

The script knows nothing of any of them: a small model, a checkpoint every 20 steps that every rank loads at its start,
and a time stamp for every step. The next step is the first one that the killed rank's replacement completes. Ours is
measured once standbys are ready, and without any.
"""

from __future__ import annotations

import os
import signal
import statistics
import time
from functools import partial
from pathlib import Path

import msgspec

from benchmarks.harness import Row, Workplace, listed, say, wait_for
from benchmarks.peers import DLROVER, OURS, TORCHRUN, Launcher, dlrover, tidied

RANKS = 3
STEP_BAR_SECONDS = 1.5
STEPS_BEFORE = 50
TAIL = 8 * 1024
"""Bytes of a file of steps that are read to look for new ones: looking must cost nothing, or it would be measured."""
LOOK_EVERY = 0.05
START_SECONDS = 180.0
"""For torch to start and step, twice over in torchrun's case, on a machine that has other work."""
COLD = msgspec.structs.replace(OURS, name="without standbys", env={"RESILE_STANDBYS": "0"})
SCRIPT = """
import os, time
with open(f"starts.{os.environ['RANK']}", "a") as starts:
    starts.write(f"{time.monotonic()} {os.getpid()} 0\\n")
import torch, torch.distributed as dist
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


class Recovery(msgspec.Struct, frozen=True):
    """Seconds after a kill."""

    started: float
    """The killed rank has a new process, which has not imported anything yet."""
    stepped: float


def run(quick: bool) -> list[Row]:
    launchers = [OURS, COLD, TORCHRUN, dlrover()]
    found: dict[str, list[Recovery]] = {}
    for _ in range(1 if quick else 3):  # in turns, so that other work on the machine troubles all alike
        for launcher in filter(None, launchers):
            found.setdefault(launcher.name, []).append(_recovery(launcher))
    started = {name: [each.started for each in recoveries] for name, recoveries in found.items()}
    stepped = {name: [each.stepped for each in recoveries] for name, recoveries in found.items()}
    return [
        _row("killed rank of plain DDP: to its new process, median", started),
        _row("killed rank of plain DDP: to the next step, median", stepped, STEP_BAR_SECONDS),
        Row(measure="… without standbys (--standbys 0)", value=statistics.median(stepped[COLD.name]), unit="s"),
    ]


def _row(measure: str, seconds: dict[str, list[float]], bar: float | None = None) -> Row:
    medians = {name: statistics.median(each) for name, each in seconds.items()}
    return Row(
        measure=measure,
        value=medians[OURS.name],
        unit="s",
        bar=bar,
        peer=medians[TORCHRUN.name],
        others={name: each for name, each in medians.items() if name == DLROVER},
        note="; ".join(f"{name} {listed(each)}" for name, each in seconds.items()),
    )


def _recovery(launcher: Launcher) -> Recovery:
    name = launcher.name
    with tidied(), Workplace() as place:
        script = place.script("train.py", SCRIPT)
        steps, starts = place.path / "steps.1", place.path / "starts.1"
        launcher.start(place, "--standalone", "--nproc-per-node", str(RANKS), "--max-restarts", "20", script)
        say(f"recover: waiting for {STEPS_BEFORE} steps under {name}")
        if launcher is OURS:
            place.heard(f"{RANKS} standbys are ready")
        pid = wait_for(f"{STEPS_BEFORE} steps under {name}", partial(_steady, steps), START_SECONDS, LOOK_EVERY)
        killed = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        stepped = wait_for("the next step", partial(_next, steps, killed), START_SECONDS, LOOK_EVERY)
        started = _next(starts, killed) or stepped
    say(f"recover: {name}: new process after {started - killed:.2f} s, step after {stepped - killed:.2f} s")
    return Recovery(started - killed, stepped - killed)


def _steady(path: Path) -> int | None:
    """The pid of the process that took the last steps, once it took enough of them."""
    pids = [pid for _, pid in _lines(path)[-STEPS_BEFORE:]]
    return pids[-1] if len(pids) == STEPS_BEFORE and len(set(pids)) == 1 else None


def _next(path: Path, killed: float) -> float | None:
    return next((at for at, _ in _lines(path) if at > killed), None)


def _lines(path: Path) -> list[tuple[float, int]]:
    """(when, pid) of the last steps in a file."""
    if not path.exists():
        return []
    with open(path, "rb") as file:
        file.seek(max(0, path.stat().st_size - TAIL))
        whole = file.read().rpartition(b"\n")[0].splitlines()
    whole = whole[1:] if path.stat().st_size > TAIL else whole  # the first may have lost its head
    return [(float(at), int(pid)) for at, pid, _ in (line.split() for line in whole)]
