"""The simulated cluster: one job, its nodes, its network and its masters one after the other, in virtual time."""

from __future__ import annotations

import random
from collections import deque
from itertools import count

import msgspec

from resile.api.ids import NodeKey
from resile.core import decisions as de
from resile.core import events as ev
from resile.core.engine import Engine
from resile.core.progress import Progress
from resile.core.state import JobState, new_state
from resile.protocol.job_changes import Change
from resile.sim.clock import Clock
from resile.sim.invariants import Invariants, require
from resile.sim.reference_ledger import ReferenceLedger
from resile.sim.schedule import draw
from resile.sim.world.agent import Mode, SimAgent
from resile.sim.world.elastic_agent import ElasticAgent
from resile.sim.world.master import MemoryJournal, SimMaster
from resile.sim.world.platform import SimPlatform
from resile.sim.world.training import SimTraining

ASK_AGAIN = 1.0
"""Seconds after which a person repeats a request that was not answered."""

Line = tuple[float, str, object]
"""One line of the trace: (time, who, what). `what` becomes text only when the trace is read."""


class Cluster:
    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.clock = Clock()
        self.schedule = draw(self.rng)
        self.calm = False
        """True if no message is late or repeated any more, and no launch goes wrong."""
        self.training = None if self.schedule.data else SimTraining(self.clock, self.schedule)
        self.platform = SimPlatform(self)
        self.agents: list[SimAgent] = []
        self.trace: list[Line] = []
        self.checks = Invariants()
        self.ledger = ReferenceLedger()
        self.process_failures = 0
        self.node_failures = 0
        self.master_crashes = 0
        self._requests = count(1)
        self._wanted: deque[ev.ChangeWanted] = deque()
        state = new_state(self.schedule.spec, 0.0)
        self.master = SimMaster(self, Engine(state), MemoryJournal(state))

    def start(self) -> None:
        self.master.submit(ev.Started())
        if not self.schedule.spec.managed:
            for _ in range(self.schedule.nodes):
                self.clock.after(self.rng.uniform(0.0, 4.0), self.boot)

    @property
    def state(self) -> JobState:
        return self.master.engine.state

    @property
    def alive(self) -> list[SimAgent]:
        return [agent for agent in self.agents if agent.mode is not Mode.GONE]

    def tell(self, who: str, what: object) -> None:
        self.trace.append((self.clock.now, who, what))

    # agents --------------------------------------------------------------------------------------------------------

    def boot(self, key: NodeKey | None = None) -> SimAgent:
        """Start an agent on the node `key`, or on a bare machine if `key` is None."""
        kind = ElasticAgent if self.schedule.elastic else SimAgent
        agent = kind(self, f"agent{len(self.agents)}", key)
        self.tell(agent.incarnation, f"starts on {key or 'a bare machine'}")
        self.agents.append(agent)
        agent.connect()
        return agent

    def new_pid(self) -> int:
        """Return an unused process id for a process that fails, and count the failure in `process_failures`."""
        self.process_failures += 1
        return self.process_failures

    # people --------------------------------------------------------------------------------------------------------

    def replied(self, reply: de.Reply) -> None:
        if self._wanted and self._wanted[0].request == reply.request:
            self._wanted.popleft()
            if self._wanted:
                self._ask(self._wanted[0])

    def ask_for(self, change: Change) -> None:
        """Queue a change. The master is asked for one change at a time, and is asked again until it replies."""
        self._wanted.append(ev.ChangeWanted(change=change, request=next(self._requests)))
        if len(self._wanted) == 1:
            self._ask(self._wanted[0])

    def _ask(self, wanted: ev.ChangeWanted) -> None:
        if wanted in self._wanted:
            self.master.submit(wanted)
            self.clock.after(ASK_AGAIN, lambda: self._ask(wanted))

    # the master's death --------------------------------------------------------------------------------------------

    def crash_master(self, down: float) -> None:
        if self.master.dead:
            return
        self.tell("master", f"dies, back in {down:.2f} s")
        self.master_crashes += 1
        self.master.die()
        self.check_replay()
        self.clock.after(down, self._return_master)

    def check_replay(self) -> None:
        """Check that a replay of the journal gives the state that the master has; raises `InvariantBroken` if not."""
        live, again = self.state, Engine.replay(*self.master.journal.load())
        require(_durable(again.state) == _durable(live), "replaying the journal gives the live state")
        require(again.consistent(), "a replayed engine's indexes agree with its state")

    def _return_master(self) -> None:
        journal = self.master.journal
        engine = Engine.replay(*journal.load())
        self.checks.reborn(engine.state.progress.step)
        self.master = SimMaster(self, engine, journal)
        self.tell("master", "is back")
        self.master.submit(ev.MasterReturned())
        if self.schedule.spec.managed:
            self.master.submit(ev.NodesListed(seen=self.platform.listed()))


def _durable(state: JobState) -> JobState:
    """A copy of the state without progress, to be compared. The journal has only a summary of the progress."""
    return msgspec.structs.replace(state, progress=Progress())
