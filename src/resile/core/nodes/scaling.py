"""What people want of a job's nodes: another number, certain nodes more or fewer, other resources.

A wish is checked as a whole before anything is done, and refused with one sentence; what is granted is done at once
and watched until it is complete (`changes`). A plan and a plain number go the same way.
"""

from __future__ import annotations

from collections.abc import Collection

import msgspec

from resile.api.ids import NodeKey, Rank
from resile.api.job import MAX_REPLICAS, Strategy
from resile.api.plan import Migration, NewNode, NodeResources, Plan, RoleChange
from resile.core.context import Context
from resile.core.decisions import Reply
from resile.core.nodes import lifecycle, resource_limits, scale_operations, targets
from resile.core.rendezvous import forming
from resile.core.state import JobState, Node, RoleResources, ScaleOperation
from resile.protocol.changes import Scale


class Refused(Exception):
    """A wish cannot be granted; the text is one sentence."""


class _Target(msgspec.Struct):
    """The job's places as a wish would have them."""

    ranks: dict[str, set[Rank]]
    given: dict[tuple[str, Rank], NodeResources] = {}
    """What places get that shall have something of their own."""


def on_scale(ctx: Context, wanted: Scale, request: int) -> None:
    """Give a role another number of nodes."""
    plan = Plan(name="", uid="", roles={wanted.role: RoleChange(replicas=wanted.replicas)})
    _grant(ctx, plan, request, f"a wish for {wanted.role}={wanted.replicas}", why="ScaleRefused")


def on_plan(ctx: Context, wanted: Plan, request: int) -> None:
    """Execute a ScalePlan; a plan that is known is not executed again."""
    state = ctx.state
    if wanted.uid in state.plan_ends or any(change.uid == wanted.uid for change in state.changes):
        ctx.decide(Reply(request=request))
        return
    if state.suspended and not state.phase.over:
        ctx.decide(Reply(request=request, error="the job is suspended; resume it first"))
        return
    _grant(ctx, wanted, request, f"ScalePlan {wanted.name}", why="PlanRefused")


def _grant(ctx: Context, wish: Plan, request: int, about: str, *, why: str) -> None:
    try:
        design = _design(ctx, wish)
    except Refused as refused:
        ctx.decide(Reply(request=request, error=str(refused)))
        ctx.note(why, f"{about} is refused: {refused}", warning=True)
        return
    ctx.decide(Reply(request=request))
    state = ctx.state
    change = ScaleOperation(
        name=wish.name,
        uid=wish.uid,
        about=about,
        numbers={role: wanted.replicas for role, wanted in wish.roles.items() if wanted.replicas is not None},
    )
    state.changes.append(change)
    for role, wanted in wish.roles.items():
        if wanted.resources != NodeResources():
            before = resource_limits.for_role(state, role)
            since = state.next_id.get(role, lifecycle.FIRST)
            state.resources[role] = RoleResources(resources=wanted.resources.over(before), since=since)
    roles = {*change.numbers, *(one.role for one in wish.create)}
    there = {key for key, node in state.nodes.items() if key.role in roles and scale_operations.takes_part(ctx, node)}
    leaving = _resize(ctx, design, wish.remove, about)
    change.going |= leaving
    for move in wish.migrate:
        _move(ctx, change, move)
    lifecycle.fill(ctx, design.given)
    _await(ctx, change, roles, there)
    scale_operations.supersede_older(ctx, change, leaving)
    forming.form(ctx, state.training)


def _resize(ctx: Context, design: _Target, removed: Collection[NodeKey], about: str) -> set[NodeKey]:
    """Give the roles the ranks of the design, and return the nodes that leave.

    A removed node leaves even if its rank is still wanted: then a node that the same plan creates has that rank.
    """
    state = ctx.state
    for role, ranks in design.ranks.items():
        before = state.targets[role]
        if ranks != targets.wanted(state, role):
            targets.want(state, role, ranks)
            ctx.note("Scaled", f"{role} goes from {before} to {len(ranks)} nodes ({about})")
    touched = design.ranks.keys()
    state.given_up = {place for place in state.given_up if place[0] not in touched}
    forming.raise_max(state.training, sum(state.targets.get(role, 0) for role in state.spec.trainers))
    surplus = [
        node
        for node in state.nodes.values()
        if node.alive
        and node.key.role in touched
        and (not targets.is_wanted(state, node.key.role, node.rank) or node.key in removed or node.replaces in removed)
    ]
    for node in surplus:
        lifecycle.remove(ctx, node, "was scaled down")
    return {node.key for node in surplus}


def _move(ctx: Context, change: ScaleOperation, move: Migration) -> None:
    """Launch the node that will take over; the old one stays until then."""
    old = ctx.state.nodes[move.node]
    wanted = move.resources.over(resource_limits.inherited(ctx.state, old.key, old.resources))
    new = lifecycle.launch(ctx, old.key.role, old.rank, resources=wanted, replaces=old.key)
    change.moves[old.key] = new.key
    change.coming.add(new.key)
    ctx.note("NodeMigrating", f"{new.key} is to take over from {old.key}", new.key)


def _await(ctx: Context, change: ScaleOperation, roles: set[str], there: set[NodeKey]) -> None:
    """Wait for every node of these roles that does not do yet what it should; `there` took part before the change."""
    for node in ctx.state.nodes.values():
        if node.key.role not in roles or node.status.ended:
            continue
        if node.leaving:
            change.going.add(node.key)
        elif node.fills and node.key not in there:
            change.coming.add(node.key)


