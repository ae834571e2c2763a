"""Changes of a job's nodes that users ask for: another number of nodes, certain nodes more or fewer, other resources.

A request is checked as a whole before anything is done, and refused with one sentence. A change that is granted begins
at once and is in `state.changes` until it is complete. A plain number is handled as a plan without a name.
`wanted_ranks` says which ranks stay.
"""

from __future__ import annotations

from collections.abc import Collection

import msgspec

from resile.api.defaults import MAX_REPLICAS
from resile.api.ids import NodeKey, Rank
from resile.api.job import Strategy
from resile.api.plan import Migration, NewNode, NodeResources, Plan, RoleChange
from resile.core.context import Context
from resile.core.decisions import Reply
from resile.core.nodes import launching, resource_limits, scale_operations, wanted_ranks
from resile.core.rendezvous import forming
from resile.core.state import JobState, Node, RoleResources, ScaleOperation
from resile.protocol.job_changes import Scale


class Refused(Exception):
    """Raised if a request cannot be granted; the text says why in one sentence."""


class _Target(msgspec.Struct):
    ranks: dict[str, set[Rank]]
    given: dict[tuple[str, Rank], NodeResources] = {}
    """The resources of the ranks that do not get those of their role."""


def on_scale(ctx: Context, wanted: Scale, request: int) -> None:
    plan = Plan(name="", uid="", roles={wanted.role: RoleChange(replicas=wanted.replicas)})
    _grant(ctx, plan, request, f"a request for {wanted.role}={wanted.replicas}", why="ScaleRefused")


def on_plan(ctx: Context, wanted: Plan, request: int) -> None:
    state = ctx.state
    if wanted.uid in state.plan_ends or any(change.uid == wanted.uid for change in state.changes):
        ctx.decide(Reply(request=request))
        return
    if state.suspended and not state.phase.over:
        ctx.decide(Reply(request=request, error="the job is suspended; resume it first"))
        return
    _grant(ctx, wanted, request, f"the plan {wanted.name}", why="PlanRefused")


def _grant(ctx: Context, plan: Plan, request: int, about: str, *, why: str) -> None:
    try:
        target = _target_of(ctx, plan)
    except Refused as refused:
        ctx.decide(Reply(request=request, error=str(refused)))
        ctx.note(why, f"{about} is refused: {refused}", warning=True)
        return
    ctx.decide(Reply(request=request))
    state = ctx.state
    change = ScaleOperation(
        name=plan.name,
        uid=plan.uid,
        about=about,
        numbers={role: wanted.replicas for role, wanted in plan.roles.items() if wanted.replicas is not None},
    )
    state.changes.append(change)
    for role, wanted in plan.roles.items():
        if wanted.resources != NodeResources():
            before = resource_limits.for_role(state, role)
            since = state.next_id.get(role, launching.FIRST_ID)
            state.resources[role] = RoleResources(resources=wanted.resources.over(before), since=since)
    roles = {*change.numbers, *(one.role for one in plan.create)}
    there = {key for key, node in state.nodes.items() if key.role in roles and scale_operations.takes_part(ctx, node)}
    leaving = _resize(ctx, target, plan.remove, about)
    change.going |= leaving
    for move in plan.migrate:
        _move(ctx, change, move)
    launching.fill(ctx, target.given)
    _await(ctx, change, roles, there)
    scale_operations.supersede_older(ctx, change, leaving)
    forming.form(ctx, state.rendezvous)


def _resize(ctx: Context, target: _Target, removed: Collection[NodeKey], about: str) -> set[NodeKey]:
    """Set the wanted ranks of the roles in `target`, and remove nodes whose rank is not wanted any more.

    Nodes in `removed`, and nodes that were to replace them, are removed even if their rank is still wanted. Returns all
    nodes that are removed. `about` names the request in the job event.
    """
    state = ctx.state
    for role, ranks in target.ranks.items():
        before = state.targets[role]
        if ranks != wanted_ranks.wanted(state, role):
            wanted_ranks.want(state, role, ranks)
            ctx.note("Scaled", f"{role} goes from {before} to {len(ranks)} nodes ({about})")
    touched = target.ranks.keys()
    state.given_up = {place for place in state.given_up if place[0] not in touched}
    forming.raise_max(state.rendezvous, sum(state.targets.get(role, 0) for role in state.spec.trainers))
    surplus = [
        node
        for node in state.nodes.values()
        if node.alive
        and node.key.role in touched
        and (
            not wanted_ranks.is_wanted(state, node.key.role, node.rank)
            or node.key in removed
            or node.replaces in removed
        )
    ]
    for node in surplus:
        launching.remove(ctx, node, "was scaled down")
    return {node.key for node in surplus}


def _move(ctx: Context, change: ScaleOperation, move: Migration) -> None:
    old = ctx.state.nodes[move.node]
    wanted = move.resources.over(resource_limits.inherited(ctx.state, old))
    new = launching.launch(ctx, old.key.role, old.rank, resources=wanted, replaces=old.key)
    change.moves[old.key] = new.key
    change.coming.add(new.key)
    ctx.note("NodeMigrating", f"{new.key} is to take over from {old.key}", new.key)


