"""Elastic training for real: torch, gloo, processes, kills. Nothing of it is restarted but what was killed."""

from __future__ import annotations

import signal
import time
from typing import Any

import pytest

from tests.local.resile_run import PATIENCE, Run, Runs, alive, kill, wait_until

pytestmark = pytest.mark.timeout(600)

CALM = "--recovery-budget=30"
"""An agent that gets no time from a busy machine for some seconds is not to be taken for dead here."""
LONG = 4 * PATIENCE
"""Several processes import torch at once, on a machine that may have other things to do."""

SETTING = """
from probe import *
import hashlib
import torch
torch.set_num_threads(1)
from resile.torch import Elastic, ElasticBatchSampler

SIZE = int(os.environ.get("SIZE", "720"))
torch.manual_seed(7 + there("begun"))  # a replacement begins elsewhere: what it has in the end is its peers' state
norm = getattr(torch.nn, os.environ.get("NORM", "BatchNorm1d"))(16)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), norm, torch.nn.ReLU(), torch.nn.Linear(16, 2))
kind = os.environ.get("OPTIMIZER", "Adam")
optimizer = getattr(torch.optim, kind)(model.parameters(), lr=0.01)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 50)
data = torch.Generator().manual_seed(1)
inputs, labels = torch.randn(SIZE, 8, generator=data), torch.randint(0, 2, (SIZE,), generator=data)
sampler = ElasticBatchSampler(SIZE, global_batch_size=int(os.environ.get("BATCH", "6")))


class Seen:
    '''What entered the model, kept with the model.'''

    def __init__(self):
        self.steps = []

    def state_dict(self):
        return {"steps": self.steps}

    def load_state_dict(self, state):
        self.steps = list(state["steps"])


seen = Seen()


def begin():
    if not there("begun"):
        open(os.path.join(HERE, "begun"), "w").close()
"""
"""A training and its data, small and with everything that a state may have; `TRAIN` is its loop."""

TRAIN = (
    SETTING
    + """
elastic = Elastic(model, optimizer, sampler=sampler, scheduler=scheduler, state={"seen": seen},
                  before_step=lambda: seen.steps.append([sampler.epoch, sampler.completed, share.total, elastic.world]))
last = 0
for share, batch in elastic.epochs(1, sampler):
    with elastic.step():
        if not there("release"):
            time.sleep(0.02)
        while elastic.completed >= 60 and elastic.round == last and not there("release") and not elastic.lost:
            time.sleep(0.02)  # one step in every round, until the test has done what it wants
        loss = torch.nn.functional.cross_entropy(model(inputs[batch]), labels[batch])
        (loss * share.weight).backward()
    begin()
    if elastic.stepped and (elastic.round != last or not there("release")):
        last = elastic.round
        note("step", step=elastic.completed, round=elastic.round, now_rank=elastic.rank, now_world=elastic.world)
words = hashlib.sha256()
for name, tensor in sorted(model.state_dict().items()):
    words.update(name.encode() + tensor.numpy().tobytes())
note("end", model=words.hexdigest(), seen=seen.steps, steps=elastic.completed, lr=scheduler.get_last_lr())
"""
)


class Training:
    """What the processes of a test have done so far."""

    def __init__(self, runs: Runs) -> None:
        self.runs = runs

    def steps(self, world: int, after: int = 0) -> dict[int, dict[str, Any]]:
        """The processes that stepped together in one round newer than `after`, by rank, when all of them have."""

        def complete() -> dict[int, dict[str, Any]]:
            rounds: dict[int, dict[int, dict[str, Any]]] = {}
            for note in self.runs.notes("step"):
                if note["now_world"] == world and note["round"] > after:
                    rounds.setdefault(note["round"], {})[note["now_rank"]] = note
            whole = [steps for _, steps in sorted(rounds.items()) if len(steps) == world]
            return whole[-1] if whole else {}

        return wait_until(complete, f"steps of {world} processes in a round after {after}", LONG)

    def ends_well(self, *nodes: Run, processes: int) -> list[dict[str, Any]]:
        """Let it finish; every sample was seen once, and everybody has the same model."""
        self.runs.release()
        for node in nodes:
            assert node.wait(LONG) == 0, node.err
        ends = self.runs.notes("end")[-processes:]
        assert len({end["model"] for end in ends}) == 1
        position = 0
        for epoch, start, total, _ in ends[0]["seen"]:
            assert (epoch, start) == (0, position)
            position += total
        assert position == 720
        assert all(end["seen"] == ends[0]["seen"] and end["lr"] == ends[0]["lr"] for end in ends)
        assert all(end["steps"] == 120 for end in ends)
        return ends


