import pytest
from hypothesis import given
from hypothesis import strategies as st

from resile.api.defaults import LARGEST_RECOVERY_BUDGET, SMALLEST_RECOVERY_BUDGET
from resile.api.ids import Seconds
from resile.api.timeouts import BadTimeouts, Timeouts, derive


@given(st.floats(min_value=SMALLEST_RECOVERY_BUDGET, max_value=LARGEST_RECOVERY_BUDGET))
def test_every_allowed_budget_gives_a_ladder_that_holds(budget: float) -> None:
    ladder = derive(Seconds(budget))
    assert ladder.heartbeat_timeout + ladder.straggler_wait + ladder.kill_grace <= budget
    assert ladder.heartbeat_timeout >= 3 * ladder.heartbeat
    assert all(getattr(ladder, rung) > 0 for rung in Timeouts.__struct_fields__)


def test_silence_is_two_seconds_by_default() -> None:
    assert derive().heartbeat_timeout == 2.0


@pytest.mark.parametrize("budget", [0.999, 3600.1, 1e9, 0.0, -1.0, float("nan")])
def test_a_budget_out_of_bounds_is_refused(budget: float) -> None:
    with pytest.raises(BadTimeouts, match=r"^recovery_budget: must be between 1 and 3600 seconds, not "):
        derive(Seconds(budget))


def test_an_override_changes_its_rung_alone() -> None:
    changed, usual = derive(Seconds(10), join=5.0), derive(Seconds(10))
    assert changed.join == 5.0
    assert {rung for rung in Timeouts.__struct_fields__ if getattr(changed, rung) != getattr(usual, rung)} == {"join"}


def test_an_override_of_none_keeps_the_derived_value() -> None:
    assert derive(join=None) == derive()


def test_a_silence_with_room_for_fewer_than_three_heartbeats_is_refused() -> None:
    with pytest.raises(
        BadTimeouts, match=r"^heartbeat_timeout: 2 s leaves room for fewer than 3 heartbeats of 1 s; allowed is 3 s"
    ):
        derive(Seconds(10), heartbeat=1.0)


def test_an_unknown_rung_is_named_with_the_known_ones() -> None:
    with pytest.raises(
        BadTimeouts, match=r"^snooze: no such time-out; known are recovery_budget, heartbeat, heartbeat_timeout"
    ):
        derive(snooze=1.0)


def test_shares_that_exceed_the_budget_are_refused() -> None:
    with pytest.raises(
        BadTimeouts,
        match=r"^recovery_budget: heartbeat_timeout \+ straggler_wait \+ kill_grace come to 12 s, "
        r"more than the budget of 10 s$",
    ):
        derive(Seconds(10), straggler_wait=9.0)


@pytest.mark.parametrize("value", [0.0, -3.0])
def test_a_rung_that_is_no_time_is_refused(value: float) -> None:
    with pytest.raises(BadTimeouts, match=r"^join: must be more than 0 seconds"):
        derive(join=value)
