"""A script with several loops: each is elastic, and a replacement finds its way to the one that others are in."""

from __future__ import annotations

import signal
import time
from typing import Any

import pytest

from resile.core.state import Waiting
from tests.local.resile_run import PATIENCE, Run, Runs, alive, kill, wait_until

pytestmark = pytest.mark.timeout(600)

CALM = "--recovery-budget=30"
WATCHFUL = "--recovery-budget=20"
"""Who is frozen is missed after 4 s."""
LONG = 4 * PATIENCE

TRAIN = """
from probe import *
import hashlib
import torch
torch.set_num_threads(1)
from resile.torch import Elastic

torch.manual_seed(os.getpid())
model = torch.nn.Linear(4, 2)
elastic = Elastic(model, torch.optim.SGD(model.parameters(), lr=0.01))
for loop, total in enumerate((5, 25, 30)):
    last = 0
    for step in elastic.steps(total):
        with elastic.step():
            while loop == 1 and elastic.round == last and not there("release") and not elastic.lost:
                time.sleep(0.01)  # one step in every round, until the test has done what it wants
            model(torch.randn(3, 4)).square().sum().backward()
        if elastic.stepped and elastic.round != last:
            last = elastic.round
            note("step", loop=loop, round=last, now_rank=elastic.rank, now_world=elastic.world)
    note("between", loop=loop)
    time.sleep(0.2)
note("end", steps=elastic.completed, model=hashlib.sha256(model.weight.detach().numpy().tobytes()).hexdigest())
"""


def stepped(runs: Runs, loop: int, world: int, after: int) -> dict[int, dict[str, Any]]:
    """The processes that stepped together in a loop, in a round newer than `after`, when all of them have."""

    def complete() -> dict[int, dict[str, Any]]:
        rounds: dict[int, dict[int, dict[str, Any]]] = {}
        for note in runs.notes("step"):
            if note["loop"] == loop and note["now_world"] == world and note["round"] > after:
                rounds.setdefault(note["round"], {})[note["now_rank"]] = note
        return next((each for _, each in sorted(rounds.items()) if len(each) == world), {})

    return wait_until(complete, f"steps of {world} processes in loop {loop} after round {after}", LONG)


def test_a_rank_lost_in_the_second_loop_is_replaced_and_the_other_goes_on_in_its_process(runs: Runs):
    run = runs.start("--nproc-per-node=2", "--max-restarts=3", CALM, runs.script(TRAIN))
    first = stepped(runs, loop=0, world=2, after=0)
    second = stepped(runs, loop=1, world=2, after=first[0]["round"])
    assert {note["pid"] for note in second.values()} == {note["pid"] for note in first.values()}
    kill(second[0]["pid"])
    alone = stepped(runs, loop=1, world=1, after=second[0]["round"])
    assert alone[0]["pid"] == second[1]["pid"]
    stepped(runs, loop=1, world=2, after=alone[0]["round"])
    runs.release()
    assert run.wait(LONG) == 0, run.err
    ends = runs.notes("end")
    assert len(ends) == 2
    assert {end["steps"] for end in ends} == {30}
    assert len({end["model"] for end in ends}) == 1
    assert "other parameters" not in run.err


THREE_STEPS = """
from probe import *
import torch
torch.set_num_threads(1)
from resile.torch import Elastic

model = torch.nn.Linear(4, 2)
elastic = Elastic(model, torch.optim.SGD(model.parameters(), lr=0.01))
for step in elastic.steps(3):
    with elastic.step():
        model(torch.randn(3, 4)).square().sum().backward()
"""

FAILS = (
    THREE_STEPS
    + """
note("evaluates", steps=elastic.completed)
if elastic.rank == 1 and not there("failed"):
    open(os.path.join(HERE, "failed"), "w").close()
    sys.exit(3)
wait_for("release")  # until the master has heard of that
"""
)


def test_a_script_that_fails_after_its_last_step_is_tried_again_on_all_nodes(runs: Runs):
    script = runs.script(FAILS)
    nodes = [runs.node("--max-restarts=1", CALM, script, nnodes="2:2") for _ in range(2)]
    wait_until(lambda: (runs.directory / "failed").exists() and runs.story("RoundOver"), "the end of the round", LONG)
    runs.release()
    assert [node.wait(LONG) for node in nodes] == [0, 0], nodes[0].err + nodes[1].err
    assert [note["steps"] for note in runs.notes("evaluates")] == [3] * 4


