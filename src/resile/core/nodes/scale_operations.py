"""Changes of the job's nodes that were granted and are not complete yet: plans, and plain scaling.

A change waits for nodes to take part and for nodes to end. It remembers only the nodes that it waits for, so a node's
arrival or end costs the same however large the change is. The ends of the newest plans are kept in the state, so a
master that dies before it reported an end reports it after its return.
"""

from __future__ import annotations

from collections.abc import Iterable

from resile.api.ids import NodeKey
from resile.core.context import Context
from resile.core.state import MAX_PLAN_ENDS, Node, PlanEnd, ScaleOperation, Waiting
from resile.protocol.reports import NodeStatus

SUCCEEDED = "Scaled"
SUPERSEDED = "Superseded"
GIVEN_UP = "NodeGivenUp"
MIGRATION_FAILED = "MigrationFailed"
PENDING = "PendingTimeout"
DELETED = "PlanDeleted"
OVER = "JobEnded"
SUSPENDED = "JobSuspended"


def takes_part(ctx: Context, node: Node) -> bool:
    """True if a node is in the running round or waits for room in it.

    A node of a role that does not train, or of a job without rounds, takes part as long as it is `RUNNING`.
    """
    state = ctx.state
    if not state.spec.trains(node.key.role) or state.rendezvous.config is None:
        return node.status is NodeStatus.RUNNING
    if state.rendezvous.running is None:
        return False
    waits = node.agent is not None and isinstance(node.agent.phase, Waiting)
    return waits or state.rendezvous.has_member(node.key)


def on_nodes_arrived(ctx: Context, keys: Iterable[NodeKey]) -> None:
    if ctx.state.changes:
        keys = set(keys)
        for change in ctx.state.changes:
            change.coming -= keys


def on_node_gone(ctx: Context, key: NodeKey) -> None:
    """Note that the node `key` has ended. The changes in `state.changes` do not wait for it any more.

    If another node replaces it, call `on_node_replaced` first. Then the changes wait for the other node.
    """
    for change in ctx.state.changes:
        change.coming.discard(key)
        change.going.discard(key)


def on_node_replaced(ctx: Context, old: NodeKey, new: NodeKey) -> None:
    for change in ctx.state.changes:
        if old in change.coming:
            change.coming = change.coming - {old} | {new}


def replacement_of(ctx: Context, old: NodeKey) -> NodeKey | None:
    return next((change.moves[old] for change in ctx.state.changes if old in change.moves), None)


def on_node_migrated(ctx: Context, old: NodeKey) -> None:
    """Note that another node has taken over from `old`. The change that asked for this now waits for `old` to end."""
    for change in ctx.state.changes:
        if change.moves.pop(old, None) is not None and not ctx.state.nodes[old].status.ended:
            change.going.add(old)


def fail_waiting_for(ctx: Context, key: NodeKey, reason: str, because: str) -> None:
    """Report as failed every plan that waits for the node `key` to join, with this reason and the message `because`.

    After this call, no change waits for the node to join. All else that a failed plan has begun is still completed.
    """
    for change in [change for change in ctx.state.changes if key in change.coming]:
        change.coming = change.coming - {key}
        change.moves = {old: new for old, new in change.moves.items() if new != key}
        close(ctx, change, reason, because)


def supersede_older(ctx: Context, newest: ScaleOperation, leaving: set[NodeKey]) -> None:
    """Report older plans as superseded if `newest` set another number of nodes or removes a node that they wait for.

    `leaving` has the nodes that `newest` removes. After this call, no older change waits for these nodes to join.
    """
    for change in [one for one in ctx.state.changes if one is not newest]:
        undone = any(ctx.state.targets.get(role) != number for role, number in change.numbers.items())
        if undone or leaving & change.coming:
            who = f"the plan {newest.name}" if newest.name else newest.about
            close(ctx, change, SUPERSEDED, f"{who} came before it was done")
        change.moves = {old: new for old, new in change.moves.items() if new not in leaving}
        change.coming -= leaving


def close(ctx: Context, change: ScaleOperation, reason: str, message: str) -> None:
    """Report that the plan of `change` has ended. If `change` is plain scaling, it has no plan; nothing is reported.

    `change` stays in `state.changes` until the nodes that it has begun to launch and remove have come and gone.
    """
    change.numbers = {}
    if not change.uid:
        return
    end = PlanEnd(name=change.name, succeeded=reason == SUCCEEDED, reason=reason, message=message)
    ends = ctx.state.plan_ends
    ends[change.uid] = end
    while len(ends) > MAX_PLAN_ENDS:
        del ends[next(iter(ends))]
    change.uid = change.name = ""
    if end.succeeded:
        ctx.note("PlanSucceeded", f"the plan {end.name} is done")
    else:
        ctx.note("PlanFailed", f"the plan {end.name} ended ({reason}): {message}", warning=True)


def on_plan_deleted(ctx: Context, uid: str) -> None:
    for change in ctx.state.changes:
        if uid and change.uid == uid:
            close(ctx, change, DELETED, "it was deleted before it was done; what it has begun goes on")


def abandon(ctx: Context, reason: str, message: str) -> None:
    for change in ctx.state.changes:
        close(ctx, change, reason, message)
    ctx.state.changes = []


def close_complete(ctx: Context) -> None:
    """Drop every change that waits for no node, and report its plan as succeeded.

    In a job with rounds, do nothing unless a round runs.
    """
    state = ctx.state
    if not state.changes or (state.rendezvous.config is not None and state.rendezvous.running is None):
        return
    complete = [change for change in state.changes if not change.coming and not change.going]
    for change in complete:
        close(ctx, change, SUCCEEDED, "")
    if complete:
        state.changes = [change for change in state.changes if change.coming or change.going]
