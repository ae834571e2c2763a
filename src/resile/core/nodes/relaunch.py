"""Replaces lost nodes, or gives their ranks up.

`restart_budget` decides whether, and the cause of the loss decides how: a node that ran out of memory gets a successor
with more (`oom_memory`), and a rank whose nodes crash soon after their launch waits longer from crash to crash.
"""

from __future__ import annotations

import msgspec

from resile.api.ids import Bytes, GiB, NodeKey
from resile.api.job import Loss
from resile.api.plan import NodeResources
from resile.common.backoff import Backoff
from resile.core import completion
from resile.core.completion import Reason
from resile.core.context import Context
from resile.core.deadlines import Alarm
from resile.core.nodes import (
    failure_causes,
    launching,
    migration,
    resource_limits,
    restart_budget,
    scale_operations,
    wanted_ranks,
)
from resile.core.nodes.failure_causes import LOST, Cause
from resile.core.nodes.oom_memory import LARGEST_MEMORY, memory_after_oom
from resile.core.nodes.restart_budget import Spent
from resile.core.rendezvous import forming
from resile.core.state import Node
from resile.protocol.reports import NodeEnd, NodeStatus

QUICK_SECONDS = 10.0
"""A node that crashes so soon after its launch, not for the first time in its rank, is replaced after a delay."""
DELAY = Backoff(1.0, 30.0)
"""How long the launch is delayed after such a crash, by the number of earlier crashes of the rank."""
UNSTARTABLE, NOT_FOUND = "StartError", 127
"""The reason and exit code of a node whose program does not exist. Such a node is not replaced."""


class Relaunch(msgspec.Struct, frozen=True):
    """Launch another node, `delay` seconds from now. With `memory` None it gets as much memory as the lost node."""

    memory: Bytes | None = None
    delay: float = 0.0


class GiveUp(msgspec.Struct, frozen=True):
    """Launch no other node; `because` completes the sentence "worker-1 is not replaced: …"."""

    because: str


def decide(
    cause: Cause,
    used: int,
    crash_budget: int,
    memory: Bytes | None,
    lived: float = QUICK_SECONDS,
    limit: Bytes | None = None,
) -> Relaunch | GiveUp:
    """Decide whether a lost node is replaced, when, and with how much memory.

    `used` is the number of earlier losses of this rank by the same cause that still count. `crash_budget` is the
    `restartCount` of the role. `memory` is what the lost node had. `lived` is the seconds from its launch to its end.
    `limit` is the memory that the job's resourceLimits leave for its rank, or None if there is no such limit.
    """
    exhausted = restart_budget.why_exhausted(cause, used, crash_budget)
    if exhausted:
        return GiveUp(exhausted)
    if cause is Cause.CRASH and lived < QUICK_SECONDS:
        return Relaunch(delay=DELAY.after(used))
    if cause is Cause.OOM and memory is not None:
        if memory >= LARGEST_MEMORY:
            return GiveUp(f"it ran out of {memory // GiB} GiB of memory, the most a node is given")
        return Relaunch(memory_after_oom(memory, limit))
    return Relaunch()


def replace(ctx: Context, node: Node) -> None:
    """Replace a node that was lost, give its rank up, or end the job, as `decide` says."""
    state, role = ctx.state, node.key.role
    if not state.spec.managed:
        if ctx.index.trainers:
            return
        if node.end.reason == LOST:  # it may only be late, and come again as a new node
            ctx.deadlines.set(Alarm.JOIN, ctx.now + ctx.timeouts.master_recovery)
        else:
            fail_without_nodes(ctx, node)
        return
    replacement = scale_operations.replacement_of(ctx, node.key)
    if replacement is not None:
        migration.complete(ctx, state.nodes[replacement])
        return
    if not wanted_ranks.is_wanted(state, role, node.rank):
        return
    cause = failure_causes.cause_of(node.status, node.end)
    state.spent.setdefault((role, node.rank), Spent()).add(cause, state.trained, ctx.timeouts.budget_window)
    if node.end.exit_code in failure_causes.HARDWARE_EXIT_CODES:
        launching.avoid_machine(ctx, node)
    match _verdict(ctx, node, cause):
        case Relaunch(memory=more, delay=delay):
            _relaunch(ctx, node, more, delay)
        case GiveUp(because=why):
            _give_up(ctx, node, cause, why)