LATE = """
from probe import *
import torch
torch.set_num_threads(1)
from resile.torch import Elastic

model = torch.nn.Linear(4, 2)
elastic = Elastic(model, torch.optim.SGD(model.parameters(), lr=0.01))
note("begins")
for step in elastic.steps(3):
    with elastic.step():
        if elastic.completed == 1 and elastic.rank == 1:
            os.kill(os.getpid(), 9)
        model(torch.randn(3, 4)).square().sum().backward()
note("evaluates", steps=elastic.completed)
wait_for("release")
"""


def test_one_that_replaces_a_rank_lost_near_the_end_does_not_train_all_over_again(runs: Runs):
    run = runs.start("--nproc-per-node=2", "--max-restarts=1", CALM, runs.script(LATE))
    wait_until(lambda: len(runs.notes("begins")) == 3 and runs.notes("evaluates"), "one that comes too late", LONG)
    time.sleep(0.5)  # it says that it is ready, and nobody answers
    runs.release()
    assert run.wait(LONG) == 0, run.err
    assert [note["steps"] for note in runs.notes("evaluates")] == [3]
    assert "round 3" not in run.err


HELD_AT_THE_END = """
from probe import *
import torch
import torch.distributed as dist
torch.set_num_threads(1)
from resile.torch import Elastic
from resile.torch._loop.rendezvous import Rendezvous

if ATTEMPT > 0:  # the one that replaces rank 2
    wait_for("go")
complete = Rendezvous.complete


def held(self):
    if self.world == 2 and self.rank in HELD:
        note("held")
        while not self.round_over and not there("release"):
            time.sleep(0.01)
    complete(self)


Rendezvous.complete = held
model = torch.nn.Linear(4, 2)
elastic = Elastic(model, torch.optim.SGD(model.parameters(), lr=0.01))
note("begins")
for step in elastic.steps(3):
    with elastic.step():
        if elastic.completed == 1 and elastic.rank == 2:
            os.kill(os.getpid(), 9)
        model(torch.randn(3, 4)).square().sum().backward()
ranks = torch.ones(1)
dist.all_reduce(ranks)
note("end", ranks=int(ranks))
"""


@pytest.mark.parametrize(("held", "ranks"), [((0, 1), 3), ((1,), 2)], ids=["before-any", "after-one"])
def test_a_newcomer_that_comes_as_the_last_step_is_taken_breaks_no_collective_after_the_loop(
    runs: Runs, held: tuple[int, ...], ranks: int
) -> None:
    """It comes before any rank has said that the last step is taken, or after one has."""
    script = runs.script(HELD_AT_THE_END.replace("HELD", str(held)))
    run = runs.start("--nproc-per-node=3", "--max-restarts=1", CALM, script)
    waiting = wait_until(lambda: len(runs.notes("held")) == len(held) and runs.notes("held"), "the last step", LONG)
    runs.release("go")
    wait_until(lambda: len(runs.notes("begins")) == 4, "a replacement", LONG)
    if len(held) == 1:
        time.sleep(0.5)  # it says that it is ready, and nobody answers
        runs.release()
    assert run.wait(LONG) == 0, run.err
    ends = runs.notes("end")
    assert {end["ranks"] for end in ends} == {ranks}
    assert len(ends) == ranks, "no process was started again"
    assert {note["pid"] for note in waiting} <= {end["pid"] for end in ends}


HELD_IN_THE_BARRIER = """
from probe import *
import torch
torch.set_num_threads(1)
from resile.torch import Elastic
from resile.torch._loop.group import GroupLost
from resile.torch._loop.rendezvous import Rendezvous

await_members = Rendezvous.await_members


def held(self):
    await_members(self)
    if self.rank == 1:  # as if its part of the barrier had not ended
        note("held")
        while not self.round_over:
            time.sleep(0.01)
        raise GroupLost("a peer is lost")


Rendezvous.await_members = held
model = torch.nn.Linear(4, 2)
elastic = Elastic(model, torch.optim.SGD(model.parameters(), lr=0.01))
for step in elastic.steps(3):
    with elastic.step():
        model(torch.randn(3, 4)).square().sum().backward()
note("end", steps=elastic.completed)
wait_for("release")
"""


