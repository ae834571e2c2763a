"""Which ranks a role should have: its number of nodes, and the gaps that removed nodes left among the ranks.

A node keeps its rank, so removing rank 1 of three leaves ranks 0 and 2. A role that grows fills its gaps first, from
the lowest. A role that shrinks loses its highest ranks.
"""

from __future__ import annotations

from collections.abc import Iterable

from resile.api.ids import Rank
from resile.core.state import JobState


def wanted(state: JobState, role: str) -> set[Rank]:
    gaps = _gaps(state, role)
    return {Rank(rank) for rank in range(state.targets.get(role, 0) + len(gaps))} - gaps


def by_role(state: JobState) -> dict[str, set[Rank]]:
    return {role: wanted(state, role) for role in state.targets}


def is_wanted(state: JobState, role: str, rank: Rank) -> bool:
    """True if this rank should have a node. The cost does not grow with the number of nodes."""
    if (role, rank) in state.vacated:
        return False
    return rank < state.targets.get(role, 0) + len(_gaps(state, role))


def resized(ranks: Iterable[Rank], number: int) -> set[Rank]:
    """Grow a set of ranks to `number` by adding the lowest free ranks, or shrink it by dropping the highest ranks."""
    kept = set(sorted(ranks)[:number])
    free = Rank(0)
    while len(kept) < number:
        kept.add(free)
        free = Rank(free + 1)
    return kept


def lowest_free(ranks: set[Rank]) -> Rank:
    return next(Rank(rank) for rank in range(len(ranks) + 1) if rank not in ranks)


def want(state: JobState, role: str, ranks: set[Rank]) -> None:
    state.targets[role] = len(ranks)
    missing = {(role, Rank(rank)) for rank in range(max(ranks, default=-1) + 1)} - {(role, rank) for rank in ranks}
    state.vacated = {place for place in state.vacated if place[0] != role} | missing


def _gaps(state: JobState, role: str) -> set[Rank]:
    return {rank for other, rank in state.vacated if other == role}
