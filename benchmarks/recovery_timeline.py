"""`python -m benchmarks.recovery_timeline`: the picture of one recovery in the README, from a run on this machine.

The same script trains with three ranks under torchrun and under `resile run`; rank 1 is killed with SIGKILL in each.
The steps of every process go to docs/images/recovery.json, in seconds after the kill, and from there to recovery.svg.
`--redraw` draws the picture again from the figures that are there and runs nothing.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from benchmarks import table
from benchmarks.harness import Workplace, say
from benchmarks.peers import OURS, TORCHRUN, Launcher
from benchmarks.step_log import SCRIPT, all_steps, next_step, steady_world, whole_world
from resile.common.atomic_files import write_atomically

IMAGES = Path(__file__).resolve().parents[1] / "docs/images"
FIGURES, PICTURE = IMAGES / "recovery.json", IMAGES / "recovery.svg"
RANKS = 3
KILLED = 1
BEFORE, AFTER = 1.0, 1.0
"""Seconds of steps that are kept before the kill, and after all ranks step again."""


class Process(msgspec.Struct, frozen=True):
    """One training process: its rank and when it completed its steps, in seconds after the kill."""

    rank: int
    steps: list[float]


class Run(msgspec.Struct, frozen=True):
    """One launcher's run around the kill."""

    launcher: str
    next_step: float
    """Every rank of the new round has completed its first step."""
    whole: float
    """All three ranks step together again."""
    processes: list[Process]


class Timeline(msgspec.Struct, frozen=True):
    """What the picture is drawn from."""

    machine: dict[str, str]
    runs: list[Run]


def main(argv: Sequence[str] | None = None) -> int:
    """Measure unless told not to, and draw."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.recovery_timeline", description=__doc__.splitlines()[0])
    parser.add_argument("--redraw", action="store_true", help="draw from docs/images/recovery.json; run nothing")
    options = parser.parse_args(argv)
    if not options.redraw:
        theirs = _measure(TORCHRUN)
        found = Timeline(table.machine(), [theirs, _measure(OURS, until=theirs.whole + AFTER)])
        write_atomically(FIGURES, msgspec.json.format(msgspec.json.encode(found), indent=-1) + b"\n")
    write_atomically(PICTURE, draw(read()).encode())
    say(f"wrote {PICTURE}")
    return 0


def read() -> Timeline:
    """The figures of the last run."""
    return msgspec.json.decode(FIGURES.read_bytes(), type=Timeline)


def _measure(launcher: Launcher, until: float = 0.0) -> Run:
    """Kill a rank, and keep the steps until all three step again, or until so many seconds after the kill."""
    with Workplace() as place:
        script = place.script("train.py", SCRIPT)
        launcher.start(place, "--standalone", f"--nproc-per-node={RANKS}", "--max-restarts=3", script)
        say(f"timeline: {launcher.name} starts")
        if launcher is OURS:
            place.heard(f"{RANKS} standbys are ready")
        world = steady_world(place, RANKS)
        time.sleep(BEFORE)
        victim = world.pid_of(KILLED)
        killed = time.monotonic()
        os.kill(victim, signal.SIGKILL)
        if launcher is OURS:
            stepped = next_step(place, set(world.members) - {victim}, world.round)
            whole = whole_world(place, RANKS, world.round)
        else:
            stepped = whole = whole_world(place, RANKS, 0, others_than=world.members)
        last = max(until, whole - killed + AFTER)
        time.sleep(max(0.0, killed + last - time.monotonic()))
        processes = []
        for steps in sorted(filter(None, all_steps(place).values()), key=lambda steps: steps[0].at):
            moments = [round(step.at - killed, 3) for step in steps]
            kept = [at for at in moments if -BEFORE <= at <= last]
            processes.append(Process(steps[-1].rank, kept))
    say(f"timeline: {launcher.name}: next step after {stepped - killed:.2f} s, all three after {whole - killed:.2f} s")
    return Run(launcher.name, round(stepped - killed, 3), round(whole - killed, 3), processes)


# drawing --------------------------------------------------------------------------------------------------------------

WIDTH, LEFT, RIGHT = 860, 76, 28
LANE, BAR, HEAD = 22, 12, 40
"""Heights: of a rank's lane, of its bar, and of what stands above the lanes of a panel."""
JOINED = 0.045
"""Seconds between two steps that are drawn as one bar: some three times a usual step."""
STYLE = """
    text { font: 13px ui-sans-serif, system-ui, "Segoe UI", Helvetica, Arial, sans-serif; fill: #1f2328; }
    .page { fill: #ffffff; stroke: #d1d9e0; }
    .title { font-size: 16px; font-weight: 600; }
    .name { font-weight: 600; }
    .small { font-size: 11px; fill: #59636e; }
    .grid { stroke: #d1d9e0; stroke-width: 1; }
    .stayed { fill: #2f81f7; }
    .new { fill: #2da44e; }
    .killed { stroke: #d1242f; stroke-width: 2; fill: none; }
    .wait { stroke: #9a6700; stroke-width: 1.5; fill: none; }
    .figure { fill: #9a6700; font-weight: 600; }
    @media (prefers-color-scheme: dark) {
      text { fill: #f0f6fc; }
      .page { fill: #0d1117; stroke: #3d444d; }
      .small { fill: #9198a1; }
      .grid { stroke: #3d444d; }
      .stayed { fill: #4493f8; }
      .new { fill: #3fb950; }
      .killed { stroke: #f85149; }
      .wait { stroke: #d29922; }
      .figure { fill: #d29922; }
    }
"""


