"""Pauses between tries grow, and stay within their limit."""

from __future__ import annotations

from itertools import islice

from resile.common.backoff import Backoff


def test_pauses_double_up_to_the_limit() -> None:
    backoff = Backoff(first=0.5, limit=3.0)
    assert [backoff.after(failures) for failures in range(6)] == [0.0, 0.5, 1.0, 2.0, 3.0, 3.0]
    assert list(islice(backoff.pauses(), 5)) == [0.5, 1.0, 2.0, 3.0, 3.0]


def test_a_factor_of_ones_own_is_kept() -> None:
    assert list(islice(Backoff(1.0, 100.0, factor=10.0).pauses(), 4)) == [1.0, 10.0, 100.0, 100.0]


def test_no_number_of_failures_is_too_large() -> None:
    assert Backoff(first=1.0, limit=30.0).after(10**6) == 30.0


def test_a_limit_below_the_first_pause_holds_from_the_start() -> None:
    backoff = Backoff(first=5.0, limit=1.0)
    assert (backoff.after(1), next(backoff.pauses())) == (1.0, 1.0)
