"""How soon the master knows of a killed training process: from just before the kill -9 to the event in its story.

Three agents run a script that does nothing. The peer is torchrun with the same script on one machine, from the kill to
the line in which its agent says so; it has no master to tell.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import time
from functools import partial
from pathlib import Path

from benchmarks.harness import BIN, Row, Run, Workplace, percentile, say, wait_for

BAR_MS = 50.0
AGENTS = 3
SCRIPT = """
import os, signal
name = f"pid.{os.environ['RANK']}"
with open(name + ".new", "w") as file:
    file.write(str(os.getpid()))
os.replace(name + ".new", name)
signal.pause()
"""


def run(quick: bool, kills: int | None = None, peer: bool = True) -> list[Row]:
    kills = kills or (20 if quick else 100)
    say(f"detect: {kills} times kill -9 of a training process, {AGENTS} agents")
    with Workplace() as place:
        times = _resile(place, kills)
    theirs = None
    if peer:
        say("detect: the same with torchrun")
        with Workplace() as place:
            theirs = percentile(_torchrun(place, 5 if quick else 20), 0.99) * 1000
    note = f"p50 {percentile(times, 0.5) * 1000:.1f} ms, longest {max(times) * 1000:.1f} ms, of {kills} kills"
    value = percentile(times, 0.99) * 1000
    return [
        Row(
            measure="killed process noticed by the master, p99",
            value=value,
            unit="ms",
            bar=BAR_MS,
            peer=theirs,
            note=note,
        )
    ]


def _resile(place: Workplace, kills: int) -> list[float]:
    script = place.script("idle.py", SCRIPT)
    job = Run(place, str(AGENTS), ["--max-restarts", "100000", script])
    for _ in range(AGENTS):
        job.agent()
    times: list[float] = []
    with job.story() as story:
        story.wait("RoundFormed")
        story.set_clock()
        before: set[int] = set()
        for number in range(1, kills + 1):
            pids = wait_for("a new round's start", partial(_new_pids, place.path, AGENTS, before))
            before = set(pids)
            time.sleep(random.uniform(0.0, 0.05))  # at no particular phase of anybody's timers
            killed = time.monotonic()
            os.kill(random.choice(pids), signal.SIGKILL)
            times.append(story.on_our_clock(story.wait("ProcessFailed", number)["at"]) - killed)
    return times


def _torchrun(place: Workplace, kills: int) -> list[float]:
    script = place.script("idle.py", SCRIPT)
    process = place.start(
        [BIN / "torchrun", "--standalone", "--nproc-per-node", "1", "--max-restarts", "100000", script],
        stderr=subprocess.PIPE,
    )
    assert process.stderr is not None
    times: list[float] = []
    before: set[int] = set()
    for _ in range(kills):
        pids = wait_for("torchrun's start", partial(_new_pids, place.path, 1, before))
        before = set(pids)
        time.sleep(random.uniform(0.0, 0.05))
        killed = time.monotonic()
        os.kill(pids[0], signal.SIGKILL)
        while b"failed (exitcode: -9)" not in process.stderr.readline():
            pass
        times.append(time.monotonic() - killed)
    return times


def _new_pids(path: Path, ranks: int, known: set[int]) -> list[int]:
    """The pids of all ranks, once none of them is one of the last round's."""
    pids = []
    for rank in range(ranks):
        with contextlib.suppress(OSError, ValueError):
            pids.append(int((path / f"pid.{rank}").read_text()))
    return pids if len(pids) == ranks and not known.intersection(pids) else []
