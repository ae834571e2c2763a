"""Whatever is killed or frozen, and whenever: the job ends well and the ledger is exact. By seed, in `make soak`."""

from __future__ import annotations

import os
import random
import signal
import time

import pytest

from tests.local.resile_run import Run, Runs, alive, kill, parent_of, wait_until
from tests.local.run.test_run_master import SHARDS, SIZE

SEEDS = range(int(os.environ.get("RESILE_CHAOS_SEED", "0")), int(os.environ.get("RESILE_CHAOS_SEED", "0")) + 10)
BLOWS = 12
EPOCHS = 30


class Chaos:
    """Strikes at random, but leaves enough nodes for the job to go on."""

    def __init__(self, runs: Runs, seed: int) -> None:
        self._runs = runs
        self._random = random.Random(seed)
        script = runs.script(SHARDS.replace("epochs=2", f"epochs={EPOCHS}"))
        self._words = ("--nproc-per-node=2", "--max-restarts=1000", script)
        self.nodes = [self._start() for _ in range(3)]

    def _start(self) -> Run:
        return self._runs.node(*self._words)

    def strike(self) -> None:
        blow = self._random.choice([self.process, self.process, self.agent, self.master, self.supervisor, self.freeze])
        blow()
        time.sleep(self._random.uniform(0.0, 1.5))  # the next blow may come at any moment of the recovery

    def process(self) -> None:
        living = [note["pid"] for note in self._runs.notes("start") if alive(note["pid"])]
        if living:
            kill(self._random.choice(living))

    def agent(self) -> None:
        victim = self.nodes.pop(self._random.randrange(len(self.nodes)))
        kill(victim.pid)
        self.nodes.append(self._start())

    def master(self) -> None:
        if master := self._runs.living_master():
            kill(master)

    def supervisor(self) -> None:
        if master := self._runs.living_master():
            kill(parent_of(master))
            kill(master)

    def freeze(self) -> None:
        victim = self._random.choice(self.nodes)
        kill(victim.pid, signal.SIGSTOP)
        time.sleep(self._random.uniform(0.1, 3.0))
        kill(victim.pid, signal.SIGCONT)


@pytest.mark.soak
@pytest.mark.parametrize("seed", SEEDS)
def test_a_job_survives_whatever_strikes_it(runs: Runs, seed: int) -> None:
    chaos = Chaos(runs, seed)
    wait_until(lambda: runs.notes("record"), "the first record")
    for _ in range(BLOWS):
        if len(runs.notes("record")) < SIZE * EPOCHS / 2:  # a node that came after the end would begin another run
            chaos.strike()
    for node in chaos.nodes:
        assert node.wait(60) == 0, f"{node.err}\n{runs.master_log}"
    (dataset,) = runs.ledger().ledger.datasets.values()
    assert dataset.complete
    assert dataset.done == SIZE * EPOCHS
    processed = {(note["epoch"], note["record"]) for note in runs.notes("record")}
    assert processed == {(epoch, record) for epoch in range(EPOCHS) for record in range(SIZE)}
    runs.nothing_is_left()
