"""Which step to restore and who gives what to whom: decided from what every rank has, alike on all of them. No I/O.

A rank offers the parts of checkpoints in its node's memory: its own, those of the rank that keeps what all ranks of the
node have alike, and copies that the node keeps of another node's parts. A step can be had when its parts are complete
among all ranks; parts belong together only if they were made in one attempt.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from typing import NamedTuple


class Kind(enum.IntEnum):
    """Whose buffer an offered part is in."""

    OWN = 0
    LEADER = 1
    """Of the node's rank that keeps what all its ranks have alike."""
    COPY = 2
    """Of another node's rank, kept here in case that node is lost."""


class Offer(NamedTuple):
    """One part that a rank can read."""

    step: int
    attempt: int
    world: int
    """How many ranks made the step."""
    part: int
    """The rank that made this part."""
    shared: int
    """1: nothing in it belongs to one rank alone, so it is all of the step."""
    kind: int
    first: int = 0
    """1: it was the first save of its attempt, so that other ranks may never have come so far."""


class Source(enum.IntEnum):
    """Where a step is taken from; among equally new ones the higher wins."""

    STORAGE = 1
    COPIES = 2
    """Memory, but not what a rank has itself wherever there is a copy: the last resort before storage."""
    PEERS = 3
    """Memory, and what somebody lacks comes from another rank."""
    MEMORY = 4
    """Everybody has what it needs in its own node's memory."""


class Gap(NamedTuple):
    """A step of which some parts are here and others are not."""

    step: int
    world: int
    missing: tuple[int, ...]
    """The ranks whose parts they are."""
    first: bool
    """Maybe it never was whole, and nothing before it."""


class Transfer(NamedTuple):
    """A part that one rank gives to others."""

    part: int
    source: int
    takers: tuple[int, ...]


class RestorePlan(NamedTuple):
    """A step, and how all ranks come to it."""

    step: int
    source: Source
    attempt: int = 0
    world: int = 0
    shared: bool = False
    transfers: tuple[Transfer, ...] = ()


def best_plan(
    rows: Sequence[Sequence[Offer]], stored: Iterable[int], refused: Iterable[RestorePlan]
) -> RestorePlan | None:
    """The newest step that all ranks can have, from the best place; None if there is none.

    Args:
        rows: what each rank offers.
        stored: the steps in storage.
        refused: what was tried and found wanting.
    """
    found = [RestorePlan(step, Source.STORAGE) for step in stored]
    for step, attempt, world, shared in {(*offer[:3], offer.shared) for row in rows for offer in row}:
        of_step = [[o for o in row if o[:3] == (step, attempt, world) and o.shared == shared] for row in rows]
        transfers = _of_anybody(of_step) if shared else _of_everybody(of_step, world)
        found += [
            RestorePlan(step, source, attempt, world, bool(shared), tuple(given)) for source, given in transfers.items()
        ]
    return max((plan for plan in found if plan not in set(refused)), default=None)


def gaps(rows: Sequence[Sequence[Offer]]) -> list[Gap]:
    """The steps in memory that lack parts, newest first."""
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


def _of_anybody(rows: Sequence[Sequence[Offer]]) -> dict[Source, list[Transfer]]:
    """One part is the whole step: whoever lacks it gets it from the first that has it; in need, all from the last."""
    holders = [rank for rank, row in enumerate(rows) if row]
    lacking = tuple(rank for rank, row in enumerate(rows) if not row)
    first, last = holders[0], holders[-1]
    rest = tuple(rank for rank in range(len(rows)) if rank != last)
    ways = {Source.PEERS: [Transfer(rows[first][0].part, first, lacking)] if lacking else []}
    if not lacking:
        ways = {Source.MEMORY: []}
    if rest:
        ways[Source.COPIES] = [Transfer(rows[last][0].part, last, rest)]
    return ways


def _of_everybody(rows: Sequence[Sequence[Offer]], world: int) -> dict[Source, list[Transfer]]:
    """Every rank's part is needed: nothing can be done unless all are there."""
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
    """The parts that a rank reads: in the world that made them its own and what is alike on all, else every one."""
    if ranks != world:
        return set(range(world))
    leader = next((offer.part for offer in row if offer.kind == Kind.LEADER), 0)
    return {rank, leader}


def _transfers(
    needs: Sequence[set[int]], holders: dict[int, list[int]], rather: dict[int, list[int]]
) -> list[Transfer]:
    """Who gives what to whom, so that all needs are met; a part in `rather` is taken from there by everybody else."""
    transfers = []
    for part in sorted(holders):
        source = rather.get(part, holders[part])[0]
        have = {source} if part in rather else set(holders[part])
        takers = tuple(rank for rank, needs_of in enumerate(needs) if part in needs_of and rank not in have)
        if takers:
            transfers.append(Transfer(part, source, takers))
    return transfers
