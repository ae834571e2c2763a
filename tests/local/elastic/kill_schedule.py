"""Kill schedules for elastic training: what is killed, at which step and in the middle of what, drawn from a seed.

A schedule is data. The training script (`striking.py`) strikes by it: the process whose turn it is kills, freezes or
drains itself, its agent or the master at the very moment that the schedule names, so that a seed gives the same story
every time, on a slow machine too. Before a blow falls the training waits, in its step, until all of its processes are
there.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from typing import NamedTuple

SIZE = 188
BATCH = 12
EPOCHS = 3
STEPS = EPOCHS * 16
"""The last of an epoch has 8 samples: there the ranks' shares differ."""
STORE_EVERY = 5
"""Neither the last step is a multiple of it nor, of most schedules, those at which a blow falls."""

IN_STEP, IN_SAVE = ("forward", "averaging", "commit"), ("copy", "record")
"""In mid-step: before the backward pass, with gradients on their way, with the optimizer's step taken and the rest not.
In mid-save: nothing copied, everything copied and not yet committed."""
MOMENTS = (*IN_STEP, *IN_SAVE, "after")
"""And between two steps."""
KILLED = ("rank", "node", "master")
FROZEN = ("freeze", "ice")
"""Agent and ranks of a node stand still: until the master has counted it as lost, or for ever."""
LEAVING = ("node", "drain")
"""Agents that end by it, with -9 or SIGTERM, and are started again."""
COME = "come"
"""Nothing is killed: of the nodes that were lost one is started again only now, and what is under way stands still
until the master has it waiting."""
TARGETS = (*KILLED, *FROZEN, "drain", COME)
ALONE = ("forward", "copy", "after")
"""Moments that a rank comes to whether the others live or not: there all can be killed at once."""
GIVING = "giving"
"""A survivor gives its state to a newcomer: only after another blow."""
RESTORING = tuple(f"restore-{number}" for number in range(1, 8))
"""A rank is about to say its first, second, … word of those by which all restore shards: only after another blow. At
least four are about what there is, one tells that it is sound, one that it is loaded, and one that all is done."""
IN_RECOVERY = (GIVING, *RESTORING)
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
    """rank: this process; node: its agent, and so all processes of it; master; drain: its agent is asked to leave."""
    rank: int
    """Whose turn it is; for `giving` it is whoever gives, in a smaller world it goes round."""


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
            if blow.moment not in IN_RECOVERY:
                numbers.setdefault((blow.step, blow.moment), []).append(number)
        return [each for each in numbers.values() if len(each) > 1]

    @property
    def freezes(self) -> bool:
        """Whether somebody has to fall silent to be missed."""
        return any(blow.target in FROZEN for blow in self.blows)


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
    "a-drained-and-a-killed-node-one-comes-while-the-other-gets-the-state-then-one-freezes-for-a-while": Schedule(
        "Adam",
        "loader",
        False,
        Shape(3, 1, 1),
        (
            Blow(7, "averaging", "drain", 1),
            Blow(7, "averaging", "node", 2),
            Blow(7, GIVING, COME, 0),
            Blow(23, "commit", "freeze", 1),
        ),
    ),
    "shards-lose-a-rank-in-the-middle-of-a-restore-and-then-a-node-that-freezes-for-good": Schedule(
        "SGD",
        "halves",
        True,
        Shape(2, 1, 2),
        (Blow(6, "record", "rank", 0), Blow(6, "restore-6", "rank", 1), Blow(23, "after", "ice", 0)),
    ),
}
"""Not drawn but made so that every kind of blow is among them."""

APART = 3
"""Steps between two events: some rank may be in the next step before it hears of the first of them."""
SHAPES = (Shape(3, 1, 3), Shape(3, 1, 3), Shape(3, 1, 1), Shape(3, 1, 1), Shape(2, 2, 1))
KINDS = ("one", "one", "two", "all", "recovery", "recovery", COME)
STRUCK = ("rank", "rank", "node", "node", "master", "drain", *FROZEN)


def draw(seed: int, events: int = 3) -> Schedule:
    """The schedule of a seed: at each of some steps one blow, two at once, or one in the middle of the recovery."""
    lots = random.Random(seed)
    shape = lots.choice(SHAPES)
    optimizer, data, sharded = lots.choice(("SGD", "Adam")), lots.choice(DATA), lots.random() < 0.4
    steps = [0]
    while len(steps) < events or any(after - before < APART for before, after in itertools.pairwise(steps)):
        steps = sorted(lots.sample(range(STORE_EVERY, STEPS - STORE_EVERY), events))
    blows = tuple(blow for step in steps for blow in _event(lots, shape, step, sharded))
    return Schedule(optimizer, data, sharded, shape, blows)


def _event(lots: random.Random, shape: Shape, step: int, sharded: bool) -> Iterator[Blow]:
    """Blows at one step. Somebody with the state is left, or nobody at all, and then a checkpoint has it."""
    kind = lots.choice(KINDS)
    moment, target = lots.choice(MOMENTS), lots.choice(STRUCK)
    rank = lots.randrange(shape.world)
    meanwhile = lots.choice(RESTORING) if sharded else GIVING
    stored = step >= 3 * STORE_EVERY  # by then storage has something, if all memory goes
    nodes = shape.processes == 1
    if kind == "all" and stored:
        moment, target = lots.choice(ALONE), lots.choice(("rank", "node") if nodes else ("rank",))
        yield from (Blow(step, moment, target, each) for each in range(shape.world))
        return
    if kind == COME and shape == Shape(3, 1, 1) and (stored or not sharded):
        other = (rank + lots.randrange(1, shape.world)) % shape.world
        yield from (Blow(step, moment, lots.choice(LEAVING), each) for each in (rank, other))
        yield Blow(step, meanwhile, COME, 0)
        return
    if kind == "recovery" and target == "freeze" and shape.fixed:
        target = "ice"  # nobody went on without one that thaws: it has the state, and nothing would be given
    if target in (*LEAVING, *FROZEN) and lots.random() < 0.3:
        moment = STORING
    yield Blow(step, moment, target, rank)
    if kind == "two":
        least = shape.processes if target in FROZEN else 1  # nobody strikes on a node that stands still
        other = (rank - rank % least + lots.randrange(least, shape.world)) % shape.world
        yield Blow(step, moment, "master" if target != "master" and lots.random() < 0.4 else "rank", other)
    elif kind == "recovery" and target != "master":
        second = ("rank", "node", "drain", *FROZEN) if nodes and (stored or not sharded) else ("rank",)
        yield Blow(step, meanwhile, lots.choice(second), lots.randrange(shape.world))