@pytest.fixture
def training(runs: Runs) -> Training:
    runs.script(TRAIN)
    return Training(runs)


def pids(steps: dict[int, dict[str, Any]]) -> dict[int, int]:
    return {rank: note["pid"] for rank, note in steps.items()}


def newest(steps: dict[int, dict[str, Any]]) -> int:
    return next(iter(steps.values()))["round"]


SLOW = """
    with elastic.step():
        if elastic.world == 2:
            note("slow", round=elastic.round)
        slow = time.monotonic() + 2 * (elastic.world == 2)
        while time.monotonic() < slow and not elastic.lost:
            time.sleep(0.02)  # the replacement comes in the middle of this step
"""


@pytest.mark.usefixtures("whole_torch")
def test_killed_ranks_are_replaced_while_the_others_go_on_in_their_processes(training: Training):
    runs = training.runs
    held = "if there('begun'):\n    wait_for('go')  # a standby can be back before its peers meet\nelastic ="
    runs.script(TRAIN.replace("elastic =", held, 1).replace("\n    with elastic.step():\n", SLOW, 1))
    run = runs.start("--nproc-per-node=3", "--max-restarts=5", CALM, "train.py")
    first = training.steps(3)
    kill(first[1]["pid"])
    wait_until(lambda: runs.notes("slow"), "a step without the lost rank", LONG)
    (runs.directory / "go").touch()
    whole = training.steps(3, after=newest(first))
    assert {pids(whole)[0], pids(whole)[2]} == {first[0]["pid"], first[2]["pid"]}
    alone = [note for note in runs.notes("step") if newest(first) < note["round"] < newest(whole)]
    assert {(note["pid"], note["now_world"]) for note in alone} == {(first[rank]["pid"], 2) for rank in (0, 2)}, (
        "the step in which the replacement came was broken off"
    )
    kill(whole[0]["pid"])  # the one that hosts the store, and the one with the oldest state
    kill(whole[1]["pid"])
    again = training.steps(3, after=newest(whole))
    assert first[2]["pid"] in pids(again).values()
    training.ends_well(run, processes=3)


def test_a_node_that_is_needed_is_waited_for_and_the_result_is_that_of_an_undisturbed_run(training: Training):
    runs = training.runs
    nodes = [runs.node("--max-restarts=3", CALM, "train.py", nnodes="3:3", env={"OPTIMIZER": "SGD"}) for _ in range(3)]
    first = training.steps(3)
    master = runs.master()
    kill(first[1]["pid"])
    kill(master)  # in the middle of the recovery
    whole = training.steps(3, after=newest(first))
    assert len(set(pids(whole).values()) & set(pids(first).values())) == 2
    ends = training.ends_well(*nodes, processes=3)
    assert {step[3] for step in ends[0]["seen"]} == {3}
    (runs.directory / "begun").unlink()
    # Where processes may be replaced, those of a node share one import of torch.
    calm = runs.start("--nproc-per-node=3", "--max-restarts=1", CALM, "train.py", env={"OPTIMIZER": "SGD"})
    assert calm.wait(LONG) == 0, calm.err
    assert runs.notes("end")[-1]["model"] == ends[0]["model"]


