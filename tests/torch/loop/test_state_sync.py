"""Who takes the state when members of a round differ, and what it costs those that have it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from resile.torch._loop import collectives, state_codec, state_sync
from resile.torch._loop.collectives import Collectives
from resile.torch._loop.state_sync import MemberState, StateSync, SyncMessage
from tests.torch.checkpoint.checkpoint_servers import in_ranks

AHEAD, BEHIND, NEW = MemberState(10, 5), MemberState(9, 5), MemberState(0, 0)


def meeting(*states: MemberState, digests: dict[int, int] | None = None) -> StateSync:
    return StateSync([SyncMessage(each, rank + 1, 0, (digests or {}).get(rank, 1)) for rank, each in enumerate(states)])


@pytest.mark.parametrize(
    ("met", "takers"),
    [
        (meeting(AHEAD, AHEAD, NEW), [2]),
        (meeting(NEW, BEHIND, AHEAD, AHEAD), [0, 1]),
        (meeting(AHEAD, AHEAD, AHEAD, digests={1: 7}), [1]),
        (meeting(AHEAD, AHEAD), []),
        (meeting(NEW, NEW, NEW), [1, 2]),
        (meeting(NEW), []),
    ],
    ids=["newcomer", "behind", "stray", "alike", "beginning", "alone"],
)
def test_who_has_the_state_of_the_most_advanced_takes_nothing(met: StateSync, takers: list[int]) -> None:
    assert met.takers == takers


def state_of(seed: int) -> dict[str, Any]:
    made = torch.Generator().manual_seed(seed)
    large, small = torch.randn(5000, generator=made), [torch.randn(n, generator=made) for n in (3, 7, 700, 11, 900)]
    return {
        "large": large,
        "small": small,
        "none": torch.empty(0, 2),
        "step": torch.tensor(seed),
        "turned": large.view(50, 100).t(),
    }


def go_on(rank: int, states: list[MemberState]) -> tuple[bool, list[int], int, int]:
    """Agree, with blocks and parcels so small that there are many; how much memory that took beside the state."""
    collectives._BLOCK, state_sync.PARCEL = 4096, 2048
    made = 0
    empty = torch.empty

    def counted(*args: Any, **more: Any) -> torch.Tensor:
        nonlocal made
        tensor = empty(*args, **more)
        made = max(made, tensor.nbytes)
        return tensor

    torch.empty = counted
    found = state_sync.send_newest(meeting(*states), lambda: state_of(rank), Collectives())
    torch.empty = empty
    if found.received is None:
        return False, list(found.takers), found.sent, made
    _, ours = state_codec.describe(found.received)
    _, theirs = state_codec.describe(state_of(found.source))
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    return True, list(found.takers), found.sent, made


def test_a_survivor_is_not_bothered_with_the_state_that_a_newcomer_gets() -> None:
    giver, survivor, newcomer = in_ranks(go_on, 3, [AHEAD, AHEAD, NEW])
    assert survivor == (False, [2], 0, 0)
    assert newcomer[:2] == (True, [2])
    assert giver[:2] == (False, [2])
    assert giver[2] == newcomer[2] > 40000


def test_a_survivor_among_several_newcomers_has_one_block_of_the_state_at_a_time() -> None:
    giver, survivor, *newcomers = in_ranks(go_on, 4, [AHEAD, AHEAD, NEW, NEW])
    assert [each[:2] for each in newcomers] == [(True, [2, 3])] * 2
    assert survivor[:3] == (False, [2, 3], 0)
    assert 0 < survivor[3] <= 4096
    assert not giver[0]


def cannot_give(rank: int, states: list[MemberState]) -> None:
    """The state of whoever is most advanced has come to hold something that cannot be described."""
    state_sync.send_newest(meeting(*states), lambda: {"step": 3, "own": object()}, Collectives())


def test_a_state_that_cannot_be_given_is_the_same_error_for_all_also_for_those_who_have_it() -> None:
    giver, survivor, newcomer = in_ranks(cannot_give, 3, [AHEAD, AHEAD, NEW])
    assert giver == survivor == newcomer
    assert giver.startswith("BadState: the state of rank 0 cannot be given to others: state['own'] is a object")


def cannot_tell(rank: int, states: list[MemberState]) -> None:
    """The script's own part of the state fails."""
    state_sync.send_newest(meeting(*states), lambda: {}["step"], Collectives())


def test_a_state_that_the_script_cannot_tell_is_the_same_error_for_all() -> None:
    giver, survivor, newcomer = in_ranks(cannot_tell, 3, [AHEAD, AHEAD, NEW])
    assert giver == survivor == newcomer == "BadState: the state of rank 0 cannot be given to others: KeyError: 'step'"


def failing(error: Exception) -> Any:
    raise error


@pytest.fixture
def one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("one_rank")
def test_who_cannot_tell_its_state_says_why() -> None:
    error = RuntimeError("no")
    with pytest.raises(state_codec.BadState) as raised:
        state_sync.send_newest(meeting(AHEAD, NEW), lambda: failing(error), Collectives())
    assert raised.value.__cause__ is error


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(
    "state",
    [
        lambda: failing(MemoryError()),
        lambda: failing(torch.OutOfMemoryError("no")),
        lambda: torch.empty(1 << 50, dtype=torch.uint8),
    ],
    ids=["python", "device", "host"],
)
def test_who_lacks_the_memory_to_tell_its_state_ends_alone(state: Any) -> None:
    with pytest.raises((MemoryError, RuntimeError)):  # and no BadState, which all hear of
        state_sync.send_newest(meeting(AHEAD, NEW), state, Collectives())
