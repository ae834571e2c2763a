"""Draws a schedule from a seed: the job, the behaviour of its nodes, and the faults to come."""

from __future__ import annotations

import enum
import random

import msgspec

from resile.api.ids import Bytes, GiB
from resile.api.job import JobSpec, Loss, Resources, RoleSpec
from resile.api.kinds.run.names import RUN_KIND, WORKER
from resile.api.timeouts import derive
from resile.protocol.reports import RendezvousConfig
from resile.sim.world.data_reader import Data
from resile.sim.world.platform import NodeBehaviour

LEADER = "leader"
"""The role of the one node that some jobs cannot lose."""
JOIN_TIMEOUT = 60.0
PEND_TIMEOUT = 90.0
FAULTS_UNTIL = 40.0
"""Virtual seconds in which faults happen. After that a job must come to its end."""


class Fault(enum.StrEnum):
    PROCESS = "process"
    OOM = "oom"
    NODE = "node"
    POWER = "power"
    PREEMPT = "preempt"
    RESTART_IN_PLACE = "restart in place"
    TEAR = "tear"
    PARTITION = "partition"
    FREEZE = "freeze"
    MASTER = "master"
    LEAVE = "leave"
    ARRIVE = "arrive"
    SCALE = "scale"
    SUSPEND = "suspend"
    PLAN = "plan"


MANAGED_ONLY = frozenset({Fault.OOM, Fault.PREEMPT, Fault.RESTART_IN_PLACE, Fault.SCALE, Fault.SUSPEND, Fault.PLAN})
BARE_ONLY = frozenset({Fault.ARRIVE, Fault.LEAVE})


class Schedule(msgspec.Struct, frozen=True, kw_only=True):
    spec: JobSpec
    rendezvous: RendezvousConfig
    nodes: int
    nproc: int
    steps: int
    step_time: float
    data: Data | None
    behaviour: NodeBehaviour
    faults: tuple[tuple[float, Fault], ...]
    elastic: bool = False
    """True if training processes join new rounds without being restarted. Then no step is lost with a round."""


def draw(rng: random.Random) -> Schedule:
    """Draw a job, the behaviour of its nodes, and the time of each fault. The same state of `rng` draws the same."""
    managed = rng.random() < 0.6
    nodes = rng.randint(1, 8)
    unit = rng.choice((1, 1, 1, 2)) if nodes > 1 else 1
    most = max(unit, rng.randint(nodes, nodes + 1) // unit * unit)
    least = max(unit, rng.randint(1, max(1, min(nodes, most))) // unit * unit)
    rendezvous = RendezvousConfig(
        min_nodes=least,
        max_nodes=most,
        node_unit=unit,
        max_restarts=rng.choice((0, 1, 3, 10)),
        join_timeout=JOIN_TIMEOUT,
    )
    kinds = [f for f in Fault if f not in (BARE_ONLY if managed else MANAGED_ONLY)]
    kinds = rng.sample(kinds, rng.randint(1, len(kinds)))
    times = sorted(rng.uniform(0.2, FAULTS_UNTIL) for _ in range(rng.choice((0, 1, 2, 3, 5, 8, 13, 21, 34))))
    data = None
    if rng.random() < 0.4:
        data = Data(
            size=rng.randint(0, 40),
            shard_size=rng.randint(1, 12),
            epochs=rng.randint(1, 3),
            seed=rng.choice((None, rng.randint(0, 99))),
            record_time=rng.uniform(0.05, 0.6),
            pieces=rng.randint(1, 4),
        )
    return Schedule(
        spec=_spec(rng, managed, nodes),
        rendezvous=rendezvous,
        nodes=nodes,
        nproc=rng.choice((1, 1, 2)),
        steps=rng.randint(1, 60),
        step_time=rng.uniform(0.1, 1.0),
        data=data,
        behaviour=_behaviour(rng) if managed else NodeBehaviour(),
        faults=tuple((at, rng.choice(kinds)) for at in times),
        elastic=data is None and rng.random() < 0.5,
    )


def _spec(rng: random.Random, managed: bool, nodes: int) -> JobSpec:
    timeouts = derive(
        join=JOIN_TIMEOUT, pend=PEND_TIMEOUT, exit_grace=3.0, budget_window=rng.choice((5.0, 60.0, 1800.0))
    )
    if not managed:
        return JobSpec(name="sim", kind=RUN_KIND, timeouts=timeouts)
    memory = rng.choice((None, Bytes(4 * GiB), Bytes(64 * GiB)))
    role = RoleSpec(
        replicas=nodes,
        crash_budget=rng.choice((0, 1, 3, 3)),
        limits=Resources(memory=memory),
    )
    roles = {WORKER: role}
    if nodes > 1 and rng.random() < 0.2:
        leader = msgspec.structs.replace(role, replicas=1, loss=Loss.FATAL)
        roles = {LEADER: leader, WORKER: msgspec.structs.replace(role, replicas=nodes - 1)}
    return JobSpec(name="sim", kind=RUN_KIND, roles=roles, timeouts=timeouts)


def _behaviour(rng: random.Random) -> NodeBehaviour:
    return NodeBehaviour(
        pending=rng.choice((0.0, 0.0, 0.3)),
        stuck=rng.choice((0.0, 0.0, 0.0, 0.1)),
        slow=rng.choice((0.0, 0.2)),
        broken=rng.choice((0.0, 0.0, 0.1)),
    )
