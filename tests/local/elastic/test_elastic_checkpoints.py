"""The elastic loop and its checkpoints: when nobody is left who has the state, training goes on from the newest one."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from resile.checkpoint.storage import Storage
from tests.local.resile_run import PATIENCE, Run, Runs, kill, wait_until

pytestmark = pytest.mark.timeout(600)

CALM = "--recovery-budget=30"
LONG = 4 * PATIENCE
STEPS = 60

TRAIN = """
from probe import *
import hashlib
import torch
torch.set_num_threads(1)
from resile.torch import Checkpointer, Elastic, ElasticBatchSampler

SIZE = 240
torch.manual_seed(7 + ATTEMPT)  # a replacement begins elsewhere: what it has in the end is not its own
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.ReLU(), torch.nn.Linear(16, 2))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 20)
data = torch.Generator().manual_seed(1)
inputs, labels = torch.randn(SIZE, 8, generator=data), torch.randint(0, 2, (SIZE,), generator=data)
sampler = ElasticBatchSampler(SIZE, global_batch_size=8)


class Seen:
    '''What entered the model, kept with the model.'''

    def __init__(self):
        self.steps = []

    def state_dict(self):
        return {"steps": self.steps}

    def load_state_dict(self, state):
        self.steps = list(state["steps"])


seen = Seen()
elastic = Elastic(model, optimizer, sampler=sampler, scheduler=scheduler, state={"seen": seen},
                  checkpointer=Checkpointer(os.path.join(HERE, sys.argv[1]), store_every=20), every=5,
                  before_step=lambda: seen.steps.append([sampler.epoch, sampler.completed, share.total]))
last = 0
for share, batch in elastic.epochs(2, sampler):
    if elastic.round != last:
        last = elastic.round
        note("round", step=elastic.completed, round=last, now_rank=elastic.rank, now_world=elastic.world)
    with elastic.step():
        if there(f"stop{elastic.completed}"):
            note("stopped", step=elastic.completed)
            while there(f"stop{elastic.completed}") and not elastic.lost:
                time.sleep(0.01)
        loss = torch.nn.functional.cross_entropy(model(inputs[batch]), labels[batch])
        (loss * share.weight).backward()
words = hashlib.sha256()
for name, tensor in sorted(model.state_dict().items()):
    words.update(name.encode() + tensor.numpy().tobytes())
note("end", model=words.hexdigest(), seen=seen.steps, steps=elastic.completed, lr=scheduler.get_last_lr())
"""

ALONE = """
from probe import *
if ATTEMPT:
    wait_for("come")
import torch
torch.set_num_threads(1)
from resile.torch import Checkpointer, Elastic

model = torch.nn.Linear(4, 2)
elastic = Elastic(model, torch.optim.SGD(model.parameters(), lr=0.01), checkpointer=Checkpointer())
first = True
for step in elastic.steps(40):
    with elastic.step():
        if there(f"stop{step}"):
            note("stopped", step=step)
            while there(f"stop{step}") and not elastic.lost:
                time.sleep(0.01)
        model(torch.ones(3, 4)).sum().backward()
    if first:
        first = False
        note("first", step=step, numbers=model.weight.tolist())
