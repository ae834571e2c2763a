"""Simulated agents: only the agent's side of the protocol.

On every connection an agent says Hello with its whole state and repeats what was not answered. It obeys only newer
rounds, joins again when its round is over and its processes are down, and exits when it is told to.
"""

from __future__ import annotations

import enum
from functools import partial
from typing import TYPE_CHECKING

from resile.api.ids import NO_ROUND, NodeId, NodeKey, Round
from resile.api.kinds.run.names import WORKER
from resile.protocol.agent_to_master import (
    AgentMessage,
    Heartbeat,
    Hello,
    Join,
    Leaving,
    NodeFinished,
    ShardsFreed,
    WorkerFailed,
)
from resile.protocol.master_to_agent import (
    JobOver,
    Leave,
    MasterMessage,
    Refused,
    RoundComplete,
    RoundFormed,
    RoundOver,
    Welcome,
)
from resile.protocol.message import PROTOCOL
from resile.protocol.reports import RoundAssignment, WorkerFailure
from resile.protocol.shards import DatasetOpen, ShardGranted, ShardNoted
from resile.sim.clock import Call, Timer
from resile.sim.world.data_reader import DataReader
from resile.sim.world.network import Link

if TYPE_CHECKING:
    from resile.sim.cluster import Cluster

UNNUMBERED = NodeKey(WORKER, NodeId(-1))
"""The key of an agent on a bare machine before its first Welcome. No message is sent under it."""


class Mode(enum.StrEnum):
    WAITING = "waiting"
    STARTING = "starting"
    RUNNING = "running"
    COMPLETING = "completing"
    """Its round has taken the last step, and the master has not answered that yet."""
    EVALUATING = "evaluating"
    """Its round is complete, and its script goes on."""
    STOPPING = "stopping"
    FAILED = "failed"
    FINISHED = "finished"
    AHEAD = "ahead"
    GONE = "gone"


