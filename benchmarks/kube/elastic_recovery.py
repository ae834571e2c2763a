"""Elastic training in pods: a pod deleted, or a process killed in one, to the next step of those that are left.

Every step is stamped with its round, and only a step of a round that formed after the loss counts, of the last survivor
to take one. The clock of a deletion starts with kubectl. That of a kill starts in the pod, just before it: the way of
kubectl there is not counted.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable

from benchmarks.harness import Row, say, wait_for
from benchmarks.kube import dlrover_figures
from benchmarks.kube.namespace import BenchNamespace
from benchmarks.kube.training import ELASTIC, START_SECONDS, STEADY, WORKERS, Step, Training

DELETED_BAR_SECONDS = 0.5
KILLED_BAR_SECONDS = 0.3


def run(quick: bool) -> list[Row]:
    deleted: list[float] = []
    killed: list[float] = []
    with BenchNamespace("regroup") as namespace, Training(namespace, "regroup", ELASTIC) as training:
        namespace.apply(training.manifest())
        for number in range(1 if quick else 2 * WORKERS):
            rank = number % WORKERS  # each place in turn: that of rank 0 hosts the store of the others
            deleted.append(_lose(training, rank, "pod deleted", lambda victim: namespace.delete_pod(victim.pod)))
            killed.append(_lose(training, rank, "process killed", lambda victim: _kill(namespace, victim)))
    return [
        _row(
            "elastic: pod deleted, to the survivors' next step", deleted, DELETED_BAR_SECONDS, dlrover_figures.NEXT_STEP
        ),
        _row("elastic: process killed in a pod, to the same", killed, KILLED_BAR_SECONDS, dlrover_figures.KILLED_STEP),
    ]


def _row(measure: str, seconds: list[float], bar: float, theirs: float) -> Row:
    return Row(
        measure=measure,
        value=max(seconds),
        median=statistics.median(seconds),
        unit="s",
        bar=bar,
        peer=theirs,
        note=f"{', '.join(f'{each:.2f}' for each in seconds)} s",
    )


def _lose(training: Training, rank: int, what: str, strike: Callable[[Step], float]) -> float:
    """Have all workers train, lose the one at a place, and see how long the others need; `strike` says when it was."""
    world = _whole(training)
    lost = world[rank]
    at = strike(lost)
    left = {step.pod for step in world} - {lost.pod}
    took = _stepped(training, left, lost.round) - at
    say(f"regroup: rank {rank}: {what}: the others step after {took:.3f} s")
    return took


def _kill(namespace: BenchNamespace, victim: Step) -> float:
    """Kill the training process of a pod from inside; the moment just before it."""
    command = f'echo "$EPOCHREALTIME"; kill -9 {victim.pid}'
    return float(namespace.kubectl("exec", victim.pod, "--", "bash", "-c", command))


def _whole(training: Training) -> list[Step]:
    """The newest step of every rank, once all workers have trained for a while in the newest round."""

    def found() -> list[Step] | None:
        steps = tuple(training.steps)
        newest = max((step.round for step in steps), default=0)
        of_round = [step for step in steps if step.round == newest and step.world == WORKERS]
        ranks = [[step for step in of_round if step.rank == rank] for rank in range(WORKERS)]
        return [each[-1] for each in ranks] if all(len(each) >= STEADY for each in ranks) else None

    return wait_for(f"training by {WORKERS}", found, START_SECONDS, 0.05)


def _stepped(training: Training, pods: set[str], after: int) -> float:
    """When the last of these pods took its first step in a newer round."""

    def found() -> float | None:
        firsts: dict[str, float] = {}
        for step in tuple(training.steps):
            if step.pod in pods and step.round > after:
                firsts.setdefault(step.pod, step.at)
        return max(firsts.values()) if firsts.keys() == pods else None

    return wait_for("the survivors' next step", found, START_SECONDS, 0.05)
