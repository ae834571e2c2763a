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

IN_STEP, IN_SAVE = ("forward", "averaging", "commit"), ("copy", "record")
"""In mid-step: before the backward pass, with gradients on their way, with the optimizer's step taken and the rest not.
In mid-save: nothing copied, everything copied and not yet committed."""
MOMENTS = (*IN_STEP, *IN_SAVE, "after")
"""And between two steps."""
TARGETS = ("rank", "node", "master")
ALONE = ("forward", "copy", "after")
"""Moments that a rank comes to whether the others live or not: there all can be killed at once."""
GIVING = "giving"
"""A survivor gives its state to a newcomer: only after another blow."""
STORING = "storing"
"""The node's agent has begun to write a checkpoint to storage and has not committed it."""
DATA = ("batches", "halves", "loader")
"""One backward pass in a step; two; or as many as an `ElasticLoader` with a worker process says."""


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


class Work(NamedTuple):
    """What is trained, and by how many: all that the result depends on."""

    optimizer: str
    data: str
    sharded: bool
    norm: str
    world: int


class Schedule(NamedTuple):
    """Everything about a run that a seed decides."""

    optimizer: str
    data: str
    sharded: bool
    """Each rank has a part of the model (`fully_shard`) and not all of it."""
    shape: Shape
    blows: tuple[Blow, ...]

    @property
    def work(self) -> Work:
        """A batch norm looks at one rank's part of one pass, so it depends on the size of the world."""
        norm = "BatchNorm1d" if self.shape.fixed and self.data == "batches" and not self.sharded else "LayerNorm"
        return Work(self.optimizer, self.data, self.sharded, norm, self.shape.world)

    @property
    def at_once(self) -> list[list[int]]:
        """The numbers of blows that fall together."""
        numbers: dict[tuple[int, str], list[int]] = {}
        for number, blow in enumerate(self.blows):
            if blow.moment != GIVING:
                numbers.setdefault((blow.step, blow.moment), []).append(number)
        return [each for each in numbers.values() if len(each) > 1]


SHORT = {
    "a-rank-in-mid-step-then-a-node-and-the-master-at-once-in-mid-save": Schedule(
        "Adam",
        "loader",
        False,
        Shape(3, 1, 3),
        (Blow(4, "averaging", "rank", 1), Blow(20, "record", "node", 0), Blow(20, "record", "master", 2)),
    ),
    "shards-lose-a-rank-in-mid-commit-a-node-in-mid-store-and-then-all": Schedule(
        "SGD",
        "halves",
        True,
        Shape(2, 1, 1),
        (
            Blow(4, "commit", "rank", 1),
            Blow(16, STORING, "node", 0),
            Blow(32, "copy", "rank", 0),
            Blow(32, "copy", "rank", 1),
        ),
    ),
}
"""Not drawn but made so that every kind of blow is among them."""

SHAPES = (Shape(3, 1, 3), Shape(3, 1, 3), Shape(3, 1, 1), Shape(2, 2, 1))


def draw(seed: int, events: int = 3) -> Schedule:
    """The schedule of a seed: at each of some steps one blow, two at once, or one in the middle of the recovery."""
    lots = random.Random(seed)
    shape = lots.choice(SHAPES)
    optimizer, data, sharded = lots.choice(("SGD", "Adam")), lots.choice(DATA), lots.random() < 0.3
    steps = sorted(lots.sample(range(STORE_EVERY, STEPS - STORE_EVERY, STORE_EVERY), events))
    blows = tuple(blow for step in steps for blow in _event(lots, shape, step))
    if sharded:  # nobody has a whole state to give
        blows = tuple(blow for blow in blows if blow.moment != GIVING)
    return Schedule(optimizer, data, sharded, shape, blows)


def _event(lots: random.Random, shape: Shape, step: int) -> Iterator[Blow]:
    """Blows at one step. Somebody with the state is left, or nobody at all, and then a checkpoint has it."""
    kind = lots.choice(("one", "one", "two", "all", GIVING))
    moment, target = lots.choice(MOMENTS), lots.choice(("rank", "rank", "node", "node", "master"))
    rank = lots.randrange(shape.world)
    if kind == "all" and step >= 3 * STORE_EVERY:  # by then storage has something, if all memory goes
        moment, target = lots.choice(ALONE), lots.choice(("rank", "node") if shape.processes == 1 else ("rank",))
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
import contextlib, glob, signal, warnings
warnings.simplefilter("ignore")
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from resile.checkpoint.buffer import Buffer
from resile.torch import Checkpointer, ElasticLoader

BLOWS = [dict(zip(("step", "moment", "target", "rank"), blow)) for blow in json.loads(os.environ.get("BLOWS", "[]"))]
WORLD, EPOCHS, STORE_EVERY, LAST = (int(os.environ[name]) for name in ("WHOLE", "EPOCHS", "STORE_EVERY", "STEPS"))
DATA, SHARDED = os.environ["DATA"], os.environ["SHARDED"] == "True"
STORAGE = os.path.join(HERE, "storage")
stepping, total = False, 0


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
        note("blow", number=number, node=int(os.environ["NODE"]), round=elastic.round, **blow)
        with open(os.path.join(HERE, f"blow-{number}"), "x"):
            pass
        await_others(blow)
        if blow["target"] == "master":
            strike_master(number)
            continue
        if blow["target"] == "node":
            os.kill(os.getppid(), signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)


