"""The resources that the nodes of a job take together, and what `resourceLimits` leaves of them.

A node counts with its requests, or with its limits where it requests nothing, since that is what Kubernetes sets aside.
An amount that is not given counts as 0. The new node of a migration is not counted until it takes over.
"""

from __future__ import annotations

from collections.abc import Mapping, Set

import msgspec

from resile.api.ids import Bytes, Rank
from resile.api.job import Resources
from resile.api.plan import NodeResources
from resile.api.quantity import write_cores, write_size
from resile.core.context import Context
from resile.core.nodes import wanted_ranks
from resile.core.state import JobState, Node

Place = tuple[str, Rank]


class Sum(msgspec.Struct):
    cpu: float = 0.0
    memory: int = 0
    gpu: int = 0

    def add(self, taken: Resources) -> None:
        self.cpu = round(self.cpu + (taken.cpu or 0.0), 3)
        self.memory += taken.memory or 0
        self.gpu += taken.gpu


def for_role(state: JobState, role: str) -> NodeResources:
    """The resources that plans have set for new nodes of a role, in place of those in the role's template.

    Returns empty resources if no plan has set any.
    """
    known = state.resources.get(role)
    return known.resources if known is not None else NodeResources()


def inherited(state: JobState, node: Node) -> NodeResources:
    """The resources for the replacement of `node`: what plans have set since its launch, and else what `node` had."""
    known = state.resources.get(node.key.role)
    if known is None or node.key.id >= known.since:
        return node.resources
    return known.resources.over(node.resources)


def taken(state: JobState, role: str, given: NodeResources) -> Resources:
    declared = state.spec.roles[role]
    asked, most = declared.requests, declared.limits
    cpu = next((one for one in (given.cpu, asked.cpu, most.cpu) if one is not None), None)
    memory = next((one for one in (given.memory, asked.memory, most.memory) if one is not None), None)
    return Resources(cpu=cpu, memory=memory, gpu=(asked.gpu or most.gpu) if given.gpu is None else given.gpu)


def total(ctx: Context, ranks: Mapping[str, Set[Rank]], given: Mapping[Place, NodeResources]) -> Sum:
    """Add up the resources of the nodes of these ranks. A rank without a node counts like a new node.

    If a rank is in `given`, the resources in `given` count instead of those of its node.
    """
    state, sum_ = ctx.state, Sum()
    for role, wanted in ranks.items():
        fresh = for_role(state, role)
        for rank in wanted:
            key = ctx.index.places.get((role, rank))
            has = state.nodes[key].resources if key is not None else fresh
            sum_.add(taken(state, role, given.get((role, rank), has)))
    return sum_


def refusal(ctx: Context, ranks: Mapping[str, Set[Rank]], given: Mapping[Place, NodeResources]) -> str:
    """Say which of the job's resourceLimits the nodes of these ranks would exceed together.

    Returns an empty text if they exceed no limit. An exceeded limit does not matter if the job takes at least as much
    of that resource already. `given` has the same meaning as in `total`.
    """
    most = ctx.state.spec.resource_limits
    if most == Resources():
        return ""
    wanted, before = total(ctx, ranks, given), total(ctx, wanted_ranks.by_role(ctx.state), {})
    for name, is_, was, limit in (
        ("cpu", wanted.cpu, before.cpu, most.cpu),
        ("memory", wanted.memory, before.memory, most.memory),
        ("gpu", wanted.gpu, before.gpu, most.gpu or None),
    ):
        if limit is not None and is_ > limit and is_ > was:
            asked, allowed = _shown(name, is_), _shown(name, limit)
            return f"the nodes would take {asked} {name} together, and resourceLimits allows the job {allowed}"
    return ""


def _shown(name: str, amount: float) -> str:
    if name == "cpu":
        return write_cores(amount)
    return write_size(int(amount)) if name == "memory" else str(int(amount))


def memory_for(ctx: Context, role: str, rank: Rank) -> Bytes | None:
    """The memory that the job's resourceLimits leave for this rank, after the memory of all other ranks.

    Returns None if the job has no memory limit.
    """
    limit = ctx.state.spec.resource_limits.memory
    if limit is None:
        return None
    others = wanted_ranks.by_role(ctx.state)
    others[role] = others.get(role, set()) - {rank}
    return Bytes(max(0, limit - total(ctx, others, {}).memory))
