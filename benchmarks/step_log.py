"""The steps of an elastic training as its processes write them down, and the moments that benchmarks look for in them.

Each process appends one line per step to a file that is named after its pid: when the step was completed, in which
round, by how many ranks and by which rank. A step counts for a recovery only in a round that is newer than the fault:
the last step of the old round may have been under way.
"""

from __future__ import annotations

from collections.abc import Container
from pathlib import Path

import msgspec

from benchmarks.harness import Workplace, wait_for

START_SECONDS = 180.0
"""For torch to start and step, on a machine that has other work."""
STEADY = 20
"""Steps of a round before something is done to it."""
SCRIPT = """
import os, sys, time
import torch
torch.set_num_threads(1)
from resile.torch import Elastic

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10))
for number in range(int(sys.argv[1]) if len(sys.argv) > 1 else 0):  # MiB that do not change, and belong to the state
    model.register_parameter(f"frozen{number}", torch.nn.Parameter(torch.full((1 << 18,), number / 9), False))
elastic = Elastic(model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9))
attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"]) + 1
with open(f"steps.{os.getpid()}", "a", buffering=1) as steps:
    for step in elastic.steps(10**9):
        with elastic.step():
            torch.nn.functional.cross_entropy(model(torch.randn(32, 256)), torch.randint(10, (32,))).backward()
        time.sleep(0.01)
        if elastic.stepped:
            steps.write(f"{time.monotonic()} {elastic.round or attempt} {elastic.world} {elastic.rank} {step}\\n")
"""


class Step(msgspec.Struct, frozen=True):
    """One line of a process's file."""

    at: float
    round: int
    world: int
    rank: int


class World(msgspec.Struct, frozen=True):
    """Processes that stepped together: pid and the newest step of each."""

    round: int
    members: dict[int, Step]

    def pid_of(self, rank: int) -> int:
        """The process that has this rank."""
        return next(pid for pid, step in self.members.items() if step.rank == rank)


def read_steps(path: Path) -> list[Step]:
    """The whole lines of one process's file; the last may be half written."""
    whole = path.read_bytes().rpartition(b"\n")[0].decode().splitlines()
    return [Step(float(at), int(round_), int(world), int(rank)) for at, round_, world, rank, _ in map(str.split, whole)]


def all_steps(place: Workplace) -> dict[int, list[Step]]:
    """The steps of every process so far, by pid."""
    return {int(path.suffix[1:]): read_steps(path) for path in place.path.glob("steps.*")}


def steady_world(place: Workplace, world: int, after: int = 0) -> World:
    """A world of this size that has taken some steps in a round newer than `after`."""

    def found() -> World | None:
        logs = all_steps(place)
        newest = max((steps[-1].round for steps in logs.values() if steps), default=0)
        members = {
            pid: steps[-1]
            for pid, steps in logs.items()
            if len(steps) >= STEADY and steps[-STEADY].round == newest and steps[-1].world == world
        }
        return World(newest, members) if newest > after and len(members) == world else None

    return wait_for(f"{STEADY} steps of {world} ranks", found, START_SECONDS, 0.1)


def next_step(place: Workplace, pids: set[int], after: int) -> float:
    """When the last of these processes took its first step in a round newer than `after`."""

    def found() -> float | None:
        firsts = [_first(read_steps(place.path / f"steps.{pid}"), after) for pid in pids]
        return None if None in firsts else max(first for first in firsts if first is not None)

    return wait_for("the survivors' next step", found, START_SECONDS, 0.05)


def whole_world(place: Workplace, world: int, after: int, others_than: Container[int] = ()) -> float:
    """When so many ranks had stepped together again in a round newer than `after`, in other processes than some."""

    def found() -> float | None:
        rounds: dict[int, list[float]] = {}
        for steps in (steps for pid, steps in all_steps(place).items() if pid not in others_than):
            for round_ in {s.round for s in steps if s.round > after and s.world == world}:
                rounds.setdefault(round_, []).append(next(s.at for s in steps if s.round == round_))
        complete = [firsts for firsts in rounds.values() if len(firsts) == world]
        return min(map(max, complete)) if complete else None

    return wait_for(f"{world} ranks stepping together", found, START_SECONDS, 0.1)


def longest_pause(place: Workplace, pids: set[int], before: int) -> float:
    """The longest time between two steps of these processes around the end of round `before`."""
    pauses = []
    for pid in pids:
        steps = read_steps(place.path / f"steps.{pid}")
        last = max(n for n, step in enumerate(steps) if step.round <= before)
        pauses.append(steps[last + 1].at - steps[last].at)
    return max(pauses)


def _first(steps: list[Step], after: int) -> float | None:
    return next((step.at for step in steps if step.round > after), None)
