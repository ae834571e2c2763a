"""Elastic data for real: workers that read ahead, ranks that are killed, a model that counts what enters it."""

from __future__ import annotations

import re

import pytest

from tests.local.resile_run import PATIENCE, Run, Runs, alive, kill, parent_of, wait_until
from tests.support.paths import ROOT

pytestmark = pytest.mark.timeout(600)

GPT = str(ROOT / "examples" / "gpt" / "train.py")
CALM = "--recovery-budget=30"
"""An agent that gets no time from a busy machine for some seconds is not to be taken for dead here."""
LONG = 4 * PATIENCE
THREADS = {"OMP_NUM_THREADS": "1"}

COUNTS = """
from probe import *
import torch
torch.set_num_threads(1)
from torch.utils.data import IterableDataset
from resile.torch import Elastic, ElasticLoader

SIZE, EPOCHS, BATCH = 236, 3, 8


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(SIZE))


model = torch.nn.Embedding(SIZE, 1, dtype=torch.float64)
torch.nn.init.zeros_(model.weight)
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
loader = ElasticLoader(Stream(), global_batch_size=BATCH, micro_batch_size=2, shuffle_block=50, num_workers=2)
elastic = Elastic(model, optimizer, sampler=loader)
last = 0
for step in elastic.epochs(EPOCHS, loader):
    with elastic.step():
        time.sleep(0.02)
        while elastic.completed >= 40 and elastic.round == last and not there("release") and not elastic.lost:
            time.sleep(0.02)  # one step in every round, until the test has done what it wants
        for share, numbers in step:  # each sample that enters the model adds 1 / total to its own weight
            (-model(numbers).mean() * share.weight).backward()
    if elastic.stepped and elastic.round != last:
        last = elastic.round
        note("step", step=elastic.completed, round=elastic.round, now_rank=elastic.rank, now_world=elastic.world)
tail = SIZE % BATCH  # the last step of an epoch has fewer samples, which weigh more
note("end", steps=elastic.completed, weights=model.weight.flatten().tolist(), tail=tail, batch=BATCH, epochs=EPOCHS)
"""


def world_of(runs: Runs, size: int, after: int) -> dict[int, dict[str, int]]:
    """The processes that stepped together in a round newer than `after`, when all of them have."""

    def complete() -> dict[int, dict[str, int]]:
        rounds: dict[int, dict[int, dict[str, int]]] = {}
        for note in runs.notes("step"):
            if note["now_world"] == size and note["round"] > after:
                rounds.setdefault(note["round"], {})[note["now_rank"]] = note
        return next((each for _, each in sorted(rounds.items()) if len(each) == size), {})

    return wait_until(complete, f"steps of {size} processes in a round after {after}", LONG)


def test_every_sample_of_a_stream_enters_the_model_once_although_workers_had_read_ahead_for_another_world(runs: Runs):
    run = runs.start("--nproc-per-node=3", "--max-restarts=5", CALM, runs.script(COUNTS), env=THREADS)
    three = world_of(runs, 3, after=0)
    kill(three[1]["pid"])
    two = world_of(runs, 2, after=three[0]["round"])
    again = world_of(runs, 3, after=two[0]["round"])
    kill(again[0]["pid"])
    world_of(runs, 3, after=again[0]["round"])
    runs.release()
    assert run.wait(LONG) == 0, run.err
    ends = runs.notes("end")[-3:]
    assert len(ends) == 3
    for end in ends:
        assert end["weights"] == ends[0]["weights"]
        assert end["steps"] == 90
    # A sample adds 1/8 in an epoch, or 1/4 if it was in the epoch's last step, which had only four.
    eighths = [round(8 * weight, 9) for weight in ends[0]["weights"]]
    assert {number % 1 for number in eighths} == {0.0}
    assert all(3 <= number <= 6 for number in eighths)
    assert sum(number - 3 for number in eighths) == 3 * 4, "four samples of every epoch weigh twice as much, no others"


# the example that uses all of it -------------------------------------------------------------------------------------

SMALL = ("--characters=20000", "--context=64", "--width=32", "--layers=2", "--heads=2", "--batch=16", "--log-every=10")
FINISHED = re.compile(r"training finished: rank = \d of (\d), steps = (\d+), loss = \S+, weights = (\w+)")


def training_process(runs: Runs, node: Run) -> int:
    """The process of the script on a node, not one that loads its data."""
    return next(pid for pid, words in runs.left_over().items() if GPT in words and parent_of(pid) == node.pid)


def test_a_gpt_that_loses_a_rank_ends_with_the_weights_of_an_undisturbed_run(runs: Runs):
    words = (CALM, GPT, *SMALL, "--epochs=3", "--micro-batch=3", "--write=40")
    more = ("--workers=1", "--step-delay=0.1", "--checkpoints=checkpoints")
    nodes = [runs.node("--max-restarts=3", *words, *more, nnodes="2:2", env=THREADS) for _ in range(2)]
    wait_until(lambda: "step = 11," in nodes[0].out, f"training; it says {nodes[0].err}", LONG)
    lost, stays = training_process(runs, nodes[1]), training_process(runs, nodes[0])
    kill(lost)
    wait_until(lambda: "step = 51," in nodes[1].out, "training after the loss", LONG)
    assert alive(stays)
    for node in nodes:
        assert node.wait(LONG) == 0, node.err
    # Where processes may be replaced, those of a node share one import of torch.
    calm = runs.start("--standalone", "--nproc-per-node=2", "--max-restarts=1", *words, env=THREADS)
    assert calm.wait(LONG) == 0, calm.err
    ends = [FINISHED.findall(node.out) for node in (*nodes, calm)]
    assert [len(each) for each in ends] == [1, 1, 2]
    assert {end for each in ends for end in each} == {("2", "60", ends[0][0][2])}, "bit by bit"
    losses = [float(loss) for loss in re.findall(r"^loss = (\S+),", calm.out, re.M)]
    assert losses[-1] < losses[0] - 0.5
    assert re.search(r"^def ", calm.out, re.M)
    assert (runs.directory / "checkpoints").is_dir()
    runs.nothing_is_left()
