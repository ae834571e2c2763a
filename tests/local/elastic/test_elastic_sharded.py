"""A sharded model in the elastic loop: a lost shard comes back from memory, dealt to whoever is there."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from tests.local.resile_run import PATIENCE, Runs, kill, opened, wait_until

pytestmark = pytest.mark.timeout(600)

CALM = "--recovery-budget=30"
LONG = 4 * PATIENCE

TRAIN = """
from probe import *
import warnings
warnings.simplefilter("ignore")
import torch
import torch.distributed as dist
import torch._dynamo.config  # shards ask for it: once in a standby, and not again in every process
from torch.distributed.fsdp import fully_shard
torch.set_num_threads(1)
from resile.torch import Checkpointer, Elastic, ElasticBatchSampler

SIZE = 720


def build():
    torch.manual_seed(7)
    layers = [torch.nn.Linear(8, 17), torch.nn.ReLU(), torch.nn.Linear(17, 2)]
    model = torch.nn.Sequential(*layers)
    if dist.is_initialized():
        for part in (layers[0], layers[2], model):
            fully_shard(part)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 20)


class Seen:
    '''What entered the model, kept with the model.'''

    def __init__(self):
        self.steps = []

    def state_dict(self):
        return {"steps": self.steps}

    def load_state_dict(self, state):
        self.steps = list(state["steps"])


data = torch.Generator().manual_seed(1)
inputs, labels = torch.randn(SIZE, 8, generator=data), torch.randint(0, 2, (SIZE,), generator=data)
sampler, seen = ElasticBatchSampler(SIZE, global_batch_size=12), Seen()


def before_step():
    torch.nn.utils.clip_grad_norm_(elastic.model.parameters(), 1.0)  # a collective of its own, in the shards' group
    seen.steps.append([sampler.completed, share.total])


checkpointer = Checkpointer(os.path.join(HERE, sys.argv[1]), store_every=10)
elastic = Elastic(build=build, sampler=sampler, state={"seen": seen}, before_step=before_step,
                  checkpointer=checkpointer)
last = -1
for share, batch in elastic.epochs(1, sampler):
    if elastic.round != last:
        last = elastic.round
        note("round", step=elastic.completed, round=last, now_rank=elastic.rank, now_world=elastic.world)
    with elastic.step():
        if there(f"stop{elastic.completed}"):
            checkpointer.before_update()  # whoever is killed here has saved what it completed
            note("stopped", step=elastic.completed, now_rank=elastic.rank, now_world=elastic.world, round=elastic.round)
            while there(f"stop{elastic.completed}") and not elastic.lost:
                time.sleep(0.01)
        loss = torch.nn.functional.cross_entropy(elastic.model(inputs[batch]), labels[batch])
        (loss * share.weight).backward()
tensors = [t.full_tensor() if hasattr(t, "full_tensor") else t for t in elastic.model.state_dict().values()]
numbers = torch.cat([t.flatten() for t in tensors]).tolist()
note("end", model=numbers, seen=seen.steps, steps=elastic.completed)
"""


def stopped(runs: Runs, step: int, world: int, after: int = 0) -> dict[int, dict[str, Any]]:
    """All ranks of a world of this size, as soon as they are in the middle of the step after `step` steps."""

    def found() -> dict[int, dict[str, Any]]:
        notes = [n for n in runs.notes("stopped") if n["step"] == step and n["now_world"] == world]
        newest = max((n["round"] for n in notes), default=0)
        ranks = {n["now_rank"]: n for n in notes if n["round"] == newest}
        return ranks if newest > after and len(ranks) == world else {}

    return wait_until(found, f"{world} ranks in step {step}; heard {runs.notes('round')}", LONG)


def go_on(runs: Runs, step: int, until: int) -> None:
    """Let those that are stopped in a step train until another one."""
    runs.release(f"stop{until}")
    (runs.directory / f"stop{step}").unlink()


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The model of an undisturbed run."""
    with opened(tmp_path_factory.mktemp("calm")) as runs:
        words = [sys.executable, runs.script(TRAIN), "storage"]
        done = subprocess.run(words, cwd=runs.directory, capture_output=True, timeout=LONG, check=False)
        assert done.returncode == 0, done.stderr.decode()
        (end,) = runs.notes("end")
        return end["model"]