def test_nodes_come_go_die_and_freeze_and_no_process_of_the_others_is_restarted(training: Training):
    runs = training.runs
    words = ("--rdzv-conf=last_call_timeout=1", "--max-restarts=3", CALM, "train.py")
    nodes = [runs.node(*words, nnodes="1:3") for _ in range(2)]
    two = training.steps(2)
    stay = set(pids(two).values())

    third = runs.node(*words, nnodes="1:3")
    three = training.steps(3, after=newest(two))
    assert stay < set(pids(three).values())

    third.signal(signal.SIGTERM)
    shrunk = training.steps(2, after=newest(three))
    assert set(pids(shrunk).values()) == stay
    assert third.wait(LONG) != 0

    fourth = runs.node(*words, nnodes="1:3")
    three = training.steps(3, after=newest(shrunk))
    (rank,) = set(pids(three).values()) - stay
    kill(fourth.pid)  # the agent; its process dies with it
    shrunk = training.steps(2, after=newest(three))
    assert set(pids(shrunk).values()) == stay
    wait_until(lambda: not alive(rank), "the end of a dead agent's process")

    fifth = runs.node(*words, nnodes="1:3")
    three = training.steps(3, after=newest(shrunk))
    (rank,) = set(pids(three).values()) - stay
    kill(fifth.pid, signal.SIGSTOP)
    kill(rank, signal.SIGSTOP)
    try:
        shrunk = training.steps(2, after=newest(three))
        assert set(pids(shrunk).values()) == stay
    finally:
        kill(rank, signal.SIGCONT)
        kill(fifth.pid, signal.SIGCONT)
    back = training.steps(3, after=newest(shrunk))
    assert set(pids(back).values()) == {*stay, rank}  # what was frozen is as good as what was not
    training.ends_well(*nodes, fifth, processes=3)


TOGETHER = """
import torch.distributed as dist

with_others = elastic.epochs
def epochs(count, loader):
    for share, batch in with_others(count, loader):
        yield share, batch
        if elastic.stepped and elastic.round == 1 and elastic.completed == 3:
            if elastic.rank == 1:
                note("alone")
                wait_for("never")
            with elastic.together():
                note("together")
                dist.all_reduce(torch.ones(1))
            assert elastic.lost
elastic.epochs = epochs
last = 0
"""


def test_a_loss_in_what_ranks_do_together_between_steps_ends_none_of_them(training: Training):
    runs = training.runs
    runs.script(TRAIN.replace("last = 0\n", TOGETHER, 1))
    run = runs.start("--nproc-per-node=3", "--max-restarts=3", CALM, "train.py")
    wait_until(lambda: len(runs.notes("together")) == 2 and runs.notes("alone"), "two ranks that wait for one", LONG)
    first = {note["pid"] for note in runs.notes("together")}
    kill(runs.notes("alone")[0]["pid"])
    whole = training.steps(3, after=1)
    assert first < set(pids(whole).values())
    training.ends_well(run, processes=3)


# without torch: what an agent does with processes that only say that they are elastic --------------------------------

MEETS = """
from probe import *
import threading
from resile.wire.rendezvous_client import RendezvousClient

over = threading.Event()
line = RendezvousClient.from_environment(lambda round: over.set())
if ATTEMPT and there("lame"):
    os.remove(os.path.join(HERE, "lame"))
    note("lame")
    time.sleep(1000)
holds = 0
while not there("release"):
    over.clear()
    placed = line.ready(1, holds=holds)
    holds = placed.round
    note("met", round=placed.round, now_rank=placed.rank, now_world=placed.world_size)
    while not there("release") and (not over.is_set() or there(f"stubborn{os.getpid()}")):
        time.sleep(0.01)
line.close()
note("end")
"""


def met(runs: Runs, world: int, after: int = 0) -> dict[int, dict[str, Any]]:
    def complete() -> dict[int, dict[str, Any]]:
        rounds: dict[int, dict[int, dict[str, Any]]] = {}
        for each in runs.notes("met"):
            if each["now_world"] == world and each["round"] > after:
                rounds.setdefault(each["round"], {})[each["now_rank"]] = each
        return next((members for _, members in sorted(rounds.items()) if len(members) == world), {})

    return wait_until(complete, f"{world} processes in a round after {after}; heard: {runs.notes('met')}")