"""


def nodes(runs: Runs) -> list[Run]:
    words = ("--max-restarts=9", CALM, "train.py", "storage")
    return [runs.node(*words, nnodes="2:2") for _ in range(2)]


def stopped(runs: Runs, step: int) -> list[dict[str, Any]]:
    """Both ranks, as soon as they are in the middle of the step after `step` steps."""

    def found() -> list[dict[str, Any]]:
        notes = [note for note in runs.notes("stopped") if note["step"] == step]
        return notes[-2:] if len(notes) >= 2 else []

    return wait_until(found, f"both ranks in step {step}; heard {runs.notes('round')}", LONG)


def begun(runs: Runs, after: int) -> set[int]:
    """The steps with which both ranks began the first round after `after`."""

    def found() -> set[int]:
        rounds = [note for note in runs.notes("round") if note["round"] > after]
        first = [note for note in rounds if note["round"] == min(each["round"] for each in rounds)]
        return {note["step"] for note in first} if len(first) == 2 else set()

    return wait_until(found, f"a round of two after {after}", LONG)


def newest_round(runs: Runs) -> int:
    return max(note["round"] for note in runs.notes("round"))


def go_on(runs: Runs, step: int) -> None:
    (runs.directory / f"stop{step}").unlink()


def test_training_goes_on_from_the_living_from_memory_and_from_storage_as_if_nothing_had_been(runs: Runs) -> None:
    runs.script(TRAIN)
    for step in (13, 27, 47):
        runs.release(f"stop{step}")
    first = nodes(runs)

    ranks = stopped(runs, 13)
    round_ = newest_round(runs)
    kill(ranks[0]["pid"])
    assert begun(runs, round_) == {13}, "of the one that lives, although step 10 is in memory"
    storage = Storage(runs.directory / "storage")
    wait_until(lambda: {10, 13} & set(storage.steps()), "what was in memory to be in storage, too", LONG)
    go_on(runs, 13)

    ranks = stopped(runs, 27)
    round_ = newest_round(runs)
    for rank in ranks:
        kill(rank["pid"])
    assert begun(runs, round_) == {25}, "from memory, although step 20 is in storage"
    go_on(runs, 27)

    stopped(runs, 47)
    wait_until(lambda: 40 in storage.steps(), "step 40 in storage", LONG)
    for pid in (runs.supervisor(), runs.master(), *(node.pid for node in first)):
        kill(pid)  # and the memory is gone
    for node in first:
        node.wait(LONG)
    begun_before = len(runs.notes("round"))
    second = nodes(runs)
    wait_until(lambda: len(runs.notes("round")) == begun_before + 2, "both ranks of the second run", LONG)
    assert {note["step"] for note in runs.notes("round")[begun_before:]} == {40}, "from storage"
    go_on(runs, 47)
    for node in second:
        assert node.wait(LONG) == 0, node.err
    ends = runs.notes("end")
    assert len(ends) == 2
    seen = [[epoch, start, 8] for epoch in range(2) for start in range(0, 240, 8)]
    assert all(end["seen"] == seen and end["steps"] == STEPS for end in ends), "every sample of both epochs, once"

    calm = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "train.py", "calm"]
    done = subprocess.run(calm, cwd=runs.directory, capture_output=True, timeout=LONG, check=False)
    assert done.returncode == 0, done.stderr.decode()
    assert {end["model"] for end in runs.notes("end")} == {ends[0]["model"]}, "bit by bit that of an undisturbed run"
    assert storage.steps()[-1] == STEPS
    assert Storage(runs.directory / "calm").steps()[-1] == STEPS, "the last step, under plain torchrun"


def test_memory_has_the_last_step_also_of_a_process_that_was_left_alone_on_its_node(runs: Runs) -> None:
    runs.script(ALONE)
    runs.release("stop10")
    run = runs.start("--nproc-per-node=2", "--max-restarts=9", CALM, "train.py")
    ranks = {note["rank"]: note["pid"] for note in stopped(runs, 10)}
    runs.release("stop30")
    kill(ranks[0])  # the one that keeps what both have alike
    go_on(runs, 10)
    last = wait_until(lambda: [n for n in runs.notes("stopped") if n["step"] == 30], "the other one, alone", LONG)
    assert last[0]["pid"] == ranks[1]
    kill(ranks[1])
    runs.release("come")
    go_on(runs, 30)
    assert run.wait(LONG) == 0, run.err
    again = [note for note in runs.notes("first") if note["attempt"]]
    assert [note["step"] for note in again] == [30, 30]
    assert again[0]["numbers"] == again[1]["numbers"]
