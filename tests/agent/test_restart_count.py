"""How many restarts a node believes to have left."""

from __future__ import annotations

from resile.agent.workers.launcher import RestartCount
from resile.api.ids import NO_ROUND, Round, Seconds


def test_all_failures_of_one_round_count_as_one_and_each_outside_of_a_round_counts() -> None:
    restarts = RestartCount(2, Seconds(100.0))
    for round_ in (1, 1, 2):
        restarts.count(Round(round_))
    assert str(restarts) == "2 of 2 restarts used"
    assert not restarts.is_spent
    restarts.count(NO_ROUND)
    assert restarts.is_spent


def test_a_failure_of_long_ago_leaves_a_restart() -> None:
    now = 0.0
    restarts = RestartCount(1, Seconds(100.0), clock=lambda: now)
    restarts.count(Round(1))
    now = 99.0
    restarts.count(Round(2))
    assert restarts.is_spent
    now = 101.0
    assert not restarts.is_spent
    assert str(restarts) == "of 1 restarts some older ones do not count any more"