def on_end_explained(ctx: Context, node: Node, end: NodeEnd) -> None:
    """Handle the platform's report of why a node ended, after the core has counted the node as lost.

    The core first took the infrastructure for the cause. Now the loss is charged to the budget of the real cause, and
    whether the node is replaced is decided again. Most crashes become known in this way, because the master notices a
    closed connection before the platform reports the end of the container.
    """
    state, place = ctx.state, (node.key.role, node.rank)
    cause = failure_causes.cause_of(NodeStatus.FAILED, end)
    spent = state.spent.get(place)
    if node.end.reason != LOST or cause is Cause.INFRASTRUCTURE or spent is None or state.phase.over:
        return
    # The exit code of a signal explains nothing here: the core had the node killed when it counted it as lost.
    if cause is Cause.PREEMPTION and end.reason not in failure_causes.PREEMPTION_REASONS:
        return
    if not spent.move(Cause.INFRASTRUCTURE, cause):
        return
    node.end = end
    ctx.note("NodeExplained", f"{node.key} {node.how_it_ended}", node.key, warning=True)
    if not wanted_ranks.is_wanted(state, node.key.role, node.rank):
        return
    key = ctx.index.places.get(place)
    successor = state.nodes[key] if key is not None else None
    match _verdict(ctx, node, cause):
        case GiveUp(because=why):
            if successor is not None:
                launching.remove(ctx, successor, "is not needed: its place is given up")
                because = f"{node.key} is not replaced: {why}"
                scale_operations.fail_waiting_for(ctx, successor.key, scale_operations.GIVEN_UP, because)
            _give_up(ctx, node, cause, why)
        case Relaunch(memory=more) if more and successor is not None and successor.agent is None:
            launching.remove(ctx, successor, "has too little memory")
            scale_operations.on_node_replaced(ctx, successor.key, _relaunch(ctx, node, more))
    forming.form(ctx, ctx.state.rendezvous)


def fail_without_nodes(ctx: Context, last: Node) -> None:
    completion.fail(ctx, Reason.NO_NODES_LEFT, f"{last.key} was the last node, and it {last.how_it_ended}")


def _verdict(ctx: Context, node: Node, cause: Cause) -> Relaunch | GiveUp:
    """Decide whether a lost node is replaced. Call this only after the loss was added to `ctx.state.spent`."""
    if node.end.reason == UNSTARTABLE and node.end.exit_code == NOT_FOUND:
        return GiveUp("it cannot be started")
    declared = ctx.state.spec.roles[node.key.role]
    spent = ctx.state.spent[node.key.role, node.rank]
    used = spent.count(cause, ctx.state.trained, ctx.timeouts.budget_window) - 1
    memory = node.resources.memory or declared.limits.memory or declared.requests.memory
    lived = (node.ended_at or ctx.now) - node.launched_at
    limit = resource_limits.memory_for(ctx, node.key.role, node.rank) if cause is Cause.OOM else None
    return decide(cause, used, declared.crash_budget, memory, lived, limit)


def _relaunch(ctx: Context, node: Node, more: Bytes | None, delay: float = 0.0) -> NodeKey:
    resources = NodeResources(memory=more).over(resource_limits.inherited(ctx.state, node))
    successor = launching.launch(ctx, node.key.role, node.rank, node.relaunch_count + 1, resources, delay).key
    scale_operations.on_node_replaced(ctx, node.key, successor)
    also = f" with {more / GiB:g}Gi of memory" if more else ""
    also += f" in {delay:g} s, as it crashed so soon" if delay else ""
    ctx.note("NodeRelaunched", f"{successor} replaces {node.key}{also}", successor)
    return successor


def _give_up(ctx: Context, node: Node, cause: Cause, why: str) -> None:
    state, declared = ctx.state, ctx.state.spec.roles[node.key.role]
    state.given_up.add((node.key.role, node.rank))
    because = f"{node.key} is not replaced: {why}"
    ctx.note("NodeGivenUp", because, node.key, warning=True)
    scale_operations.fail_waiting_for(ctx, node.key, scale_operations.GIVEN_UP, because)
    trains = state.spec.trains
    left = sum(state.targets[role] for role in state.spec.trainers) - sum(trains(role) for role, _ in state.given_up)
    needed = state.rendezvous.config.min_nodes if state.rendezvous.config is not None else left + 1
    if declared.loss is Loss.FATAL or (declared.trains and left < needed):
        message = f"{node.key} {node.how_it_ended}; it is not replaced: {why}"
        completion.fail(ctx, declared.oom_failure if cause is Cause.OOM else declared.failure, message)
