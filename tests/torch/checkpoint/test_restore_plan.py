"""Which step all ranks can have, and who gives what to whom: decided alike on every rank from what each offers."""

from __future__ import annotations

from resile.torch._checkpoint.restore_plan import Gap, Kind, Offer, RestorePlan, Source, Transfer, best_plan, gaps

A, B = 100, 200
"""Two attempts; the second is the later one."""


def shared(step: int, part: int = 0, attempt: int = A, world: int = 2) -> Offer:
    return Offer(step, attempt, world, part, 1, Kind.LEADER)


def own(step: int, part: int, world: int = 2, attempt: int = A) -> list[Offer]:
    """What a rank that is alone on its node offers of a sharded step."""
    return [Offer(step, attempt, world, part, 0, kind) for kind in (Kind.OWN, Kind.LEADER)]


def copy(step: int, part: int, world: int = 2, attempt: int = A) -> Offer:
    return Offer(step, attempt, world, part, 0, Kind.COPY)


def test_nothing_is_chosen_from_nothing() -> None:
    assert best_plan([[], []], [], []) is None


def test_the_newest_step_wins_and_memory_before_storage() -> None:
    rows = [[shared(5), shared(4)], [shared(5, 1), shared(4, 1)]]
    assert best_plan(rows, [3, 5], []) == RestorePlan(5, Source.MEMORY, A, 2, True)
    assert best_plan(rows, [3, 6], []) == RestorePlan(6, Source.STORAGE)


def test_whoever_lacks_what_all_have_alike_gets_it_from_one_that_has_it() -> None:
    rows = [[], [shared(5, 1)], []]
    assert best_plan(rows, [4], []) == RestorePlan(5, Source.PEERS, A, 2, True, (Transfer(1, 1, (0, 2)),))


def test_a_damaged_one_is_replaced_by_another_ranks() -> None:
    rows = [[shared(5)], [shared(5, 1)]]
    first = best_plan(rows, [], [])
    assert first is not None
    second = best_plan(rows, [], [first])
    assert second == RestorePlan(5, Source.COPIES, A, 2, True, (Transfer(1, 1, (0,)),))
    assert best_plan(rows, [4], [first, second]) == RestorePlan(4, Source.STORAGE)


def test_shards_in_everybodys_own_memory_need_nobody_else() -> None:
    assert best_plan([own(5, 0), own(5, 1)], [], []) == RestorePlan(5, Source.MEMORY, A, 2, False)


def test_a_shard_that_is_nowhere_makes_a_step_useless() -> None:
    rows = [own(5, 0) + own(4, 0), own(4, 1)]
    assert best_plan(rows, [3], []) == RestorePlan(4, Source.MEMORY, A, 2, False)
    assert best_plan([own(5, 0), []], [3], []) == RestorePlan(3, Source.STORAGE)


def test_it_is_known_which_ranks_parts_a_step_lacks() -> None:
    rows = [own(5, 0, world=3) + own(4, 0, world=3), [*own(4, 2, world=3), copy(4, 1, world=3)]]
    assert gaps(rows) == [Gap(5, 3, (1, 2), first=False)]
    assert gaps([[offer._replace(first=1) for offer in own(5, 1)]]) == [Gap(5, 2, (0,), first=True)]
    assert gaps([own(5, 0), own(5, 1), [shared(6)]]) == []


def test_a_lost_nodes_shard_comes_from_the_node_that_keeps_a_copy() -> None:
    rows = [[*own(5, 0), copy(5, 1)], []]
    found = best_plan(rows, [4], [])
    assert found == RestorePlan(5, Source.PEERS, A, 2, False, (Transfer(0, 0, (1,)), Transfer(1, 0, (1,))))


def test_a_damaged_shard_is_replaced_by_its_copy() -> None:
    rows = [[*own(5, 0), copy(5, 1)], [*own(5, 1), copy(5, 0)]]
    first = best_plan(rows, [4], [])
    assert first == RestorePlan(5, Source.MEMORY, A, 2, False)
    second = best_plan(rows, [4], [first])
    assert second == RestorePlan(5, Source.COPIES, A, 2, False, (Transfer(0, 1, (0,)), Transfer(1, 0, (1,))))
    assert best_plan(rows, [4], [first, second]) == RestorePlan(4, Source.STORAGE)


def test_another_number_of_ranks_gets_every_shard() -> None:
    rows = [[*own(5, 0), copy(5, 1)]]
    assert best_plan(rows, [4], []) == RestorePlan(5, Source.PEERS, A, 2, False)
    rows = [own(5, 0), own(5, 1), []]
    found = best_plan(rows, [4], [])
    assert found == RestorePlan(5, Source.PEERS, A, 2, False, (Transfer(0, 0, (1, 2)), Transfer(1, 1, (0, 2))))


def test_parts_of_different_attempts_never_make_a_step() -> None:
    rows = [own(7, 0, attempt=A) + own(5, 0, attempt=B), own(7, 1, attempt=B) + own(5, 1, attempt=B)]
    assert best_plan(rows, [], []) == RestorePlan(5, Source.MEMORY, B, 2, False)
    rows = [[shared(7, attempt=A)], [shared(7, 1, attempt=B)]]
    assert best_plan(rows, [], []) == RestorePlan(7, Source.PEERS, B, 2, True, (Transfer(1, 1, (0,)),))
