"""Connections between agents and the master: ordered while they last, but late, torn, and with repeated messages."""

from __future__ import annotations

from typing import TYPE_CHECKING

from resile.api.ids import NodeKey
from resile.protocol.agent_to_master import AgentMessage, Hello
from resile.protocol.master_to_agent import MasterMessage
from resile.sim.clock import Call

if TYPE_CHECKING:
    from resile.sim.cluster import Cluster
    from resile.sim.world.agent import SimAgent
    from resile.sim.world.master import SimMaster

QUICKEST, SLOWEST = 0.0005, 0.02
"""Seconds that most messages take."""
SLUGGISH = 0.3
TWICE = 0.02
"""The probability that a message arrives twice."""


class Link:
    """One connection between an agent and a master. Messages of one sender keep their order, but some arrive twice."""

    def __init__(self, host: Cluster, agent: SimAgent, master: SimMaster) -> None:
        self._host = host
        self.agent = agent
        self.master = master
        self.open = True
        self.number = 0
        """The master's number for this connection; 0 before the master has heard Hello."""
        self.node: NodeKey | None = None
        """The node that the master admitted on this connection; None before that, and once it has a newer one."""
        self._master_deaf = False
        self._last_up = 0.0
        self._last_down = 0.0
        self._held: list[Call] = []

    def up(self, message: Hello | AgentMessage) -> None:
        self._last_up = self._send(self._last_up, lambda: self._arrive_up(message))

    def down(self, message: MasterMessage) -> None:
        self._last_down = self._send(self._last_down, lambda: self._arrive_down(message))

    def tear(self) -> None:
        """End the connection. The agent's last messages may still arrive, the master's do not."""
        if not self.open:
            return
        self.open = False
        self._master_deaf = self._host.rng.random() < 0.5
        now = self._host.clock.now
        self._at(max(self._last_up, now + self._delay()), self._end_up)
        self._at(now + self._delay(), lambda: self.agent.unlinked(self))

    def healed(self) -> None:
        held, self._held = self._held, []
        for call in held:
            call()

    def _send(self, last: float, arrive: Call) -> float:
        if not self.open:
            return last
        at = max(last, self._host.clock.now + self._delay())
        self._at(at, arrive)
        if not self._host.calm and self._host.rng.random() < TWICE:
            self._at(at + self._delay(), arrive)
        return at

    def _delay(self) -> float:
        rng = self._host.rng
        if not self._host.calm and rng.random() < 0.01:
            return rng.uniform(SLOWEST, SLUGGISH)
        return rng.uniform(QUICKEST, SLOWEST)

    def _at(self, when: float, arrive: Call) -> None:
        def call() -> None:
            if self.agent.cut:
                self._held.append(call)
            else:
                arrive()

        self._host.clock.at(when, call)

    def _arrive_up(self, message: Hello | AgentMessage) -> None:
        if not self._master_deaf:
            self.master.hear(self, message)

    def _arrive_down(self, message: MasterMessage) -> None:
        if self.open:
            self.agent.hear(self, message)

    def _end_up(self) -> None:
        self._master_deaf = True
        self.master.unlinked(self)
