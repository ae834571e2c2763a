"""Kill schedules for elastic training: what is killed, at which step and in the middle of what, drawn from a seed.

A schedule is data. The training script strikes by it: the process whose turn it is kills itself, its agent or the
master at the very moment that the schedule names, so that a seed gives the same story every time, on a slow machine
too. Before a blow falls the training waits, in its step, until all of its processes are there.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import NamedTuple

from tests.local.test_elastic import SETTING

SIZE = 188
BATCH = 12
EPOCHS = 3
STEPS = EPOCHS * 16
"""The last of an epoch has 8 samples: there the ranks' shares differ."""
STORE_EVERY = 4

MOMENTS = ("forward", "averaging", "commit", "copy", "record", "after")
"""In mid-step: before the backward pass, with gradients on their way, with the optimizer's step taken and the rest not.
In mid-save: nothing copied, everything copied and not yet committed. And between two steps."""
ALONE = ("forward", "copy", "after")
"""Moments that a rank comes to whether the others live or not: there all can be killed at once."""
GIVING = "giving"
"""A survivor gives its state to a newcomer: only after another blow."""
STORING = "storing"
"""The node's agent has begun to write a checkpoint to storage and has not committed it."""


class Blow(NamedTuple):
    """One kill."""

    step: int
    """Steps completed when it falls."""
    moment: str
    target: str
    """rank: this process; node: its agent, and so all processes of it; master."""
    rank: int
    """Whose turn it is; for `giving` it is whoever gives."""


class Shape(NamedTuple):
    """How the processes of a job are spread over nodes."""

    nodes: int
    processes: int
    """Of each node."""
    fewest: int
    """Nodes that train on without the others."""

    @property
    def world(self) -> int:
        return self.nodes * self.processes

    @property
    def fixed(self) -> bool:
        """Whether nobody trains on without the others, so that every step is computed by the same world."""
        return self.fewest == self.nodes and self.processes == 1


class Schedule(NamedTuple):
    """Everything about a run that a seed decides."""

    optimizer: str
    shape: Shape
    blows: tuple[Blow, ...]

    @property
    def norm(self) -> str:
        """A batch norm looks at one rank's part of a batch, so it depends on the size of the world."""
        return "BatchNorm1d" if self.shape.fixed else "LayerNorm"


SHAPES = (Shape(3, 1, 3), Shape(3, 1, 3), Shape(3, 1, 1), Shape(2, 2, 1))


def draw(seed: int, events: int = 3) -> Schedule:
    """The schedule of a seed: at each of some steps one blow, two at once, or one in the middle of the recovery."""
    lots = random.Random(seed)
    shape = lots.choice(SHAPES)
    optimizer = lots.choice(("SGD", "Adam"))
    steps = sorted(lots.sample(range(STORE_EVERY, STEPS - STORE_EVERY, STORE_EVERY), events))
    blows = tuple(blow for step in steps for blow in _event(lots, shape, step))
    return Schedule(optimizer, shape, blows)


def _event(lots: random.Random, shape: Shape, step: int) -> Iterator[Blow]:
    """Blows at one step. Somebody with the state is left, or nobody at all, and then a checkpoint has it."""
    kind = lots.choice(("one", "one", "two", "all", GIVING))
    moment, target = lots.choice(MOMENTS), lots.choice(("rank", "rank", "node", "node", "master"))
    rank = lots.randrange(shape.world)
    if kind == "all":
        moment, target = lots.choice(ALONE), lots.choice(("rank", "node") if shape.processes == 1 else ("rank",))
        step = max(step, 3 * STORE_EVERY)  # by then storage has something, if all memory goes
        yield from (Blow(step, moment, target, each) for each in range(shape.world))
        return
    if target == "node" and lots.random() < 0.3:
        moment = STORING
    yield Blow(step, moment, target, rank)
    if kind == "two":
        other = (rank + lots.randrange(1, shape.world)) % shape.world
        yield Blow(step, moment, "master" if target != "master" and lots.random() < 0.4 else "rank", other)
    elif kind == GIVING and target != "master":
        yield Blow(step, GIVING, lots.choice(("rank", "node") if shape.processes == 1 else ("rank",)), 0)


# the script -----------------------------------------------------------------------------------------------------------