class Axis(msgspec.Struct, frozen=True):
    """Seconds to pixels."""

    start: float
    end: float

    def x(self, at: float) -> float:
        """Where a moment is drawn; what is outside is drawn at the edge."""
        share = (min(max(at, self.start), self.end) - self.start) / (self.end - self.start)
        return round(LEFT + share * (WIDTH - LEFT - RIGHT), 1)


def draw(timeline: Timeline) -> str:
    """The whole picture: a panel for each run on one axis, and the last run's first moments magnified."""
    axis = Axis(-BEFORE, max(run.whole for run in timeline.runs) + AFTER)
    ours = timeline.runs[-1]
    close = Axis(-0.2, max(0.5, ours.whole + 0.15))
    parts = [_text(LEFT - 48, 34, "One of three ranks is killed with SIGKILL. When does training go on?", "title")]
    parts += _legend(54)
    y = 78
    about = {
        TORCHRUN.name: "torchrun restarts all three processes",
        OURS.name: "resile run: two ranks go on in their processes, a standby takes the killed rank's place",
    }
    for run in timeline.runs:
        parts += _panel(run, about[run.launcher], axis, y)
        y += HEAD + RANKS * LANE + 22
    parts += _scale(axis, y - 12, step=1.0)
    y += 40
    parts += _panel(ours, "resile run, magnified", close, y)
    y += HEAD + RANKS * LANE + 8
    parts += _scale(close, y, step=0.1)
    y += 44
    parts.append(_text(LEFT - 48, y, _where(timeline.machine), "small"))
    height = y + 18
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}"'
    said = "; ".join(f"{run.launcher}: next step after {run.next_step:.2f} s" for run in timeline.runs)
    return "\n".join(
        [
            f'{head} role="img" aria-label="A rank is killed. {said}">',
            f"  <style>{STYLE}  </style>",
            f'  <rect class="page" x="0.5" y="0.5" width="{WIDTH - 1}" height="{height - 1}" rx="8"/>',
            *(f"  {part}" for part in parts),
            "</svg>\n",
        ]
    )


def spans(steps: Sequence[float]) -> Iterator[tuple[float, float]]:
    """Steps that follow each other closely, as one span from the first to the last of them."""
    start = last = None
    for at in steps:
        if start is None or last is None:
            start = at
        elif at - last > JOINED:
            yield start, last
            start = at
        last = at
    if start is not None and last is not None:
        yield start, last


def _panel(run: Run, about: str, axis: Axis, y: float) -> list[str]:
    parts = [_text(LEFT - 48, y + 12, about, "name")]
    top = y + HEAD
    for process in run.processes:
        lane = top + process.rank * LANE
        style = "stayed" if process.steps and process.steps[0] < 0 else "new"
        for start, end in spans([at for at in process.steps if axis.start <= at <= axis.end]):
            x = axis.x(start)
            parts.append(_rect(x, lane, max(axis.x(end) - x, 1.5), style))
    for rank in range(RANKS):
        parts.append(_text(LEFT - 48, top + rank * LANE + 10, f"rank {rank}", "small"))
    x, lane = axis.x(0.0), top + KILLED * LANE + BAR / 2
    parts.append(f'<path class="killed" d="M{x - 5} {lane - 6}l10 12m0 -12l-10 12"/>')
    return [*parts, *_wait(run, axis, top)]


def _wait(run: Run, axis: Axis, top: float) -> list[str]:
    """How long no step was completed, under the first lane's bar, with the seconds beside it."""
    y = top - 11
    start, end = axis.x(0.0), axis.x(run.next_step)
    words = f"next step after {run.next_step:.2f} s"
    if run.whole > run.next_step:
        words += f", all three after {run.whole:.2f} s"
    bracket = f'<path class="wait" d="M{start} {y + 3}v-6m0 3H{end}m0 -3v6"/>'
    if end - start > 300:
        return [bracket, _text(start + 14, top + KILLED * LANE + 11, words, "figure")]
    return [bracket, _text(end + 8, y + 4, words, "figure")]


def _scale(axis: Axis, y: float, step: float) -> list[str]:
    parts = [f'<path class="grid" d="M{LEFT} {y}H{WIDTH - RIGHT}"/>']
    for number in range(round(axis.start / step), int(axis.end / step) + 1):
        x = axis.x(number * step)
        label = f"{number * step:g} s" if number else "killed"
        parts.append(f'<path class="grid" d="M{x} {y}v5"/>')
        parts.append(_text(x, y + 18, label, "small", "middle"))
    return parts


def _legend(y: float) -> list[str]:
    x = float(LEFT - 48)
    parts = []
    for style, words, wide in (
        ("stayed", "steps of the processes that were there", 256),
        ("new", "steps of new processes", 166),
    ):
        parts += [_rect(x, y - 10, 18, style), _text(x + 24, y, words, "small")]
        x += wide
    parts.append(f'<path class="killed" d="M{x} {y - 10}l10 12m0 -12l-10 12"/>')
    return [*parts, _text(x + 18, y, "killed", "small")]


def _where(machine: dict[str, str]) -> str:
    date, load = machine["date"].split()[0], machine["load"].split()[0]
    words = f"{machine['cpu']}, torch {machine['torch']}, gloo, {date}, load {load}"
    return f"The same script, one run each, on {words}. By benchmarks/recovery_timeline.py"


def _rect(x: float, y: float, width: float, style: str) -> str:
    return f'<rect class="{style}" x="{x}" y="{y}" width="{round(width, 1)}" height="{BAR}" rx="1.5"/>'


def _text(x: float, y: float, words: str, style: str, anchor: str = "start") -> str:
    safe = words.replace("&", "&amp;").replace("<", "&lt;")
    return f'<text class="{style}" x="{x}" y="{y}" text-anchor="{anchor}">{safe}</text>'


if __name__ == "__main__":
    sys.exit(main())
