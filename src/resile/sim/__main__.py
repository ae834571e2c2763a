"""`python -m resile.sim --seed N [--count M] [--verbose]`: replay seeds exactly."""

from __future__ import annotations

import argparse
import sys
from collections import Counter

from resile.sim.cluster import Cluster
from resile.sim.simulate import SimulationFailed, render, run


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m resile.sim", description="Simulate jobs with random faults.")
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--count", type=int, default=1, help="how many seeds")
    parser.add_argument("--verbose", action="store_true", help="print every event")
    arguments = parser.parse_args()
    endings: Counter[str] = Counter()
    broken = 0
    for seed in range(arguments.seed, arguments.seed + arguments.count):
        cluster = Cluster(seed)
        try:
            run(cluster, seed)
        except SimulationFailed as failed:
            broken += 1
            print(f"seed {seed}: {failed}", file=sys.stderr)
        else:
            state, checks = cluster.state, cluster.checks
            endings[state.reason] += 1
            if arguments.count == 1:
                print(
                    f"seed {seed}: {state.phase} ({state.reason}: {state.message}) "
                    f"after {cluster.clock.now:.1f} virtual seconds, {checks.events} events, "
                    f"{checks.rounds} rounds, {len(state.nodes)} nodes, "
                    f"{cluster.master_crashes} deaths of the master"
                )
        if arguments.verbose:
            print("\n".join(render(line) for line in cluster.trace))
    if arguments.count > 1:
        print(f"{arguments.count} seeds, {broken} broken; " + ", ".join(f"{n} {r}" for r, n in endings.most_common()))
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
