"""A simulated platform: nodes that start late, wait for room, never start, are taken away, and are reported late."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from resile.api.ids import NodeKey
from resile.core.decisions import DeleteNode, LaunchNode
from resile.core.events import NodeSeen
from resile.protocol.reports import NodeEnd, NodeStatus

if TYPE_CHECKING:
    from resile.sim.cluster import Cluster
    from resile.sim.world.agent import SimAgent


class NodeBehaviour(msgspec.Struct, frozen=True, kw_only=True):
    """The probability of each way in which the launch of a node can go wrong."""

    pending: float = 0.0
    """The node waits for room for a while."""
    stuck: float = 0.0
    """There will never be room for the node."""
    slow: float = 0.0
    broken: float = 0.0
    """The node ends before its agent connects."""


class Machine:
    def __init__(self, key: NodeKey) -> None:
        self.key = key
        self.status = NodeStatus.LAUNCHING
        self.end = NodeEnd()
        self.agent: SimAgent | None = None
        self.deleting = False
        self.reported_at = 0.0


class SimPlatform:
    def __init__(self, host: Cluster) -> None:
        self._host = host
        self.machines: dict[NodeKey, Machine] = {}

    def launch(self, decision: LaunchNode) -> None:
        known = self.machines.get(decision.node)
        if known is not None and known.status is not NodeStatus.DELETED:
            return
        rng, clock = self._host.rng, self._host.clock
        machine = self.machines[decision.node] = Machine(decision.node)
        behaviour = NodeBehaviour() if self._host.calm else self._host.schedule.behaviour
        delay = rng.uniform(0.05, 0.5)
        luck = rng.random()
        if luck < behaviour.stuck + behaviour.pending:
            clock.after(delay, lambda: self._move(machine, NodeStatus.PENDING))
            if luck < behaviour.stuck:
                return
            delay += rng.uniform(0.5, 20.0)
        clock.after(delay, lambda: self._move(machine, NodeStatus.STARTING))
        delay += rng.uniform(5.0, 25.0) if rng.random() < behaviour.slow else rng.uniform(0.1, 2.0)
        if rng.random() < behaviour.broken:
            end = NodeEnd(exit_code=1, reason="StartError")
            clock.after(delay, lambda: self.end(machine, NodeStatus.FAILED, end))
        else:
            clock.after(delay, lambda: self._run(machine))

    def delete(self, decision: DeleteNode) -> None:
        machine = self.machines.get(decision.node)
        if machine is None or machine.status.ended or machine.deleting:
            return
        machine.deleting = True
        delay = self._host.rng.uniform(0.02, max(0.05, decision.grace))
        if machine.agent is not None and self._host.rng.random() < 0.5:
            agent = machine.agent
            self._host.clock.after(delay / 2, lambda: agent.leave("SIGTERM"))
        self._host.clock.after(delay, lambda: self.end(machine, NodeStatus.DELETED, NodeEnd()))

    def exited(self, agent: SimAgent, code: int) -> None:
        for machine in self.machines.values():
            if machine.agent is agent:
                status = NodeStatus.FAILED if code else NodeStatus.SUCCEEDED
                self.end(machine, status, NodeEnd(exit_code=code, reason="Error" if code else "Completed"))

    def listed(self) -> tuple[NodeSeen, ...]:
        return tuple(
            NodeSeen(node=m.key, status=m.status, end=m.end)
            for m in self.machines.values()
            if m.status is not NodeStatus.DELETED
        )

    def _run(self, machine: Machine) -> None:
        if not machine.status.ended:
            machine.agent = self._host.boot(machine.key)
            self._move(machine, NodeStatus.RUNNING)

    def _move(self, machine: Machine, status: NodeStatus) -> None:
        if not machine.status.ended:
            machine.status = status
            self._report(machine)

    def end(self, machine: Machine, status: NodeStatus, end: NodeEnd) -> None:
        if machine.status.ended:
            return
        self._host.tell(str(machine.key), f"ends: {status} {end.reason}")
        machine.status, machine.end = status, end
        if machine.agent is not None:
            machine.agent.die()
        self._report(machine)

    def _report(self, machine: Machine) -> None:
        seen = NodeSeen(node=machine.key, status=machine.status, end=machine.end)
        clock = self._host.clock
        machine.reported_at = max(machine.reported_at, clock.now + self._host.rng.uniform(0.005, 0.8))
        submit = self._host.master.submit  # a master that returns lists all nodes, so no report is kept for it
        clock.at(machine.reported_at, lambda: submit(seen))
