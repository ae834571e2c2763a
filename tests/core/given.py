"""Jobs in a given situation, in one line each."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

import msgspec

from resile.api.ids import NodeId, NodeKey, Rank, Round
from resile.api.job import JobSpec, RoleSpec
from resile.api.kinds.run.names import RUN_KIND, WORKER
from resile.api.timeouts import derive
from resile.core import decisions as de
from resile.core import events as ev
from resile.core.engine import Engine
from resile.core.state import JobState, Node, new_state
from resile.protocol.agent_to_master import AgentMessage, Hello, Join, StepReport, WorkerFailed
from resile.protocol.job_changes import Change
from resile.protocol.master_to_agent import RoundFormed
from resile.protocol.message import PROTOCOL, Message
from resile.protocol.reports import NodeEnd, NodeStatus, RendezvousConfig, RoundAssignment, WorkerFailure

D = TypeVar("D", bound=de.Decision)
M = TypeVar("M", bound=Message)
CRASH = NodeEnd(exit_code=1)
PREEMPTED = NodeEnd(reason="Preempted")
CARRIERS = (de.Send, de.Admit, de.Refuse, de.Finish)


def key(number: int, role: str = WORKER) -> NodeKey:
    return NodeKey(role, NodeId(number))


def failure(at: float = 1.0, pid: int = 7, *, oom: bool = False, rank: int = 0) -> WorkerFailure:
    return WorkerFailure(
        global_rank=rank, local_rank=0, pid=pid, at=at, exit_code=0 if oom else 1, signal=9 if oom else 0, oom=oom
    )


class Job:
    """An engine, a clock, and the decisions that came out last."""

    def __init__(self, spec: JobSpec, meeting: RendezvousConfig) -> None:
        self.engine = Engine(new_state(spec, 0.0))
        self.meeting = meeting
        self.now = 0.0
        self.out: list[de.AnyDecision] = []
        self.connections = 0
        self.first = msgspec.msgpack.encode(self.state)
        self.journal: list[bytes] = []

    @property
    def state(self):
        return self.engine.state

    @property
    def timeouts(self):
        return self.state.spec.timeouts

    def node(self, number: int, role: str = WORKER) -> Node:
        return self.state.nodes[key(number, role)]

    def does(self, event: ev.AnyEvent) -> list[de.AnyDecision]:
        if self.engine.durable(event):
            self.journal.append(msgspec.msgpack.encode((self.now, event)))
        self.out = self.engine.handle(event, self.now)
        assert self.engine.consistent()
        return self.out

    def replayed(self) -> Engine:
        """Another engine, from nothing but what a journal would have."""
        history = [msgspec.msgpack.decode(one, type=tuple[float, ev.AnyEvent]) for one in self.journal]
        return Engine.replay(msgspec.msgpack.decode(self.first, type=JobState), history)

    def wait(self, seconds: float) -> list[de.AnyDecision]:
        """Let time pass, stopping at every deadline."""
        until, out = self.now + seconds, []
        while (at := self.engine.next_deadline()) is not None and at <= until:
            self.now = max(self.now, at)
            for event in self.engine.due(self.now):
                out += self.does(event)
        self.now, self.out = until, out
        return out

    def said(self, kind: type[D], out: Iterable[de.AnyDecision] | None = None) -> list[D]:
        return [d for d in (self.out if out is None else out) if isinstance(d, kind)]

    def sent(self, kind: type[M], out: Iterable[de.AnyDecision] | None = None) -> list[M]:
        """The messages of this kind that agents are sent, each once however many get it."""
        carriers = (d for d in (self.out if out is None else out) if isinstance(d, CARRIERS))
        return [d.message for d in carriers if isinstance(d.message, kind)]

    def told(self, kind: type[M]) -> tuple[NodeKey, ...]:
        """The nodes that are sent a message of this kind."""
        return tuple(node for d in self.said(de.Send) if isinstance(d.message, kind) for node in d.to)

    @property
    def assignments(self) -> dict[NodeKey, RoundAssignment]:
        """What the members of a round are told."""
        sends = [d for d in self.said(de.Send) if isinstance(d.message, RoundFormed)]
        return {node: d.message.assignment for d in sends for node in d.to}

    def notes(self) -> list[str]:
        return [note.reason for note in self.said(de.Note)]

    def wants(self, change: Change, request: int = 0) -> list[de.AnyDecision]:
        return self.does(ev.ChangeWanted(change=change, request=request))

    # what agents do

    def says(self, number: int | NodeKey, message: AgentMessage) -> list[de.AnyDecision]:
        node = number if isinstance(number, NodeKey) else key(number)
        return self.does(ev.AgentSaid(node=node, message=message))

    def comes(self, number: int | None = None, name: str = "", **more) -> list[de.AnyDecision]:
        self.connections += 1
        hello = Hello(
            protocol=PROTOCOL,
            job="job",
            incarnation=name or f"agent{number}",
            node_id=None if number is None else NodeId(number),
            **{"nproc": 1, "rendezvous": self.meeting, "host": "host", "address": "10.0.0.1", "role": WORKER} | more,
        )
        return self.does(ev.AgentConnected(connection=self.connections, hello=hello))

    def joins(self, number: int, after: int = 0) -> list[de.AnyDecision]:
        return self.says(number, Join(after=Round(after), store_port=29500))

    def fails(self, number: int, why: WorkerFailure | None = None, round_: int | None = None) -> list[de.AnyDecision]:
        number_of_round = self.state.rendezvous.last_round if round_ is None else Round(round_)
        return self.says(number, WorkerFailed(round=number_of_round, failure=why or failure()))

    def seen(self, number: int, status: NodeStatus, end: NodeEnd | None = None, role: str = WORKER, host: str = ""):
        return self.does(ev.NodeSeen(node=key(number, role), status=status, end=end or NodeEnd(), host=host))

    def steps(self, step: int, number: int = 0, total: int = 0) -> list[de.AnyDecision]:
        return self.says(number, StepReport(round=self.state.rendezvous.last_round, step=step, total=total))

    def train(self, seconds: float, number: int = 0) -> None:
        """So much training time passes."""
        step = self.state.progress.step + 1
        self.steps(step, number)
        self.now += seconds
        self.engine.restart_silence_timers(self.now)
        self.steps(step + 1, number)
        self.wait(0.0)

    def heartbeats(self) -> None:
        for node in self.state.nodes:
            self.engine.heard(node, self.now)

    # what is asserted

    @property
    def members(self) -> list[int]:
        running = self.state.rendezvous.running
        return [k.id for k in running.assignments] if running is not None else []

    @property
    def launched(self) -> list[int]:
        return [d.node.id for d in self.said(de.LaunchNode)]

    @property
    def deleted(self) -> list[int]:
        return [d.node.id for d in self.said(de.DeleteNode)]


def managed(nodes: int, least: int = 1, most: int | None = None, **more) -> Job:
    """A job whose nodes a platform launches; it has just started."""
    meeting = {k: more.pop(k) for k in list(more) if k in RendezvousConfig.__struct_fields__}
    timeouts = derive(**more.pop("timeouts", {}))
    roles = more.pop("roles", {})
    role = RoleSpec(replicas=nodes, **more)
    spec = JobSpec(name="job", kind="elasticjob", roles={WORKER: role, **roles}, timeouts=timeouts)
    job = Job(spec, RendezvousConfig(min_nodes=least, max_nodes=most or nodes, **meeting))
    job.does(ev.Started())
    return job


def bare(least: int, most: int, **more) -> Job:
    """A job on bare machines; nobody has come yet."""
    timeouts = derive(**more.pop("timeouts", {}))
    spec = JobSpec(name="job", kind=RUN_KIND, timeouts=timeouts)
    job = Job(spec, RendezvousConfig(min_nodes=least, max_nodes=most, **more))
    job.does(ev.Started())
    return job


def running(nodes: int, least: int = 1, most: int | None = None, **more) -> Job:
    """A managed job in its first round with all its nodes."""
    job = managed(nodes, least, most, **more)
    for number in range(nodes):
        job.comes(number)
        job.joins(number)
    if not job.members:
        job.wait(job.timeouts.straggler_wait)
        job.heartbeats()
    assert job.members == list(range(nodes))
    return job


def running_bare(nodes: int, least: int = 1, most: int | None = None, **more) -> Job:
    """A bare job in its first round with so many nodes."""
    job = bare(least, most or nodes, **more)
    for number in range(nodes):
        job.comes(name=f"agent{number}")
        job.joins(number)
    if not job.members:
        for _ in range(20):
            job.heartbeats()
            job.wait(job.timeouts.last_call / 20)
    assert job.members == list(range(nodes))
    return job


def joins_again(job: Job, *numbers: int) -> None:
    """These nodes have stopped their processes and wait for the next round."""
    for number in numbers:
        job.joins(number, after=job.state.rendezvous.last_round)


def place_of(role: str, rank: int) -> tuple[str, Rank]:
    return role, Rank(rank)


def lose(job: Job, number: int, connection: int) -> None:
    """The agent of this node disconnects and does not come back in time."""
    job.heartbeats()
    job.does(ev.AgentDisconnected(node=job.node(number).key, connection=connection))
    job.wait(job.timeouts.reconnect)
