"""Waits for a collective that end with their round, and those that are left to torch."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from resile.torch._loop import waits


@pytest.fixture
def bounded(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The calls that were made to end with the round."""
    made: list[Any] = []
    monkeypatch.setattr(waits, "call", lambda function, over_since: made.append(function()))
    return made


def wait_in_round(tensor: torch.Tensor) -> torch.Tensor:
    with waits.end_with_round(lambda: time.monotonic()):
        waited: torch.Tensor = torch.ops._c10d_functional.wait_tensor(tensor)
    return waited


def test_a_wait_for_a_tensor_ends_with_the_round(bounded: list[Any]) -> None:
    assert wait_in_round(torch.ones(2)).tolist() == [1.0, 1.0]
    assert len(bounded) == 1


def test_a_tensor_that_is_traced_is_left_to_torch(bounded: list[Any]) -> None:
    with FakeTensorMode():
        assert wait_in_round(torch.ones(2)).shape == (2,)
    assert bounded == [], "a thread of its own has none of the tracer's modes"


def test_a_process_with_groups_of_another_backend_keeps_the_waits_of_torch(
    bounded: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waits, "_all_gloo", lambda: False)
    assert wait_in_round(torch.ones(2)).tolist() == [1.0, 1.0]
    assert bounded == []


def test_the_operator_is_the_same_object_and_of_its_own_class_after_the_round() -> None:
    operator = torch.ops._c10d_functional.wait_tensor
    before = type(operator)
    with waits.end_with_round(lambda: time.monotonic()):
        assert torch.ops._c10d_functional.wait_tensor is operator
        assert type(operator) is not before
    assert type(operator) is before


def test_what_does_not_return_is_left_when_the_round_is_over() -> None:
    returned = threading.Event()
    with pytest.raises(waits.GroupLost):
        waits.call(returned.wait, lambda: 0.0)
    returned.set()
