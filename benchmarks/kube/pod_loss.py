"""`kubectl delete pod` of a worker in training: to its replacement, and to the next step, with and without room for it.

The clock starts with kubectl. The next step is the first one of a process that began after the deletion: what the old
processes still do does not count. Workers are deleted right after the first steps of all.
"""

from __future__ import annotations

import statistics
import time

import msgspec

from benchmarks.harness import Row, say, wait_for
from benchmarks.kube import dlrover_figures
from benchmarks.kube.namespace import BenchNamespace
from benchmarks.kube.training import FEWEST, WORKERS, Training

REPLACEMENT_BAR_SECONDS = 0.5
STEP_BAR_SECONDS = 6.0
ROOM = "resile.dev/bench-room"
"""What each worker asks one of, and the nodes run out of."""


class Loss(msgspec.Struct, frozen=True):
    """Seconds after the deletion."""

    replaced: float
    stepped: float


def run(quick: bool) -> list[Row]:
    losses: list[Loss] = []
    no_room: list[Loss] = []
    times = 1 if quick else WORKERS
    with (
        BenchNamespace("lose") as namespace,
        namespace.room(ROOM, WORKERS) as room,
        Training(namespace, "lose") as training,
    ):
        namespace.apply(training.manifest({"limits": {ROOM: "1"}}))
        training.whole(since=0.0)
        for rank in [*range(times)] * 2:  # each place in turn: the one of rank 0 is where the others meet
            losses.append(_lose(namespace, training, rank))
        for rank in range(times):
            room.offer(0)
            no_room.append(_lose(namespace, training, rank, world=FEWEST))
            again = time.time()
            room.offer(WORKERS)
            training.whole(since=again)
    return [
        _row("worker deleted, to its replacement's pod", [loss.replaced for loss in [*losses, *no_room]]),
        _row("… to the next step", [loss.stepped for loss in losses]),
        _row("… to the next step, no room for it", [loss.stepped for loss in no_room]),
    ]


BARS = {
    "worker deleted, to its replacement's pod": (REPLACEMENT_BAR_SECONDS, dlrover_figures.REPLACEMENT),
    "… to the next step": (STEP_BAR_SECONDS, dlrover_figures.NEXT_STEP),
    "… to the next step, no room for it": (STEP_BAR_SECONDS, dlrover_figures.NEXT_STEP_NO_ROOM),
}


def _row(measure: str, seconds: list[float]) -> Row:
    bar, theirs = BARS[measure]
    return Row(
        measure=measure,
        value=max(seconds),
        median=statistics.median(seconds),
        unit="s",
        bar=bar,
        peer=theirs,
        note=f"{', '.join(f'{each:.2f}' for each in seconds)} s",
    )


def _lose(namespace: BenchNamespace, training: Training, rank: int, world: int = WORKERS) -> Loss:
    """Delete the worker at a place and wait until `world` workers train again."""
    victim = next(step for step in reversed(training.steps) if step.rank == rank)
    deleted = namespace.delete_pod(victim.pod)
    replaced = wait_for(
        f"the replacement of {victim.pod}",
        lambda: next((at for at in tuple(training.pods.created.values()) if at > deleted), None),
    )
    stepped = training.first(lambda step: step.begun > deleted, what="the next step")
    firsts = training.whole(since=deleted, world=world)
    loss = Loss(replaced - deleted, stepped.at - deleted)
    whole = min(step.at for step in firsts) - deleted
    say(
        f"lose: rank {rank}: replaced after {loss.replaced:.2f} s, "
        f"a step of {stepped.world} after {loss.stepped:.2f} s, of {world} after {whole:.2f} s"
    )
    return loss
