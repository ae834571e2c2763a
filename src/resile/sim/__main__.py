"""`python -m resile.sim --seed N [--count M] [--verbose]`: replay seeds exactly."""

from __future__ import annotations

import argparse
import sys
from collections import Counter

from resile.sim.cluster import Cluster
from resile.sim.simulate import SimulationFailed, render, run_and_report


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
            report = run_and_report(seed, cluster)
        except SimulationFailed as failed:
            broken += 1
            print(f"seed {seed}: {failed}", file=sys.stderr)
        else:
            endings[report.reason] += 1
            if arguments.count == 1:
                print(
                    f"seed {seed}: {report.phase} ({report.reason}: {report.message}) "
                    f"after {report.virtual_seconds:.1f} virtual seconds, {report.events} events, "
                    f"{report.rounds} rounds, {report.nodes} nodes, "
                    f"{report.master_crashes} deaths of the master"
                )
        if arguments.verbose:
            print("\n".join(render(line) for line in cluster.trace))
    if arguments.count > 1:
        print(f"{arguments.count} seeds, {broken} broken; " + ", ".join(f"{n} {r}" for r, n in endings.most_common()))
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