class SimAgent:
    def __init__(self, host: Cluster, incarnation: str, key: NodeKey | None) -> None:
        self._host = host
        self.incarnation = incarnation
        self._nproc = host.schedule.nproc
        self.key = key or UNNUMBERED
        self.mode = Mode.WAITING
        self.round: Round = NO_ROUND
        self.cut = False
        self.frozen = False
        self.waiting_since = self.healthy_since = host.clock.now
        self._place: RoundAssignment | None = None
        self._link: Link | None = None
        self._admitted = False
        self._timer = Timer()
        self._failure: WorkerFailure | None = None
        self._readers: dict[str, DataReader] = {}
        self._read: set[str] = set()
        self._gone: list[str] = []
        self._unheard: list[tuple[Link, MasterMessage]] = []

    # connections ---------------------------------------------------------------------------------------------------

    def connect(self) -> None:
        if self.mode is Mode.GONE or self._link is not None:
            return
        if self.cut or self.frozen or self._host.master.dead:
            self._host.clock.after(self._host.rng.uniform(0.02, 0.2), self.connect)
            return
        self._link = Link(self._host, self, self._host.master)
        self._admitted = False
        self._link.up(self._hello())

    def unlinked(self, link: Link) -> None:
        if link is self._link:
            self._link = None
            self._host.clock.after(self._host.rng.uniform(0.001, 0.12), self.connect)

    def tear(self) -> None:
        if self._link is not None:
            self._link.tear()

    def freeze(self, frozen: bool) -> None:
        self.frozen = frozen
        self.healthy_since = self._host.clock.now
        if not frozen:
            unheard, self._unheard = self._unheard, []
            for link, message in unheard:
                self.hear(link, message)

    def isolate(self, cut: bool) -> None:
        self.cut = cut
        self.healthy_since = self._host.clock.now
        if not cut and self._link is not None:
            self._link.healed()

    def hear(self, link: Link, message: MasterMessage) -> None:
        if self.mode is Mode.GONE or link is not self._link:
            return
        if self.frozen:
            self._unheard.append((link, message))
            return
        match message:
            case Welcome():
                self._welcome(message)
            case RoundFormed():
                self._start(message)
            case RoundOver():
                self._over(message.round)
            case RoundComplete():
                self._complete(message.round)
            case Refused() | Leave() | JobOver():
                self._exit(message)
            case DatasetOpen() | ShardGranted() | ShardNoted():
                if message.worker in self._readers:
                    self._readers[message.worker].answered(message)

    def _hello(self) -> Hello:
        schedule = self._host.schedule
        return Hello(
            protocol=PROTOCOL,
            job=schedule.spec.name,
            incarnation=self.incarnation,
            address=self.incarnation,
            host=self.incarnation,
            nproc=self._nproc,
            rendezvous=schedule.rendezvous,
            role=self.key.role,
            node_id=self.key.id if schedule.spec.managed else None,
            round=self.round,
            running=self.mode in (Mode.STARTING, Mode.RUNNING, Mode.STOPPING),
            finished=self.mode is Mode.FINISHED,
        )

    def _welcome(self, message: Welcome) -> None:
        first = not self._admitted
        self.key, self._admitted = message.node, True
        if first and self._link is not None:
            self._beat(self._link)
        for worker in self._gone:
            self.say(ShardsFreed(worker=worker))
        for reader in self._readers.values():
            if reader.pending is not None:
                self.say(reader.pending)
        if self.mode is Mode.WAITING:
            self._join()
        elif self.mode is Mode.FAILED and self._failure is not None:
            self.say(WorkerFailed(round=self.round, failure=self._failure))
        elif self.mode is Mode.FINISHED:
            self.say(NodeFinished(round=self.round))

    def _beat(self, link: Link) -> None:
        if self.mode is not Mode.GONE and link is self._link and link.open:
            if not self.frozen:
                link.up(Heartbeat())
            self._host.clock.after(self._host.schedule.spec.timeouts.heartbeat, lambda: self._beat(link))

    def say(self, message: AgentMessage) -> None:
        if self._link is not None and self._admitted:
            self._link.up(message)

    # rounds --------------------------------------------------------------------------------------------------------

    def _join(self) -> None:
        self.say(Join(after=self.round, store_port=29500))

    def _start(self, message: RoundFormed) -> None:
        if message.round <= self.round:
            return  # repeated, or older than what it knows
        self._down()
        self.round, self._place, self.mode = message.round, message.assignment, Mode.STARTING
        self._later(self._host.rng.uniform(0.1, 1.0), self._started)

    def _started(self) -> None:
        assert self._place is not None
        host, self.mode = self._host, Mode.RUNNING
        if host.training is not None:
            host.training.enter(self.round, self._place, self)
            return
        assert host.schedule.data is not None
        for number in range(self._nproc):
            name = f"{self.incarnation}/{self.round}/{number}"
            self._readers[name] = DataReader(host.clock, self, name, host.schedule.data)
        for reader in list(self._readers.values()):
            reader.start()

    def _over(self, round_: Round) -> None:
        if round_ < self.round or self.mode is Mode.STOPPING:
            return
        if self.mode is Mode.WAITING:
            self._join()
            return
        self._down()
        self.mode = Mode.STOPPING
        self._later(self._host.rng.uniform(0.02, 0.3), self._stopped)

    def _complete(self, round_: Round) -> None:
        return  # a restarting agent does not ask

    def _stopped(self) -> None:
        self.mode = Mode.WAITING
        self.waiting_since = self._host.clock.now
        self._join()

    def _down(self) -> list[SimAgent]:
        """End all training processes and return the other members of the round."""
        self._timer.cancel()
        self._failure = None
        for name in list(self._readers):
            self._end_reader(name)
        self._read.clear()
        return self._host.training.leave(self.round, self) if self._host.training is not None else []

    def _end_reader(self, name: str) -> None:
        self._readers.pop(name).stop()
        self._gone.append(name)
        self.say(ShardsFreed(worker=name))

    def _later(self, delay: float, what: Call) -> None:
        self._timer = self._host.clock.after(delay, what)

    # training ------------------------------------------------------------------------------------------------------

    @property
    def able(self) -> bool:
        return self.mode is Mode.RUNNING and not self.cut and not self.frozen

    def completed(self, round_: Round) -> None:
        if self.mode is Mode.RUNNING and round_ == self.round:
            self.mode = Mode.FINISHED
            self.say(NodeFinished(round=self.round))

    def read_all(self, reader: DataReader) -> None:
        """Note that a reader has seen the end of the data. This node has finished when all its readers have seen it."""
        self._read.add(reader.name)
        if len(self._read) == self._nproc:
            self.completed(self.round)

    # ends ----------------------------------------------------------------------------------------------------------

    def fail(self, *, oom: bool = False, collateral: bool = False) -> None:
        """Let a training process fail, if one runs. With `collateral`, it fails because a peer failed."""
        if self.mode is not Mode.RUNNING:
            return
        host = self._host
        left: list[SimAgent] = []
        if host.training is not None:
            left = host.training.leave(self.round, self)
        elif self._readers:
            self._end_reader(host.rng.choice(sorted(self._readers)))
        self.mode = Mode.FAILED
        self._failure = self._new_failure(oom, "connection closed by peer" if collateral else "")
        host.tell(self.incarnation, f"a process of round {self.round} fails{' (collateral)' if collateral else ''}")
        self.say(WorkerFailed(round=self.round, failure=self._failure))
        self._abandon(left)

    def _new_failure(self, oom: bool, error: str = "") -> WorkerFailure:
        return WorkerFailure(
            global_rank=0,
            local_rank=0,
            pid=self._host.new_pid(),
            at=self._host.clock.now,
            exit_code=0 if oom else 1,
            signal=9 if oom else 0,
            error=error,
            oom=oom,
        )

    def _abandon(self, left: list[SimAgent]) -> None:
        for other in left:
            if self._host.rng.random() < 0.5:
                self._host.clock.after(self._host.rng.uniform(0.01, 1.5), partial(other.break_collective, other.round))

    def break_collective(self, round_: Round) -> None:
        if self.round == round_:
            self.fail(collateral=True)

    def leave(self, because: str) -> None:
        if self.mode is not Mode.GONE:
            self.say(Leaving(because=because))
            self.die()

    def die(self, *, silently: bool = False) -> None:
        """End at once with all processes. With `silently`, no connection is closed, as after a power cut."""
        if self.mode is Mode.GONE:
            return
        link, self._admitted = self._link, False
        left = self._down()
        self.mode = Mode.GONE
        self._link = None
        if link is not None:
            if silently:
                self.cut = True
            else:
                link.tear()
        self._abandon(left)

    def _exit(self, message: Refused | Leave | JobOver) -> None:
        match message:
            case Leave():
                code = message.exit_code
            case JobOver():
                code = 0 if message.succeeded else 1
            case Refused():
                code = 1
        self._host.tell(self.incarnation, f"exits after {message}")
        self.die()
        self._host.platform.exited(self, code)