TRAIN = (
    SETTING
    + """
import contextlib, glob, signal
import torch.distributed as dist
from resile.checkpoint.buffer import Buffer
from resile.torch import Checkpointer

BLOWS = [dict(zip(("step", "moment", "target", "rank"), blow)) for blow in json.loads(os.environ.get("BLOWS", "[]"))]
WORLD, EPOCHS, STORE_EVERY = (int(os.environ[name]) for name in ("WHOLE", "EPOCHS", "STORE_EVERY"))
STORAGE = os.path.join(HERE, "storage") if BLOWS else None
total = EPOCHS * sampler.steps_per_epoch
stepping = False


def open_blows():
    return [number for number in range(len(BLOWS)) if not there(f"blow-{number}")]


def strike(moment):
    '''The blows of this moment whose turn it is; each falls once, whoever comes by again.'''
    for number in open_blows():
        blow = BLOWS[number]
        if blow["moment"] != moment:
            continue
        if moment == "giving":
            if not all(there(f"blow-{n}") for n in range(number)):
                continue
        elif elastic.completed < blow["step"] or (elastic.rank, elastic.world) != (blow["rank"], WORLD):
            continue
        if moment == "storing":
            await_draft()
        note("blow", number=number, node=int(os.environ["NODE"]), **blow)
        with open(os.path.join(HERE, f"blow-{number}"), "x"):
            pass
        if blow["target"] == "master":
            for announced in glob.glob(os.path.join(os.environ["RESILE_STATE_DIR"], "runs", "*", "master.json")):
                with contextlib.suppress(ProcessLookupError), open(announced) as file:
                    os.kill(json.load(file)["pid"], signal.SIGKILL)  # unless an earlier blow has killed it
            continue
        if blow["target"] == "node":
            os.kill(os.getppid(), signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)


def await_draft():
    '''Until the agents have begun to store this step; a part of a second too late is a blow, too.'''
    until = time.monotonic() + 5
    while time.monotonic() < until and not glob.glob(os.path.join(STORAGE, f"*step-{elastic.completed}*")):
        pass


def striking(moment, owner, name, first=False):
    '''Have a blow of this moment fall after a call of a function, or before it.'''
    honest = getattr(owner, name)

    def struck(*args, **kwargs):
        if first:
            strike(moment)
        result = honest(*args, **kwargs)
        if not first:
            strike(moment)
        return result

    setattr(owner, name, struck)


def give(tensor, src, **kwargs):
    if not stepping and elastic.completed and src == dist.get_rank():
        strike("giving")
    return broadcast(tensor, src, **kwargs)


broadcast, dist.broadcast = dist.broadcast, give
striking("averaging", dist, "all_reduce")
striking("copy", Buffer, "begin")
striking("record", Buffer, "commit", first=True)
optimizer.register_step_post_hook(lambda *_: strike("commit"))

checkpointer = Checkpointer(STORAGE, store_every=STORE_EVERY, keep_last=0) if BLOWS else None
elastic = Elastic(model, optimizer, sampler=sampler, scheduler=scheduler, state={"seen": seen},
                  before_step=lambda: seen.steps.append([sampler.epoch, sampler.completed, share.total, elastic.round]),
                  checkpointer=checkpointer)


def numbers():
    '''All that training has made, as numbers that JSON keeps exactly.'''
    tensors = [tensor for _, tensor in sorted(model.state_dict().items())]
    for parameter in optimizer.param_groups[0]["params"]:
        tensors += [tensor for _, tensor in sorted(optimizer.state[parameter].items())]
    return [number for tensor in tensors for number in tensor.double().flatten().tolist()]


for share, batch in elastic.epochs(EPOCHS, sampler):
    with elastic.step():
        stepping = True
        while elastic.world < WORLD and not elastic._lost and (
            elastic.completed == total - 1 or any(BLOWS[number]["step"] <= elastic.completed for number in open_blows())
        ):
            time.sleep(0.01)
        note("gave", step=elastic.completed, round=elastic.round, world=elastic.world,
             samples=[sampler.epoch, batch if share.count else []])
        strike("forward")
        loss = torch.nn.functional.cross_entropy(model(inputs[batch]), labels[batch])
        (loss * share.weight).backward()
    stepping = False
    if elastic.stepped:
        begin()
        strike("after")
        if BLOWS and elastic.completed % STORE_EVERY == 0:
            strike("storing")
        if not BLOWS and elastic.rank == 0:
            note("state", step=elastic.completed, numbers=numbers())
note("end", numbers=numbers(), seen=seen.steps, steps=elastic.completed)
"""
)

UNDISTURBED = """
import os, runpy, sys
import torch, torch._dynamo
import resile.torch  # what takes long is imported once, and every rank is a fork of it
from resile.agent.ports import free_port

world = int(os.environ["WHOLE"])
os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()), WORLD_SIZE=str(world))
os.environ.update(TORCHELASTIC_RESTART_COUNT="0")
ranks = []
for rank in range(world):
    ranks.append(os.fork())
    if not ranks[-1]:
        os.environ["RANK"] = str(rank)
        runpy.run_path("train.py", run_name="__main__")
        sys.exit(0)
sys.exit(any([os.waitpid(pid, 0)[1] for pid in ranks]))
"""
"""The same script without agents and without blows."""
