"""Rounds come and go for as long as a job lives: nothing of them may stay in the processes that live through them."""

from __future__ import annotations

import os
from typing import NamedTuple

import pytest

from tests.local.elastic.test_elastic import CALM, LONG, Training, newest, pids
from tests.local.resile_run import Runs, kill, wait_until

pytestmark = pytest.mark.timeout(600)

KILLS = 8
"""Each costs two rounds: one without the lost rank, and one with its replacement."""
WARM = 2
"""Kills after which everything that is made once has been made."""

TRAIN = """
from probe import *
import warnings
warnings.simplefilter("ignore")
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
torch.set_num_threads(1)
from resile.torch import Checkpointer, Elastic, ElasticLoader


def build():
    model = torch.nn.Sequential(torch.nn.Linear(1, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
    if sys.argv[1] == "sharded" and dist.is_initialized():
        fully_shard(model)
    return model, torch.optim.Adam(model.parameters())


samples = [torch.tensor([float(number)]) for number in range(60)]
loader = ElasticLoader(samples, global_batch_size=6, micro_batch_size=1, num_workers=1)
rest = {"sampler": loader, "checkpointer": Checkpointer(os.path.join(HERE, "storage"), store_every=50)}
elastic = Elastic(build=build, **rest) if sys.argv[1] == "sharded" else Elastic(*build(), **rest)
last = 0
for step in elastic.epochs(100_000, loader):
    with elastic.step():
        while elastic.round == last and not elastic.lost and not there("release"):
            time.sleep(0.005)  # one step in every round
        for share, batch in step:
            (elastic.model(batch).mean() * share.weight).backward()
    if elastic.stepped and elastic.round != last:
        last = elastic.round
        note("step", step=elastic.completed, round=elastic.round, now_rank=elastic.rank, now_world=elastic.world)
    if there("release"):
        os._exit(0)
"""


class Held(NamedTuple):
    """What a process has of the kernel's."""

    descriptors: int
    threads: int


def held(pid: int) -> Held:
    return Held(*(len(os.listdir(f"/proc/{pid}/{kind}")) for kind in ("fd", "task")))


@pytest.mark.soak
@pytest.mark.parametrize("model", ["whole", "sharded"])
def test_no_descriptor_and_no_thread_of_a_round_stays_in_survivors_agent_or_master(runs: Runs, model: str) -> None:
    runs.script(TRAIN)
    training = Training(runs)
    run = runs.start("--nproc-per-node=3", "--max-restarts=30", CALM, "train.py", model)
    world = training.steps(3)
    survivor, *others = pids(world).values()
    run.says("3 standbys are ready", LONG)
    live = {"survivor": survivor, "agent": run.pid, "master": runs.master()}
    before: dict[str, Held] = {}
    for number in range(KILLS):
        if number == WARM:
            before = {name: held(pid) for name, pid in live.items()}
        kill(others.pop(0))
        world = training.steps(3, after=newest(world))
        assert survivor in pids(world).values()
        others += set(pids(world).values()) - {survivor, *others}  # so each seat is emptied in turn
    assert newest(world) >= 2 * KILLS

    def grown() -> dict[str, tuple[Held, Held]]:
        """By one for each kill: what is held apart from rounds, as for standbys that are being made, is less."""
        pairs = {name: (before[name], held(pid)) for name, pid in live.items()}
        more = {name: max(now - old for old, now in zip(*pair, strict=True)) for name, pair in pairs.items()}
        return {name: pair for name, pair in pairs.items() if more[name] >= KILLS - WARM}

    wait_until(lambda: not grown(), f"an end of what has grown: {grown()}", 10)
    assert live["master"] == runs.master(), "it is the same process as before"
    runs.release()
    run.wait(LONG)
