"""Random fault schedules in the simulator: how long a thousand take, and how many break an invariant."""

from __future__ import annotations

import time

from benchmarks.harness import Row, say
from resile.sim.simulate import SimulationFailed, simulate

SEEDS = 1000


def run(quick: bool, seeds: int | None = None) -> list[Row]:
    seeds = seeds or (100 if quick else SEEDS)
    say(f"schedules: {seeds:,} seeds of simulated jobs with random faults")
    broken: list[int] = []
    start = time.monotonic()
    for seed in range(seeds):
        try:
            simulate(seed)
        except SimulationFailed as failed:
            broken.append(seed)
            say(str(failed))
    took = time.monotonic() - start
    return [
        Row(
            measure=f"{seeds:,} random fault schedules: broken",
            value=len(broken),
            bar=0,
            note=f"seeds {', '.join(map(str, broken[:10]))}" if broken else f"in {took:.1f} s",
        ),
        Row(measure=f"{seeds:,} random fault schedules: time", value=took, unit="s"),
    ]