# what can be granted ------------------------------------------------------------------------------------------------


def _design(ctx: Context, wish: Plan) -> _Target:
    """The job's places if the wish were granted.

    Raises:
        Refused: it cannot be.
    """
    state = ctx.state
    if state.phase.over:
        raise Refused(f"the job is over ({state.phase})")
    if not state.spec.managed:
        raise Refused("this job runs on bare machines: start or stop `resile run` on them instead")
    design = _Target(ranks={})
    for role, wanted in wish.roles.items():
        _check_role(state, role)
        if wanted.replicas is not None:
            design.ranks[role] = _numbered(state, role, wanted.replicas)
    counted = set(design.ranks)
    for node in _named(ctx, wish):
        if node.key in wish.remove:
            _ranks(state, design, node.key.role, counted).discard(node.rank)
    for one in wish.create:
        _check_role(state, one.role)
        _add(state, design, one, _ranks(state, design, one.role, counted))
    _check_numbers(state, design)
    fresh = {role: wanted.resources for role, wanted in wish.roles.items()}
    _check_limits(ctx, design, wish, fresh)
    return design


def _check_role(state: JobState, role: str) -> None:
    if role not in state.targets:
        raise Refused(f"the job has no role '{role}'; it has {', '.join(sorted(state.targets))}")


def _numbered(state: JobState, role: str, replicas: int) -> set[Rank]:
    if replicas < 0:
        raise Refused(f"replicas must be 0 or more, not {replicas}")
    if replicas > MAX_REPLICAS:
        raise Refused(f"replicas must be {MAX_REPLICAS} or fewer, not {replicas}")
    return targets.resized(targets.wanted(state, role), replicas)


def _ranks(state: JobState, design: _Target, role: str, counted: set[str]) -> set[Rank]:
    if role in counted:
        raise Refused(f"replicas of {role} is the number after the change; give it or createPods and removePods")
    return design.ranks.setdefault(role, targets.wanted(state, role))


def _named(ctx: Context, wish: Plan) -> list[Node]:
    """The nodes that a plan removes or migrates, each of them part of the job and named once."""
    named = [*wish.remove, *(move.node for move in wish.migrate)]
    for key in named:
        if named.count(key) > 1:
            raise Refused(f"{key} is named twice")
    found = [_node(ctx, key) for key in named]
    for key in (move.node for move in wish.migrate):
        refusal = ctx.state.spec.roles[key.role].cannot_migrate
        if refusal:
            raise Refused(f"{key} {refusal}")
        reserve = scale_operations.replacement_of(ctx, key)
        if reserve is not None:
            raise Refused(f"{key} is being migrated already: {reserve} is to take over from it")
    return found


def _node(ctx: Context, key: NodeKey) -> Node:
    _check_role(ctx.state, key.role)
    node = ctx.state.nodes.get(key)
    if node is None:
        raise Refused(f"the job has no node {key}")
    if node.replaces is not None and node.alive:
        raise Refused(f"{key} has no place yet: it is to take over from {node.replaces}")
    if node.alive:
        return node
    how = node.leaving or lifecycle.describe(node.status, node.end)
    heir = ctx.index.places.get((key.role, node.rank))
    raise Refused(f"{key} {how}" + (f"; {heir} has its place" if heir is not None else ""))


def _add(state: JobState, design: _Target, one: NewNode, ranks: set[Rank]) -> None:
    rank = targets.lowest_free(ranks) if one.rank is None else one.rank
    if rank in ranks:
        raise Refused(f"rank {rank} of {one.role} is taken")
    if rank >= MAX_REPLICAS:
        raise Refused(f"ranks must be below {MAX_REPLICAS}, not {rank}")
    ranks.add(rank)
    design.given[one.role, rank] = one.resources.over(resource_limits.for_role(state, one.role))


def _check_numbers(state: JobState, design: _Target) -> None:
    for role, ranks in design.ranks.items():
        if len(ranks) > MAX_REPLICAS:
            raise Refused(f"replicas must be {MAX_REPLICAS} or fewer, not {len(ranks)}")
        if state.spec.strategy is Strategy.PARAMETER_SERVER and max(ranks, default=-1) >= len(ranks):
            raise Refused(f"the nodes of a parameter-server job are found by rank: {role} cannot have a gap among them")
    if any(state.spec.trains(role) for role in design.ranks):
        numbers = state.targets | {role: len(ranks) for role, ranks in design.ranks.items()}
        wanted = sum(numbers.get(role, 0) for role in state.spec.trainers)
        needed = state.training.config.min_nodes if state.training.config is not None else 1
        if wanted < needed:
            raise Refused(f"{wanted} nodes are fewer than the {needed} that the job needs (--nnodes)")


def _check_limits(ctx: Context, design: _Target, wish: Plan, fresh: dict[str, NodeResources]) -> None:
    state = ctx.state
    given = dict(design.given)
    for move in wish.migrate:
        node = state.nodes[move.node]
        given[node.key.role, node.rank] = move.resources.over(
            resource_limits.inherited(state, node.key, node.resources)
        )
    ranks = {role: targets.wanted(state, role) for role in state.targets} | design.ranks
    for role, wanted in fresh.items():
        for rank in ranks[role]:
            if (role, rank) not in ctx.index.places and (role, rank) not in given:
                given[role, rank] = wanted.over(resource_limits.for_role(state, role))
    refusal = resource_limits.refusal(ctx, ranks, given)
    if refusal:
        raise Refused(refusal)