def check_ends(runs: Runs, processes: int, calm: list[float]) -> None:
    """All that are there in the end have seen every sample once, and have the model of an undisturbed run."""
    ends = runs.notes("end")
    assert len(ends) == processes
    seen = [[start, 12] for start in range(0, 720, 12)]
    assert all(end["seen"] == seen and end["steps"] == 60 for end in ends), "every sample, once"
    assert all(end["model"] == pytest.approx(calm, rel=1e-4, abs=1e-5) for end in ends)


def test_shards_of_a_lost_rank_come_back_from_memory_and_are_dealt_to_those_that_are_there(
    runs: Runs, calm: list[float]
) -> None:
    runs.script(TRAIN)
    runs.release("stop23")
    run = runs.start("--nproc-per-node=3", "--max-restarts=9", CALM, "train.py", "storage")
    three = stopped(runs, 23, 3)
    round_ = three[0]["round"]
    kill(three[1]["pid"])
    two = stopped(runs, 23, 2, after=round_)
    assert {two[rank]["pid"] for rank in two} == {three[0]["pid"], three[2]["pid"]}, "in their own processes"
    again = stopped(runs, 23, 3, after=two[0]["round"])
    assert {n["step"] for n in runs.notes("round") if n["round"] > round_} == {23}, "no step is lost"
    for rank in again.values():
        kill(rank["pid"])
    last = stopped(runs, 23, 3, after=again[0]["round"])
    (runs.directory / "stop23").unlink()
    assert {n["step"] for n in runs.notes("round") if n["round"] == last[0]["round"]} == {23}, "nor if all are killed"
    assert run.wait(LONG) == 0, run.err
    check_ends(runs, 3, calm)


LATE = """
if ATTEMPT > 0:  # whoever replaces another one
    wait_for(f"go{ATTEMPT}")
"""


def test_a_second_world_of_the_same_size_with_other_ranks_saves_its_own_shards(runs: Runs, calm: list[float]) -> None:
    runs.script(TRAIN.replace("SIZE = 720", LATE + "SIZE = 720"))
    runs.release("stop5")
    run = runs.start("--nproc-per-node=3", "--max-restarts=9", CALM, "train.py", "storage")
    three = stopped(runs, 5, 3)
    survivor = three[1]["pid"]
    kill(three[0]["pid"])
    two = stopped(runs, 5, 2, after=three[0]["round"])
    assert two[0]["pid"] == survivor
    go_on(runs, 5, until=10)
    stopped(runs, 10, 2)
    runs.release("go1")
    three = stopped(runs, 10, 3)
    kill(three[2]["pid"])
    two = stopped(runs, 10, 2, after=three[0]["round"])
    assert two[1]["pid"] == survivor, "it has another rank in the second world of two"
    go_on(runs, 10, until=15)
    stopped(runs, 15, 2)
    kill(two[0]["pid"])
    alone = stopped(runs, 15, 1)
    assert alone[0]["pid"] == survivor
    begun = {n["step"] for n in runs.notes("round") if n["round"] > two[0]["round"]}
    assert begun == {15}, "what the second world of two has saved is whole"
    (runs.directory / "stop15").unlink()
    assert run.wait(LONG) == 0, run.err
    check_ends(runs, 1, calm)


DIES = """
from resile.torch._loop.collectives import Collectives
from resile.torch._checkpoint.save_group import SaveStatus
gather = Collectives.gather


def dying(self, row):
    saves = RANK == 1 and elastic.completed == 23 and len(row) == len(SaveStatus._fields)
    ends = RANK == 2 and elastic.completed == 60 and len(row) == 1
    if ATTEMPT == 0 and (saves or ends):
        note("dies", step=elastic.completed)
        os.kill(os.getpid(), 9)
    return gather(self, row)


Collectives.gather = dying
"""


def test_a_rank_lost_while_the_others_agree_on_a_save_is_a_loss_like_any_other(runs: Runs) -> None:
    runs.script(TRAIN.replace("SIZE = 720", DIES + "SIZE = 720"))
    run = runs.start("--nproc-per-node=3", "--max-restarts=9", CALM, "train.py", "storage")
    assert run.wait(LONG) == 0, run.err
    assert [(note["rank"], note["step"]) for note in runs.notes("dies")] == [(1, 23), (2, 60)]
    died = {note["pid"] for note in runs.notes("dies")}
    ends = runs.notes("end")
    first = {note["pid"] for note in runs.notes("round") if note["step"] == 0} - died
    assert first <= {note["pid"] for note in ends}, "who was not killed goes on in its own process"
    seen = [[start, 12] for start in range(0, 720, 12)]
    assert all(end["seen"] == seen and end["steps"] == 60 for end in ends), "every sample, once"