def test_a_rank_that_loses_a_peer_after_the_last_step_needs_no_other_round(runs: Runs) -> None:
    run = runs.start("--nproc-per-node=3", "--max-restarts=1", CALM, runs.script(HELD_IN_THE_BARRIER))
    ends = wait_until(lambda: len(runs.notes("end")) == 2 and runs.notes("end"), "two ranks after the loop", LONG)
    (held,) = runs.notes("held")
    kill(next(end["pid"] for end in ends if end["rank"] == 2))
    wait_until(lambda: held["pid"] in {end["pid"] for end in runs.notes("end")}, "the end of the third", LONG)
    runs.release()
    assert run.wait(LONG) == 0, run.err
    assert "round 2: rank 0 of 2" not in run.err, "nobody is left who would meet it"


EVALUATES = (
    THREE_STEPS
    + """
note("evaluates", steps=elastic.completed)
wait_for("release")
"""
)


def test_a_node_that_comes_after_the_last_step_waits_for_those_that_took_it(runs: Runs):
    words = ("--max-restarts=1", "--recovery-budget=10", runs.script(EVALUATES))
    nodes = [runs.node(*words, nnodes="1:2") for _ in range(2)]
    wait_until(lambda: len(runs.notes("evaluates")) == 2, "the last step", LONG)
    nodes[1].signal(signal.SIGKILL)
    wait_until(lambda: runs.story("RoundOver"), "the end of the round", LONG)
    nodes[1] = runs.node(*words, nnodes="1:2")

    def waits() -> bool:
        known = runs.ledger().nodes.values()
        return any(node.agent is not None and isinstance(node.agent.phase, Waiting) for node in known)

    wait_until(waits, "one that comes too late", LONG)
    time.sleep(5.0)  # longer than those that may come again are waited for
    runs.release()
    assert [node.wait(LONG) for node in nodes] == [0, 0], nodes[0].err + nodes[1].err
    assert [note["steps"] for note in runs.notes("evaluates")] == [3] * 2, "not once more"


APART = (
    THREE_STEPS
    + """
        if step == 2:
            model.weight.grad *= elastic.rank + 1
"""
)


def test_ranks_that_a_script_has_made_differ_are_told(runs: Runs):
    run = runs.start("--nproc-per-node=2", "--max-restarts=1", CALM, runs.script(APART))  # one import of torch
    assert run.wait(LONG) == 0, run.err
    assert run.err.count("at step 3 ranks 1 have other parameters than rank 0") == 1


FROZEN_AT_THE_END = (
    THREE_STEPS
    + """
if elastic.rank == 1:
    os.kill(os.getppid(), 19)  # SIGSTOP: its agent hears of nothing any more, this end included
note("end", steps=elastic.completed, now_rank=elastic.rank)
if elastic.rank == 0:
    wait_for("release")
"""
)


def frozen_at_the_end(runs: Runs) -> tuple[Run, Run]:
    """Two nodes that have taken the last step: one whose process has something left to do, and a frozen agent's."""
    script = runs.script(FROZEN_AT_THE_END)
    nodes = {node.pid: node for node in [runs.node(WATCHFUL, script, nnodes="1:2") for _ in range(2)]}
    wait_until(lambda: len(runs.notes("end")) == 2, "the last step of both", LONG)
    ends = {note["now_rank"]: note for note in runs.notes("end")}
    assert [ends[rank]["steps"] for rank in (0, 1)] == [3, 3]
    wait_until(lambda: not alive(ends[1]["pid"]), "the end of the frozen agent's process", LONG)
    wait_until(lambda: runs.story("NodeFailed"), "the master to miss the frozen agent", LONG)
    return nodes[ends[0]["agent"]], nodes[ends[1]["agent"]]


def test_an_agent_that_is_frozen_when_training_ends_ends_well_if_it_thaws_while_others_are_there(runs: Runs) -> None:
    other, frozen = frozen_at_the_end(runs)
    frozen.signal(signal.SIGCONT)
    wait_until(lambda: len(runs.story("NodeCame")) == 3, "the thawed agent to come back", LONG)
    runs.release()
    assert [node.wait(LONG) for node in (other, frozen)] == [0, 0], other.err + frozen.err
    assert [note["steps"] for note in runs.notes("end")] == [3, 3], "nothing is trained again"
    runs.nothing_is_left()


def test_a_training_ends_well_although_an_agent_is_frozen_for_good_and_so_does_that_if_it_thaws_after_all(
    runs: Runs,
) -> None:
    other, frozen = frozen_at_the_end(runs)
    runs.release()
    assert other.wait(LONG) == 0, other.err
    assert frozen.running
    frozen.signal(signal.SIGCONT)
    assert frozen.wait(LONG) == 0, frozen.err
    assert [note["steps"] for note in runs.notes("end")] == [3, 3], "nothing is trained again"
    runs.nothing_is_left()
