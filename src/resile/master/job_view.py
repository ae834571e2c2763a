"""The view of a job that people see (`resile.api.job_view`), made from the state of the core."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import msgspec

from resile.api.ids import NO_ROUND, Bytes, NodeKey
from resile.api.job_phase import JobPhase
from resile.api.job_view import DatasetView, JobView, NodeView, OutageView
from resile.api.kinds.registry import node_name
from resile.core import progress
from resile.core import state as core
from resile.core.state import JobState, Node
from resile.protocol.reports import NodeStatus


class StandbyView(NamedTuple):
    ready: int = 0
    memory: Bytes = Bytes(0)


def shown_phase(state: JobState) -> JobPhase:
    """The phase that users see. It is that of the core, but instead of Running it may be Restarting or Scaling.

    Restarting lasts from a loss to the next step. Scaling lasts until all changes of the job's nodes are complete.
    """
    if state.phase is not core.Phase.RUNNING:
        return JobPhase(state.phase.value)
    if _recovers(state):
        return JobPhase.RESTARTING
    return JobPhase.SCALING if state.changes else JobPhase.RUNNING


def _recovers(state: JobState) -> bool:
    rdzv = state.rendezvous
    if rdzv.config is None:  # a job without rounds recovers until each command runs again
        return any(n.alive and n.relaunch_count and n.status is not NodeStatus.RUNNING for n in state.nodes.values())
    if rdzv.forming is not None:
        return rdzv.forming.lost
    last = state.progress.outages[-1] if state.progress.outages else None
    return last is not None and bool(last.node) and last.next_step_at is None


def view(state: JobState, now: float, standbys: Mapping[NodeKey, StandbyView] | None = None) -> JobView:
    """The job as users see it at the time `now`; `standbys` is what connected agents reported of their standbys."""
    config, running = state.rendezvous.config, state.rendezvous.running
    order = state.spec.role_order
    in_order = sorted(state.nodes.values(), key=lambda node: (order(node.key.role), node.key.id))
    until = state.ended_at if state.ended_at is not None else now
    return JobView(
        name=state.spec.name,
        namespace=state.spec.namespace,
        phase=shown_phase(state),
        reason=state.reason,
        message=state.message,
        created_at=state.created_at,
        started_at=state.started_at,
        ended_at=state.ended_at,
        at=now,
        round=running.round if running else NO_ROUND,
        members=len(running.assignments) if running else 0,
        min_nodes=config.min_nodes if config else 0,
        max_nodes=config.max_nodes if config else 0,
        step=state.progress.step,
        total=state.progress.total,
        speed=progress.speed(state.progress, now),
        goodput=progress.goodput(state.progress, state.started_at, until),
        nodes=[_node(state, node, (standbys or {}).get(node.key, StandbyView())) for node in in_order],
        outages=msgspec.convert(state.progress.outages, list[OutageView], from_attributes=True),
        datasets=[
            DatasetView(name=d.name, done=d.done, total=d.size * d.epochs, leased=len(d.leases))
            for d in state.ledger.datasets.values()
        ],
    )


def _node(state: JobState, node: Node, standbys: StandbyView) -> NodeView:
    return NodeView(
        name=node_name(state.spec, node.key.role, node.key.id),
        role=node.key.role,
        id=node.key.id,
        rank=node.rank,
        status=_status(state, node),
        ready=node.status is NodeStatus.RUNNING,
        restarts=node.restarts,
        crashes=len(node.crashes),
        relaunch_count=node.relaunch_count,
        launched_at=node.launched_at,
        ended_at=node.ended_at,
        host=node.host,
        address=node.agent.address if node.agent is not None else "",
        message=node.end.message,
        standbys=standbys.ready,
        standby_memory=standbys.memory,
        ready_containers=int(node.status is NodeStatus.RUNNING),
    )


def _status(state: JobState, node: Node) -> str:
    match node.status:
        case NodeStatus.SUCCEEDED:
            return "Completed"
        case NodeStatus.FAILED:
            return node.end.reason or "Error"
        case NodeStatus.DELETED:
            return "Deleted"
        case NodeStatus.LAUNCHING | NodeStatus.STARTING:
            return "ContainerCreating"
        case NodeStatus.PENDING if node.held_until is not None:
            return "CrashLoopBackOff"
    if node.leaving and state.phase is not core.Phase.SUCCEEDED:
        return "Terminating"
    return str(node.status)