def test_a_replacement_that_never_gets_ready_is_killed_and_replaced(runs: Runs):
    runs.script(MEETS)
    runs.release("lame")
    run = runs.start("--nproc-per-node=2", "--max-restarts=3", "--rdzv-conf=join_timeout=5", CALM, "train.py")
    first = met(runs, 2)
    kill(first[0]["pid"])
    alone = met(runs, 1, after=newest(first))
    assert alone[0]["pid"] == first[1]["pid"]
    again = met(runs, 2, after=newest(alone))
    (lame,) = runs.notes("lame")
    assert not alive(lame["pid"])
    assert first[1]["pid"] in pids(again).values()
    runs.release()
    assert run.wait() == 0, run.err
    assert "did not get ready within 5 s" in run.err


def test_a_process_that_does_not_leave_its_round_is_killed_and_replaced(runs: Runs):
    runs.script(MEETS)
    run = runs.start("--nproc-per-node=3", "--max-restarts=3", "--recovery-budget=6", "train.py")
    first = met(runs, 3)
    runs.release(f"stubborn{first[1]['pid']}")
    kill(first[0]["pid"])
    wait_until(lambda: not alive(first[1]["pid"]), "the end of the process that did not leave")
    again = met(runs, 3, after=newest(first))
    assert first[2]["pid"] in pids(again).values()
    runs.release()
    assert run.wait() == 0, run.err
    assert "did not leave its round within 6 s" in run.err


def test_a_process_that_hangs_alone_on_its_node_is_killed_when_another_node_has_the_state_and_not_before(runs: Runs):
    runs.script(MEETS)
    words = ("--max-restarts=3", "--recovery-budget=5", "train.py")
    nodes = [runs.node(*words, nnodes="3:3") for _ in range(3)]
    first = met(runs, 3)
    agent = {rank: next(node for node in nodes if node.pid == each["agent"]) for rank, each in first.items()}
    runs.release(f"stubborn{first[0]['pid']}")
    runs.release(f"stubborn{first[1]['pid']}")
    kill(first[2]["pid"])
    for rank in (0, 1):
        agent[rank].says("waiting 60 s more for the end of its step")
    time.sleep(0.5)
    assert alive(first[0]["pid"]), "nobody is known to have the state but those that hang"
    assert alive(first[1]["pid"])
    (runs.directory / f"stubborn{first[1]['pid']}").unlink()
    wait_until(lambda: not alive(first[0]["pid"]), "the end of the one that hangs, as the other one has the state")
    again = met(runs, 3, after=newest(first))
    assert set(pids(again).values()) & set(pids(first).values()) == {first[1]["pid"]}
    runs.release()
    assert [node.wait() for node in nodes] == [0, 0, 0], agent[0].err
    assert "and another node has the state of the training: killing it" in agent[0].err


def test_processes_that_are_still_starting_survive_the_end_of_the_round_they_were_started_for(runs: Runs):
    runs.script(MEETS.replace("over = threading", "wait_for(f'go{RANK}')\nover = threading", 1))
    run = runs.start("--nproc-per-node=3", "--max-restarts=3", CALM, "train.py")
    runs.release("go0")
    wait_until(lambda: runs.notes("met"), "the first process")
    runs.release("go1")
    wait_until(lambda: len(runs.notes("met")) == 2, "the second process")
    kill(next(each["pid"] for each in runs.notes("met") if each["now_rank"] == 1))
    met(runs, 1)
    runs.release("go2")
    whole = met(runs, 3, after=1)
    assert {each["attempt"] for each in whole.values()} == {0, 1}
    assert sorted(each["attempt"] for each in whole.values()) == [0, 0, 1]
    runs.release()
    assert run.wait() == 0, run.err


def test_the_budget_of_restarts_ends_a_job_whose_replacements_crash(runs: Runs):
    runs.script(MEETS.replace("over = threading", "if ATTEMPT: sys.exit(3)\nover = threading", 1))
    run = runs.start("--nproc-per-node=2", "--max-restarts=2", CALM, "train.py")
    first = met(runs, 2)
    kill(first[1]["pid"])
    assert run.wait() == 1
    assert "RestartOverLimit" in run.err
    assert run.err.count("starting another process for local rank 1") == 2, "none is announced that will not be"