def strike_master(number):
    '''The one that lives; if an earlier blow has just killed it, its successor.'''
    until = time.monotonic() + 20
    while time.monotonic() < until:
        for announced in glob.glob(os.path.join(os.environ["RESILE_STATE_DIR"], "runs", "*", "master.json")):
            with contextlib.suppress(ProcessLookupError, ValueError), open(announced) as file:
                os.kill(json.load(file)["pid"], signal.SIGKILL)
                note("master", number=number)
                open(os.path.join(HERE, f"struck-{number}"), "x").close()
                return
        time.sleep(0.01)


def await_others(blow):
    '''Until all that are to fall at this step and moment are about to: nobody notices one of them before.'''
    if blow["moment"] == "giving":
        return
    same = lambda other: (other["step"], other["moment"]) == (blow["step"], blow["moment"])
    together = [n for n, other in enumerate(BLOWS) if same(other)]
    awaited = [f"blow-{n}" for n in together]
    if blow["target"] != "master":  # whoever strikes the master must live to do so
        awaited += [f"struck-{n}" for n in together if BLOWS[n]["target"] == "master"]
    until = time.monotonic() + 60
    while not all(map(there, awaited)) and time.monotonic() < until:
        time.sleep(0.002)


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
striking("averaging", dist, "reduce_scatter_single")  # of shards
striking("copy", Buffer, "begin")
striking("record", Buffer, "commit", first=True)


def build():
    '''The same in every round; what it holds comes from a checkpoint.'''
    torch.manual_seed(7)
    layers = [torch.nn.Linear(8, 16), torch.nn.LayerNorm(16), torch.nn.ReLU(), torch.nn.Linear(16, 2)]
    model = torch.nn.Sequential(*layers)
    for part in (layers[0], layers[3], model):
        fully_shard(part)
    optimizer = getattr(torch.optim, kind)(model.parameters(), lr=0.01)
    optimizer.register_step_post_hook(lambda *_: strike("commit"))
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 50)


def before_step():
    seen.steps.append([sampler.epoch, sampler.completed, total, elastic.round])


if DATA == "loader":
    numbered = [(number, inputs[number], labels[number]) for number in range(SIZE)]
    sampler = ElasticLoader(numbered, global_batch_size=int(os.environ["BATCH"]), micro_batch_size=2, num_workers=1)
rest = {"sampler": sampler, "state": {"seen": seen}, "before_step": before_step}
if BLOWS or SHARDED:
    rest["checkpointer"] = Checkpointer(STORAGE, store_every=STORE_EVERY, keep_last=0)
if SHARDED:
    elastic = Elastic(build=build, **rest)
else:
    optimizer.register_step_post_hook(lambda *_: strike("commit"))
    elastic = Elastic(model, optimizer, scheduler=scheduler, **rest)


def passes(dealt):
    '''What this rank has of a step: weight, numbers, inputs and labels of each pass; and what the world has.'''
    if DATA == "loader":
        return [(share.weight, ids.tolist(), *batch) for share, (ids, *batch) in dealt], dealt.total
    share, batch = dealt
    half = len(batch) // 2 if DATA == "halves" else 0
    parts = [part for part in (batch[:half], batch[half:]) if part]
    return [(share.weight * len(part) / len(batch), part, inputs[part], labels[part]) for part in parts], share.total


def numbers():
    '''All that training has made, as numbers that JSON keeps exactly. Of shards: by all ranks together.'''
    tensors = [tensor for _, tensor in sorted(elastic.model.state_dict().items())]
    for parameter in elastic.optimizer.param_groups[0]["params"]:
        tensors += [tensor for _, tensor in sorted(elastic.optimizer.state[parameter].items())]
    tensors = [tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor for tensor in tensors]
    return [number for tensor in tensors for number in tensor.double().flatten().tolist()]


for dealt in elastic.epochs(EPOCHS, sampler):
    own, total = passes(dealt)
    with elastic.step(backwards=len(own)):
        stepping = True
        while elastic.world < WORLD and not elastic.lost and (
            elastic.completed == LAST - 1 or any(BLOWS[number]["step"] <= elastic.completed for number in open_blows())
        ):
            time.sleep(0.01)
        if elastic.completed == LAST - 1 and elastic.world < WORLD:  # alone it could take even the last step
            raise RuntimeError("the round is over: all are to be there at the end")
        note("gave", step=elastic.completed, round=elastic.round, world=elastic.world,
             samples=[sampler.epoch, [number for weight, part, *_ in own if weight for number in part]])
        strike("forward")
        for weight, _, pictures, names in own:
            loss = torch.nn.functional.cross_entropy(elastic.model(pictures), names)
            (loss * weight).backward()
    stepping = False
    if elastic.stepped:
        begin()
        strike("after")
        if BLOWS and elastic.completed % STORE_EVERY == 0:
            strike("storing")
        if not BLOWS and (SHARDED or elastic.rank == 0):
            made = numbers()
            if elastic.rank == 0:
                note("state", step=elastic.completed, numbers=made)
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
