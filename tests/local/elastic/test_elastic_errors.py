"""What is the loss of a peer and what is not: an error that no new round can mend is raised where it came from."""

from __future__ import annotations

import pytest

from tests.local.resile_run import PATIENCE, Runs

pytestmark = pytest.mark.timeout(600)

CALM = "--recovery-budget=30"
LONG = 4 * PATIENCE

TRAIN = """
from probe import *
import torch
import torch.distributed as dist
torch.set_num_threads(1)
from resile.torch import Elastic

model = torch.nn.Linear(4, 2)
elastic = Elastic(model, torch.optim.SGD(model.parameters(), lr=0.01))
last = 0
for step in elastic.steps(10**9):
    if elastic.round != last:
        last = elastic.round
        note("round", round=last, step=step, now_world=elastic.world)
    with elastic.step():
        if there("culprit") and open(os.path.join(HERE, "culprit")).read() == str(os.getpid()):
            if ATTEMPT:
                dist.all_gather([torch.zeros(3)] * 2, torch.zeros(2))  # which is refused, each time
            raise RuntimeError("a shape that does not fit")
        model(torch.ones(3, 4)).sum().backward()
    if elastic.completed == 5 and elastic.world == 2 and elastic.rank == 1:
        with open(os.path.join(HERE, "culprit"), "w") as file:
            file.write(str(os.getpid()))
    elif ATTEMPT and elastic.stepped and not there("second"):
        open(os.path.join(HERE, "second"), "w").close()
        with open(os.path.join(HERE, "culprit"), "w") as file:
            file.write(str(os.getpid()))
    time.sleep(0.02)
"""


def test_an_error_of_the_script_or_of_its_own_collectives_is_raised_and_costs_nobody_else(runs: Runs) -> None:
    runs.script(TRAIN)
    run = runs.start("--nproc-per-node=2", "--max-restarts=1", CALM, "train.py")
    assert run.wait(LONG) == 1
    rounds = runs.notes("round")
    first = next(n["pid"] for n in rounds if n["attempt"] == 0 and [o["pid"] for o in rounds].count(n["pid"]) == 1)
    assert f"(pid {first}) ended with exit code 1" in run.err
    assert "a shape that does not fit" in run.err
    assert len([n for n in rounds if n["attempt"] == 1]) == 1, "nobody met again because of it"
    assert "invalid tensor size" in run.err, "an error of a collective, but of no peer"
    assert "GroupLost: gradients were not averaged" not in run.err, "the other one lives on, with its state"


STORES = """
from probe import *
note("start")
import torch
torch.set_num_threads(1)
from resile.torch import Checkpointer, Elastic

model = torch.nn.Linear(4, 2)
checkpointer = Checkpointer("/proc/resile", store_every=1)
elastic = Elastic(model, torch.optim.SGD(model.parameters(), lr=0.01), checkpointer=checkpointer)
for step in elastic.steps(2):
    note("step", step=step)
    with elastic.step():
        model(torch.ones(3, 4)).sum().backward()
"""


def test_a_training_whose_steps_can_never_be_stored_ends_before_its_first_with_a_sentence(runs: Runs) -> None:
    runs.script(STORES)
    run = runs.start("--nproc-per-node=2", "--max-restarts=9", CALM, "train.py")
    assert run.wait(LONG) == 1
    assert runs.notes("step") == []
    assert len(runs.notes("start")) == 2, "nothing is started again: it could not be mended"
    assert "_loop/rendezvous.py" not in run.err, "tracebacks and report show the script's own lines"
    why = "NotWritable: checkpoints cannot be stored in /proc/resile: No such file or directory"
    assert f" why {why} " in " ".join(run.err.split()), run.err  # however wide the report is
    assert "trying again" not in run.err
