"""Connections between agents and the master: ordered while they last, but late, torn, and with repeated messages."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from resile.protocol.agent_to_master import AgentMessage, Hello
from resile.protocol.master_to_agent import MasterMessage
from resile.sim.clock import Call, Clock

if TYPE_CHECKING:
    from resile.sim.world.agent import SimAgent
    from resile.sim.world.master import SimMaster

QUICKEST, SLOWEST = 0.0005, 0.02
"""Seconds that most messages take."""
SLUGGISH = 0.3
TWICE = 0.02
"""The probability that a message arrives twice."""


class Network:
    def __init__(self, clock: Clock, rng: random.Random) -> None:
        self.clock = clock
        self.rng = rng
        self.calm = False

    def delay(self) -> float:
        if not self.calm and self.rng.random() < 0.01:
            return self.rng.uniform(SLOWEST, SLUGGISH)
        return self.rng.uniform(QUICKEST, SLOWEST)


class Link:
    """One connection between an agent and a master. Messages of one sender keep their order, but some arrive twice."""

    def __init__(self, net: Network, agent: SimAgent, master: SimMaster) -> None:
        self._net = net
        self.agent = agent
        self.master = master
        self.open = True
        self._agent_deaf = False
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
        self._agent_deaf = True
        self._master_deaf = self._net.rng.random() < 0.5
        now = self._net.clock.now
        self._at(max(self._last_up, now + self._net.delay()), self._end_up)
        self._at(now + self._net.delay(), lambda: self.agent.unlinked(self))

    def healed(self) -> None:
        held, self._held = self._held, []
        for call in held:
            call()

    def _send(self, last: float, arrive: Call) -> float:
        if not self.open:
            return last
        at = max(last, self._net.clock.now + self._net.delay())
        self._at(at, arrive)
        if not self._net.calm and self._net.rng.random() < TWICE:
            self._at(at + self._net.delay(), arrive)
        return at

    def _at(self, when: float, arrive: Call) -> None:
        def call() -> None:
            if self.agent.cut:
                self._held.append(call)
            else:
                arrive()

        self._net.clock.at(when, call)

    def _arrive_up(self, message: Hello | AgentMessage) -> None:
        if not self._master_deaf:
            self.master.hear(self, message)

    def _arrive_down(self, message: MasterMessage) -> None:
        if not self._agent_deaf:
            self.agent.hear(self, message)

    def _end_up(self) -> None:
        self._master_deaf = True
        self.master.unlinked(self)