def _await(ctx: Context, change: ScaleOperation, roles: set[str], there: set[NodeKey]) -> None:
    """Make `change` wait until the new nodes of these roles take part and the leaving nodes have ended.

    `there` has the nodes that took part before the change. They are not new.
    """
    for node in ctx.state.nodes.values():
        if node.key.role not in roles or node.status.ended:
            continue
        if node.leaving:
            change.going.add(node.key)
        elif node.fills and node.key not in there:
            change.coming.add(node.key)


# checks of a request ------------------------------------------------------------------------------------------------


def _target_of(ctx: Context, plan: Plan) -> _Target:
    """The ranks that the job would have after `plan`; raises `Refused` if the plan cannot be executed."""
    state = ctx.state
    if state.phase.over:
        raise Refused(f"the job is over ({state.phase})")
    if not state.spec.managed:
        raise Refused("this job runs on bare machines: start or stop `resile run` on them instead")
    target = _Target(ranks={})
    for role, wanted in plan.roles.items():
        _check_role(state, role)
        if wanted.replicas is not None:
            target.ranks[role] = _numbered(state, role, wanted.replicas)
    counted = set(target.ranks)
    for node in _named(ctx, plan):
        if node.key in plan.remove:
            _ranks(state, target, node.key.role, counted).discard(node.rank)
    for one in plan.create:
        _check_role(state, one.role)
        _add(state, target, one, _ranks(state, target, one.role, counted))
    _check_numbers(state, target)
    _check_limits(ctx, target, plan)
    return target


def _check_role(state: JobState, role: str) -> None:
    if role not in state.targets:
        raise Refused(f"the job has no role '{role}'; it has {', '.join(sorted(state.targets))}")


def _numbered(state: JobState, role: str, replicas: int) -> set[Rank]:
    if replicas < 0:
        raise Refused(f"replicas must be 0 or more, not {replicas}")
    if replicas > MAX_REPLICAS:
        raise Refused(f"replicas must be {MAX_REPLICAS} or fewer, not {replicas}")
    return wanted_ranks.resized(wanted_ranks.wanted(state, role), replicas)


def _ranks(state: JobState, target: _Target, role: str, counted: set[str]) -> set[Rank]:
    if role in counted:
        raise Refused(f"replicas of {role} is the number after the change; give it or createPods and removePods")
    return target.ranks.setdefault(role, wanted_ranks.wanted(state, role))


def _named(ctx: Context, plan: Plan) -> list[Node]:
    named = [*plan.remove, *(move.node for move in plan.migrate)]
    for key in named:
        if named.count(key) > 1:
            raise Refused(f"{key} is named twice")
    found = [_node(ctx, key) for key in named]
    for key in (move.node for move in plan.migrate):
        refusal = ctx.state.spec.roles[key.role].cannot_migrate
        if refusal:
            raise Refused(f"{key} {refusal}")
        replacement = scale_operations.replacement_of(ctx, key)
        if replacement is not None:
            raise Refused(f"{key} is being migrated already: {replacement} is to take over from it")
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
    how = node.leaving or node.how_it_ended
    heir = ctx.index.places.get((key.role, node.rank))
    raise Refused(f"{key} {how}" + (f"; {heir} has its place" if heir is not None else ""))


def _add(state: JobState, target: _Target, one: NewNode, ranks: set[Rank]) -> None:
    rank = wanted_ranks.lowest_free(ranks) if one.rank is None else one.rank
    if rank in ranks:
        raise Refused(f"rank {rank} of {one.role} is taken")
    if rank >= MAX_REPLICAS:
        raise Refused(f"ranks must be below {MAX_REPLICAS}, not {rank}")
    ranks.add(rank)
    target.given[one.role, rank] = one.resources.over(resource_limits.for_role(state, one.role))


def _check_numbers(state: JobState, target: _Target) -> None:
    for role, ranks in target.ranks.items():
        if len(ranks) > MAX_REPLICAS:
            raise Refused(f"replicas must be {MAX_REPLICAS} or fewer, not {len(ranks)}")
        if state.spec.strategy is Strategy.PARAMETER_SERVER and max(ranks, default=-1) >= len(ranks):
            raise Refused(f"the nodes of a parameter-server job are found by rank: {role} cannot have a gap among them")
    if any(state.spec.trains(role) for role in target.ranks):
        numbers = state.targets | {role: len(ranks) for role, ranks in target.ranks.items()}
        wanted = sum(numbers.get(role, 0) for role in state.spec.trainers)
        needed = state.rendezvous.config.min_nodes if state.rendezvous.config is not None else 1
        if wanted < needed:
            raise Refused(f"{wanted} nodes are fewer than the {needed} that the job needs (--nnodes)")


def _check_limits(ctx: Context, target: _Target, plan: Plan) -> None:
    state = ctx.state
    given = dict(target.given)
    for move in plan.migrate:
        old = state.nodes[move.node]
        given[old.key.role, old.rank] = move.resources.over(resource_limits.inherited(state, old))
    ranks = wanted_ranks.by_role(state) | target.ranks
    for role, wanted in plan.roles.items():
        for rank in ranks[role]:
            if (role, rank) not in ctx.index.places and (role, rank) not in given:
                given[role, rank] = wanted.resources.over(resource_limits.for_role(state, role))
    refusal = resource_limits.refusal(ctx, ranks, given)
    if refusal:
        raise Refused(refusal)
