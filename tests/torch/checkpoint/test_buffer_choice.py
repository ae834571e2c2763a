"""Which buffer all ranks overwrite with a sharded step: one step stays whole among them, whoever is slow."""

from __future__ import annotations

from resile.torch._checkpoint.save_group import SaveStatus, to_keep


def holds(first: int, second: int, *, wanted: tuple[int, ...] = (), older_wanted: bool = False) -> SaveStatus:
    return SaveStatus(9, 0, 1, first, int(first in wanted), second, int(second in wanted), int(older_wanted))


def test_the_newest_that_all_have_is_kept() -> None:
    assert to_keep([holds(4, 5), holds(5, 4)], partnered=False) == 5
    assert to_keep([holds(4, 5), holds(3, 4)], partnered=False) == 4, "one of them did not come to save 5"


def test_what_goes_to_storage_on_one_rank_is_kept_by_all_unless_copies_are_made() -> None:
    rows = [holds(4, 5, wanted=(4,)), holds(4, 5)]
    assert to_keep(rows, partnered=False) == 4
    assert to_keep(rows, partnered=True) is None
    assert to_keep([holds(4, 5, wanted=(4,)), holds(4, 5, wanted=(5,))], partnered=False) is None


def test_before_the_first_save_of_a_group_nobody_gives_up_what_it_saved_last() -> None:
    assert to_keep([holds(0, 0), holds(0, 0)], partnered=True) == 0
    assert to_keep([holds(0, 0), holds(0, 0, older_wanted=True)], partnered=False) is None
