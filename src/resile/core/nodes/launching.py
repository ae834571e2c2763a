"""Launches nodes and removes them: which ranks need a node, which ids nodes get, and which machines they avoid."""

from __future__ import annotations

from collections.abc import Mapping

from resile.api.ids import NodeId, NodeKey, Rank
from resile.api.plan import NodeResources
from resile.core.context import Context
from resile.core.deadlines import Alarm
from resile.core.decisions import DeleteNode, LaunchNode
from resile.core.nodes import resource_limits, wanted_ranks
from resile.core.rendezvous import running
from resile.core.state import Node
from resile.protocol.reports import NodeStatus

FIRST_ID = NodeId(0)

SUSPECT_SECONDS = 120.0
"""Seconds for which new nodes avoid a silent machine. After about 40 s the cluster itself puts no pods on it."""
MAX_SUSPECTS = 50
"""How many machines are avoided at a time: more than fail by themselves, and few enough to be part of every launch."""


def fill(ctx: Context, given: Mapping[tuple[str, Rank], NodeResources] | None = None) -> None:
    """Launch a node for every wanted rank that has none, except ranks that have succeeded or were given up.

    `given` has the resources of some ranks, by role and rank; the others get those of their role. Nothing is launched
    if the job is suspended or over.
    """
    state = ctx.state
    if state.suspended or state.phase.over:
        return
    done = {(key.role, n.rank) for key, n in state.nodes.items() if n.status is NodeStatus.SUCCEEDED}
    for role in state.targets:
        for rank in sorted(wanted_ranks.wanted(state, role)):
            place = (role, rank)
            if place not in ctx.index.places and place not in state.given_up and place not in done:
                launch(ctx, role, rank, resources=(given or {}).get(place))


def new_key(ctx: Context, role: str) -> NodeKey:
    """Take a key for a role's next node. No id is used twice."""
    node_id = ctx.state.next_id.get(role, FIRST_ID)
    ctx.state.next_id[role] = NodeId(node_id + 1)
    return NodeKey(role, node_id)


def launch(
    ctx: Context,
    role: str,
    rank: Rank,
    relaunch_count: int = 0,
    resources: NodeResources | None = None,
    delay: float = 0.0,
    replaces: NodeKey | None = None,
) -> Node:
    """Create a node, and launch it after `delay` seconds. Returns the node.

    If `resources` is None, the node gets those of its role. In a migration, `replaces` is the old node. The old node
    keeps its rank until the new node is ready.
    """
    node = Node(
        key=new_key(ctx, role),
        rank=rank,
        status=NodeStatus.PENDING if delay else NodeStatus.LAUNCHING,
        launched_at=ctx.now,
        relaunch_count=relaunch_count,
        resources=resource_limits.for_role(ctx.state, role) if resources is None else resources,
        held_until=ctx.now + delay if delay else None,
        replaces=replaces,
    )
    ctx.state.nodes[node.key] = node
    ctx.touch(node)
    if node.held_until is None:
        request_launch(ctx, node)
    else:
        ctx.deadlines.set(Alarm.LAUNCH, node.held_until, node.key)
    return node


def on_launch_due(ctx: Context, node: Node) -> None:
    if node.held_until is None or not node.alive:
        return
    node.held_until = None
    node.status = NodeStatus.LAUNCHING
    node.launched_at = ctx.now
    ctx.touch(node)
    request_launch(ctx, node)


def request_launch(ctx: Context, node: Node) -> None:
    ctx.decide(
        LaunchNode(
            node=node.key,
            rank=node.rank,
            replicas=ctx.state.targets.get(node.key.role, 0),
            relaunch_count=node.relaunch_count,
            resources=node.resources,
            avoid=_avoided(ctx),
        )
    )


def remove(ctx: Context, node: Node, because: str) -> None:
    """Take a node out of the job on purpose. That costs no budget, and the node is not replaced."""
    node.leaving = because
    ctx.touch(node)
    ctx.decide(DeleteNode(node=node.key, grace=ctx.state.spec.exit_grace(node.key.role), because=because))
    if ctx.state.rendezvous.needs(node.key):
        running.stop(ctx, ctx.state.rendezvous, f"{node.key} {because}", None)


def avoid_machine(ctx: Context, node: Node) -> None:
    suspects = ctx.state.suspects
    if node.machine:
        suspects.pop(node.machine, None)
        suspects[node.machine] = ctx.now + SUSPECT_SECONDS
    while len(suspects) > MAX_SUSPECTS:
        del suspects[next(iter(suspects))]


def _avoided(ctx: Context) -> tuple[str, ...]:
    state = ctx.state
    silent = {name for name, until in state.suspects.items() if until > ctx.now}
    if len(silent) > 1:  # if half of the machines are silent, the master's own network has probably failed
        used = silent.union(state.nodes[key].machine for key in ctx.index.places.values()) - {""}
        if 2 * len(silent) >= len(used):
            return ()
    return tuple(sorted(silent))
