"""The simulated cluster: one job, its nodes, its network and its masters one after the other, in virtual time."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
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
from resile.sim.schedule import Schedule, draw
from resile.sim.world.agent import Mode, SimAgent
from resile.sim.world.elastic_agent import ElasticAgent
from resile.sim.world.master import MemoryJournal, SimMaster
from resile.sim.world.network import Network
from resile.sim.world.platform import SimPlatform
from resile.sim.world.training import SAVE_EVERY, SimTraining

ASK_AGAIN = 1.0
"""Seconds after which a person repeats a request that was not answered."""

Line = tuple[float, str, object]
"""One line of the trace: (time, who, what). `what` becomes text only when the trace is read."""


class Cluster:
    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.clock = Clock()
        self.schedule: Schedule = draw(self.rng)
        self.net = Network(self.clock, self.rng)
        self.data = self.schedule.data
        every = 1 if self.schedule.elastic else SAVE_EVERY
        self.training = (
            None if self.data else SimTraining(self.clock, self.schedule.steps, self.schedule.step_time, every)
        )
        self.heartbeat: float = self.schedule.spec.timeouts.heartbeat
        self.platform = SimPlatform(self, self.schedule.behaviour)
        self.agents: list[SimAgent] = []
        self.trace: list[Line] = []
        self.checks = Invariants()
        self.process_failures = 0
        self.node_failures = 0
        self.master_crashes = 0
        self._pids = count(100)
        self._requests = count(1)
        self._wanted: deque[ev.ChangeWanted] = deque()
        state = new_state(self.schedule.spec, 0.0)
        self.master = SimMaster(self, Engine(state), MemoryJournal(state))

    def start(self) -> None:
        self.master.submit(ev.Started())
        if not self.schedule.spec.managed:
            for _ in range(self.schedule.nodes):
                self.clock.after(self.rng.uniform(0.0, 4.0), self.arrive)

    @property
    def state(self) -> JobState:
        return self.master.engine.state

    @property
    def alive(self) -> list[SimAgent]:
        return [agent for agent in self.agents if agent.mode is not Mode.GONE]

    def tell(self, who: str, what: object) -> None:
        self.trace.append((self.clock.now, who, what))

    # agents --------------------------------------------------------------------------------------------------------

    def arrive(self) -> None:
        self.boot(None)

    def boot(self, key: NodeKey | None) -> SimAgent:
        kind = ElasticAgent if self.schedule.elastic else SimAgent
        agent = kind(self, f"agent{len(self.agents)}", self.schedule.rendezvous, self.schedule.nproc, key)
        self.tell(agent.incarnation, f"starts on {key or 'a bare machine'}")
        self.agents.append(agent)
        agent.connect()
        return agent

    def reach(self) -> SimMaster | None:
        return None if self.master.dead else self.master

    def new_pid(self) -> int:
        """Return an unused process id for a process that fails, and count the failure in `process_failures`."""
        self.process_failures += 1
        return next(self._pids)

    # the platform and people ---------------------------------------------------------------------------------------

    def watcher(self) -> Callable[[ev.NodeSeen], None]:
        master = self.master
        return lambda seen: None if master.dead else master.submit(seen)

    def replied(self, reply: de.Reply) -> None:
        if self._wanted and self._wanted[0].request == reply.request:
            self._wanted.popleft()
            self._ask()

    def ask_for(self, change: Change) -> None:
        """Queue a change. The master is asked for one change at a time, and is asked again until it replies."""
        self._wanted.append(ev.ChangeWanted(change=change, request=next(self._requests)))
        if len(self._wanted) == 1:
            self._ask()

    def forget(self, uid: str) -> None:
        """Delete a plan. If the master is dead, no master ever learns of the deletion."""
        if not self.master.dead:
            self.master.submit(ev.PlanDeleted(uid=uid))

    def _ask(self) -> None:
        if not self._wanted:
            return
        wanted = self._wanted[0]
        if not self.master.dead:
            self.master.submit(wanted)
        self.clock.after(ASK_AGAIN, lambda: self._ask_again(wanted))

    def _ask_again(self, wanted: ev.ChangeWanted) -> None:
        if self._wanted and self._wanted[0] is wanted:
            self._ask()

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
