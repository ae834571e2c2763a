"""What one rendezvous of very many nodes costs the core, without a network or a platform.

The unit is processor time of this process, so a busy machine changes it little.
"""

from __future__ import annotations

import time

import msgspec

from resile.api.ids import NO_ROUND, NodeId, NodeKey, Round
from resile.api.job import JobSpec
from resile.api.kinds.run.names import RUN_KIND, WORKER
from resile.core import decisions as de
from resile.core import events as ev
from resile.core.engine import Engine
from resile.core.state import new_state
from resile.protocol.agent_to_master import Hello, Join
from resile.protocol.master_to_agent import MasterMessage, RoundFormed, RoundOver
from resile.protocol.message import PROTOCOL
from resile.protocol.reports import RendezvousConfig


class ScaleReport(msgspec.Struct, frozen=True, kw_only=True):
    """The cost of a rendezvous of many nodes, in processor seconds."""

    nodes: int
    arrive_seconds: float
    """All agents connect and all but the last join."""
    last_join_to_told_seconds: float
    """From the last join to the assignment of every node."""
    loss_to_told_seconds: float
    """From the end of one member's processes to the message to all others that the round is over."""
    regroup_seconds: float
    """All members join again, and every one is told its assignment."""
    events: int
    events_per_second: float
    heartbeats_per_second: float


def crowd(nodes: int) -> Engine:
    """An engine with so many agents, all but the last of which wait for the first round."""
    spec = JobSpec(name="crowd", kind=RUN_KIND)
    config = RendezvousConfig(min_nodes=nodes, max_nodes=nodes)
    engine = Engine(new_state(spec, 0.0))
    engine.handle(ev.Started(), 0.0)
    for number in range(nodes):
        hello = Hello(
            protocol=PROTOCOL,
            job=spec.name,
            incarnation=f"agent{number}",
            address="10.0.0.1",
            host=f"host{number}",
            nproc=8,
            rendezvous=config,
            role=WORKER,
        )
        engine.handle(ev.AgentConnected(connection=number + 1, hello=hello), 0.0)
        if number < nodes - 1:
            engine.handle(_join(number), 0.0)
    return engine


def last_joins(engine: Engine, nodes: int) -> set[NodeKey]:
    """Let the last agent join. Returns the nodes that are told their assignment."""
    return _told(engine.handle(_join(nodes - 1), 0.0), RoundFormed)


def measure(nodes: int) -> ScaleReport:
    """Form a round, lose a member's processes, and form the next round."""
    begun = time.process_time()
    engine = crowd(nodes)
    arrived = time.process_time()
    told = last_joins(engine, nodes)
    formed = time.process_time()
    assert len(told) == nodes
    over = engine.handle(_join(0, after=Round(1)), 1.0)
    members = _told(over, RoundOver)
    lost = time.process_time()
    assert len(members) == nodes
    for number in range(1, nodes):
        told = _told(engine.handle(_join(number, after=Round(1)), 1.0), RoundFormed)
    regrouped = time.process_time()
    assert len(told) == nodes
    for number in range(nodes):
        engine.heard(_key(number), 1.5)
    heard = time.process_time()
    events = 3 * nodes + 1
    return ScaleReport(
        nodes=nodes,
        arrive_seconds=arrived - begun,
        last_join_to_told_seconds=formed - arrived,
        loss_to_told_seconds=lost - formed,
        regroup_seconds=regrouped - lost,
        events=events,
        events_per_second=events / max(regrouped - begun, 1e-9),
        heartbeats_per_second=nodes / max(heard - regrouped, 1e-9),
    )


def _key(number: int) -> NodeKey:
    return NodeKey(WORKER, NodeId(number))


def _join(number: int, after: Round = NO_ROUND) -> ev.AgentSaid:
    return ev.AgentSaid(node=_key(number), message=Join(after=after, store_port=29500))


def _told(decisions: list[de.AnyDecision], kind: type[MasterMessage]) -> set[NodeKey]:
    return {node for d in decisions if isinstance(d, de.Send) and isinstance(d.message, kind) for node in d.to}
