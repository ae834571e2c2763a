"""Decides which step to restore and which rank sends which part to which rank, from the offers of all ranks. No I/O.

A rank offers the parts in its node's memory: its own, those of the node's leader (the rank that keeps what all ranks of
the node have alike), and replicas of another node's parts. A step can be restored from memory if all ranks together
have all its parts. Parts belong together only if they are of one attempt. All ranks compute the same plan. What no
memory has is read from storage (`dcp_reader`).
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from typing import NamedTuple


class Kind(enum.IntEnum):
    """Which buffer an offered part is in."""

    OWN = 0
    LEADER = 1
    COPY = 2
    """A replica of another node's part, or the buffer of another rank of this node."""


class Offer(NamedTuple):
    """A part that a rank can read in memory."""

    step: int
    attempt: int
    world: int
    """How many ranks made the step."""
    part: int
    """The rank that made this part."""
    shared: int
    """1 if the state is not sharded, so that this part is the whole step."""
    kind: int
    first: int = 0
    """1 for the first save of its attempt; other ranks may have ended before they made their part."""


class Source(enum.IntEnum):
    """Where a step is restored from. If a step has several sources, the one with the highest value is used."""

    STORAGE = 1
    COPIES = 2
    """Memory, with replicas preferred to own parts: the last resort before storage."""
    PEERS = 3
    """Memory. Ranks that lack a part receive it from others."""
    MEMORY = 4
    """Every rank has what it needs in its own node's memory."""


class Gap(NamedTuple):
    """A step of which memory has only some parts."""

    step: int
    world: int
    missing: tuple[int, ...]
    """The ranks whose parts are missing."""
    first: bool
    """True for the first save of an attempt: it may never have been complete, and the attempt has no earlier step."""


class Transfer(NamedTuple):
    part: int
    source: int
    takers: tuple[int, ...]


class RestorePlan(NamedTuple):
    step: int
    source: Source
    attempt: int = 0
    world: int = 0
    shared: bool = False
    transfers: tuple[Transfer, ...] = ()

    def parts_for(self, rank: int, rows: Sequence[Sequence[Offer]]) -> set[int]:
        """The parts that this rank reads, in its node's memory or after a transfer. `rows`: the offers of each rank."""
        mine = [o for o in rows[rank] if o[:3] == (self.step, self.attempt, self.world) and o.shared == self.shared]
        if self.shared:
            sent = [each.part for each in self.transfers if rank in (each.source, *each.takers)]
            return {sent[0] if sent else mine[0].part}
        if self.source is Source.COPIES and len(rows) == self.world:
            return {rank, 0}
        return needed(rank, len(rows), mine, self.world)


def best_plan(
    rows: Sequence[Sequence[Offer]], stored: Iterable[int], refused: Iterable[RestorePlan]
) -> RestorePlan | None:
    """The plan for the newest step that all ranks can have, from the best source; None if there is no step.

    `rows` are the offers of each rank, `stored` the steps in storage, and `refused` the plans that have failed.
    """
    found = [RestorePlan(step, Source.STORAGE) for step in stored]
    for step, attempt, world, shared in {(*offer[:3], offer.shared) for row in rows for offer in row}:
        of_step = [[o for o in row if o[:3] == (step, attempt, world) and o.shared == shared] for row in rows]
        transfers = _ways_of_shared_step(of_step) if shared else _ways_of_sharded_step(of_step, world)
        found += [
            RestorePlan(step, source, attempt, world, bool(shared), tuple(given)) for source, given in transfers.items()
        ]
    return max((plan for plan in found if plan not in set(refused)), default=None)


def gaps(rows: Sequence[Sequence[Offer]]) -> list[Gap]:
    """The steps of which all ranks together have only some parts, newest first. `rows` has the offers of each rank."""
    found: dict[tuple[int, int, int], set[int]] = {}
    firsts = set()
    for offer in (offer for row in rows for offer in row if not offer.shared):
        found.setdefault(offer[:3], set()).add(offer.part)
        if offer.first:
            firsts.add(offer[:3])
    return [
        Gap(key[0], key[2], missing, key in firsts)
        for key, parts in sorted(found.items(), reverse=True)
        if (missing := tuple(sorted(set(range(key[2])) - parts)))
    ]


def _ways_of_shared_step(rows: Sequence[Sequence[Offer]]) -> dict[Source, list[Transfer]]:
    """The possible sources of a step whose state is not sharded, each with the transfers that it needs.

    `rows` has the offers of this step by rank. If every rank has the step, MEMORY is possible and needs no transfer.
    Otherwise PEERS is possible: the first rank that has the step sends it to the ranks that lack it. If there are
    several ranks, COPIES is possible too: the last rank that has the step sends it to all others.
    """
    holders = [rank for rank, row in enumerate(rows) if row]
    lacking = tuple(rank for rank, row in enumerate(rows) if not row)
    first, last = holders[0], holders[-1]
    rest = tuple(rank for rank in range(len(rows)) if rank != last)
    ways = {Source.PEERS: [Transfer(rows[first][0].part, first, lacking)]} if lacking else {Source.MEMORY: []}
    if rest:
        ways[Source.COPIES] = [Transfer(rows[last][0].part, last, rest)]
    return ways


def _ways_of_sharded_step(rows: Sequence[Sequence[Offer]], world: int) -> dict[Source, list[Transfer]]:
    holders: dict[int, list[int]] = {}
    copies: dict[int, list[int]] = {}
    for rank, row in enumerate(rows):
        for part in {offer.part for offer in row}:
            holders.setdefault(part, []).append(rank)
        for part in {offer.part for offer in row if offer.kind == Kind.COPY}:
            copies.setdefault(part, []).append(rank)
    if set(holders) != set(range(world)):
        return {}
    needs = [needed(rank, len(rows), row, world) for rank, row in enumerate(rows)]
    transfers = _transfers(needs, holders, {})
    ways: dict[Source, list[Transfer]] = {Source.PEERS if transfers or len(rows) != world else Source.MEMORY: transfers}
    if copies:
        everything = [{rank, 0} if len(rows) == world else set(range(world)) for rank in range(len(rows))]
        ways[Source.COPIES] = _transfers(everything, holders, copies)
    return ways


def needed(rank: int, ranks: int, row: Sequence[Offer], world: int) -> set[int]:
    """The parts that a rank reads to restore a step. `world` ranks saved the step, and `ranks` ranks restore it.

    If the two numbers differ, the rank reads all parts. If they are equal, it reads its own part and the part of its
    node's leader. That is the part of kind LEADER in `row`, the rank's offers, or part 0 if there is no such offer.
    """
    if ranks != world:
        return set(range(world))
    leader = next((offer.part for offer in row if offer.kind == Kind.LEADER), 0)
    return {rank, leader}


def _transfers(
    needs: Sequence[set[int]], holders: dict[int, list[int]], rather: dict[int, list[int]]
) -> list[Transfer]:
    """The transfers after which each rank has the parts that it needs. `needs` has the needed parts by rank.

    `holders` has for each part the ranks that have it. The first of them sends the part to the ranks that need it and
    lack it. `rather` has for some parts the ranks that have a replica. Of such a part, the first of these ranks sends
    its replica to all other ranks that need the part, even to ranks that have it.
    """
    transfers = []
    for part in sorted(holders):
        source = rather.get(part, holders[part])[0]
        have = {source} if part in rather else set(holders[part])
        takers = tuple(rank for rank, needs_of in enumerate(needs) if part in needs_of and rank not in have)
        if takers:
            transfers.append(Transfer(part, source, takers))
    return transfers
