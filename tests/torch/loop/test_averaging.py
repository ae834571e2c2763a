"""Gradients that are averaged while the backward pass runs are those of one process that saw all the samples."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from resile.torch._loop.averaging import Averager, TooManyPasses, _divided
from resile.torch._loop.group import GroupLost
from resile.torch._loop.model_buffers import ModelBuffers
from tests.torch.ranks import found_by

WORLD = 2


def model() -> Any:
    torch.manual_seed(2)
    parts = [torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 2), torch.nn.Linear(2, 2)]
    return torch.nn.Sequential(*parts)


def batch(rank: int) -> torch.Tensor:
    return torch.randn(6, 4, generator=torch.Generator().manual_seed(rank))


def gradients(net: Any) -> list[torch.Tensor]:
    return [parameter.grad.clone() for parameter in net.parameters()]


def alone(rank: int, loss: Any) -> list[torch.Tensor]:
    """What one process without peers computes; a parameter without a gradient has 0."""
    net = model()
    loss(net, batch(rank)).backward()
    return [torch.zeros_like(p) if p.grad is None else p.grad for p in net.parameters()]


def whole(net: Any, inputs: torch.Tensor) -> torch.Tensor:
    return net(inputs).square().sum()


def without_the_last_layer(net: Any, inputs: torch.Tensor) -> torch.Tensor:
    return net[:3](inputs).square().sum()


def averaged(averager: Averager, net: Any, inputs: list[torch.Tensor], loss: Any = whole) -> list[torch.Tensor]:
    averager.begin(WORLD, backwards=len(inputs))
    for each in inputs:
        loss(net, each).backward()
    averager.finish()
    return gradients(net)


def one_rank(rank: int) -> dict[str, Any]:
    """Everything that takes a group, in one pair of processes."""
    found: dict[str, Any] = {}
    net = model()
    averager = Averager(net.parameters(), bucket=32, first_bucket=16)
    sent_in_backward = []
    hook = net[0].weight.register_hook(lambda _: sent_in_backward.append(averager.under_way))
    found["whole"] = averaged(averager, net, [batch(rank)])
    found["again"] = averaged(averager, net, [batch(rank)])
    hook.remove()
    found["overlap"] = sent_in_backward
    found["unused"] = averaged(averager, net, [batch(rank)], without_the_last_layer if rank else whole)
    found["uneven"] = averaged(averager, net, [batch(rank), batch(rank)] if rank else [])
    averager.begin(WORLD)
    whole(net, batch(rank)).backward()
    with pytest.raises(TooManyPasses, match=r"step\(backwards="):
        whole(net, batch(rank)).backward()
    averager.finish()
    averager.close()
    found["closed"] = averaged(averager, net, [batch(rank)])
    buffers = ModelBuffers(net)
    net(batch(rank))
    buffers.fetch(WORLD)
    buffers.keep()
    found["mean"] = net[1].running_mean.clone()
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return found_by(one_rank, WORLD, tmp_path_factory.mktemp("ranks"))


def mean_of(*parts: list[torch.Tensor]) -> list[torch.Tensor]:
    return [sum(each[1:], each[0]) for each in zip(*[[g / WORLD for g in part] for part in parts], strict=True)]


def same(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def close(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    """As far as processes with other numbers of threads compute the same."""
    return all(torch.allclose(a, b, atol=1e-6) for a, b in zip(left, right, strict=True))


def test_every_rank_has_the_mean_of_all_gradients_step_after_step(found: list[dict[str, Any]]) -> None:
    expected = mean_of(alone(0, whole), alone(1, whole))
    assert close(found[0]["whole"], expected)
    for rank in found:
        assert same(rank["whole"], found[0]["whole"])
        assert same(rank["again"], found[0]["whole"]), "nothing of the step before is left"
        assert same(rank["closed"], found[0]["whole"]), "without hooks, at the end"


def test_the_first_bucket_is_on_its_way_before_the_backward_pass_ends(found: list[dict[str, Any]]) -> None:
    assert all(rank["overlap"] == [True, True] for rank in found)


def test_a_parameter_that_a_rank_did_not_use_counts_as_0_there(found: list[dict[str, Any]]) -> None:
    expected = mean_of(alone(0, whole), alone(1, without_the_last_layer))
    assert all(close(rank["unused"], expected) for rank in found)


def test_several_backward_passes_add_up_and_ranks_may_have_different_numbers_of_them(
    found: list[dict[str, Any]],
) -> None:
    expected = alone(1, whole)  # twice on one of two ranks
    assert all(close(rank["uneven"], expected) for rank in found)


def test_buffers_become_those_of_rank_0(found: list[dict[str, Any]]) -> None:
    assert torch.equal(found[0]["mean"], found[1]["mean"])


def test_gradients_of_one_process_are_those_of_an_ordinary_backward_pass() -> None:
    net, plain = model(), alone(0, whole)
    averager = Averager(net.parameters(), bucket=32)
    for own_zero_grad in (False, True):
        averager.begin(1)
        if own_zero_grad:
            net.zero_grad(set_to_none=True)
        whole(net, batch(0)).backward()
        averager.finish()
        assert same(gradients(net), plain)


def test_buckets_follow_the_backward_pass_and_the_first_is_small() -> None:
    parameters = [torch.nn.Parameter(torch.zeros(8)) for _ in range(9)]
    divided = list(_divided(parameters, size=4 * 32, first=32))
    assert [len(each) for each in divided] == [1, 4, 4]
    assert [p for each in divided for p in each] == list(reversed(parameters))
    assert math.prod(divided[0][0].shape) == 8


def test_a_small_parameter_goes_with_the_large_one_after_it_so_that_the_wire_is_not_idle_for_most_of_the_pass() -> None:
    first, second = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)
    divided = list(_divided([*first.parameters(), *second.parameters()], size=4096, first=64))
    assert [[p is first.weight or p is second.weight for p in each] for each in divided] == [[False, True]] * 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_gradient_is_divided_by_the_world_of_its_step_also_by_one_that_its_type_cannot_hold(dtype: Any) -> None:
    parameter = torch.nn.Parameter(torch.zeros(1, dtype=dtype))
    averager = Averager([parameter])
    for world in (2, 257):
        averager.begin(world)
        parameter.grad = torch.ones(1, dtype=dtype)
        averager._slots[0].fill()
        assert torch.equal(averager._slots[0].view, torch.tensor([1 / world]).to(dtype))


class Assigns(torch.nn.Module):
    """Has a buffer that is a part of what it was last given."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("last", torch.zeros(2))
        self.register_buffer("count", torch.zeros(1), persistent=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.last = inputs[0]
        self.count += 1
        return inputs


def test_a_buffer_that_was_assigned_anew_is_undone_and_what_was_assigned_stays_as_it_is() -> None:
    net, data = Assigns(), torch.arange(4.0).reshape(2, 2)
    buffers = ModelBuffers(net)
    net(data)
    buffers.keep()
    net(data + 4)
    net(data[1:])
    buffers.undo()
    assert net.last.tolist() == [0, 1]
    assert net.count == 1
    assert data.tolist() == [[0, 1], [2, 3]]


def test_buffers_that_a_state_leaves_out_are_given_to_another_rank() -> None:
    ours, theirs = torch.nn.Sequential(Assigns()), torch.nn.Sequential(Assigns())
    ours(torch.ones(1, 2))
    ours[0].register_buffer("late", torch.ones(3), persistent=False)
    given = ModelBuffers(ours).unsaved()
    assert set(given) == {"0.count", "0.late"}
    ModelBuffers(theirs).load(given)
    assert theirs[0].count == 1
    assert theirs[0].late.tolist() == [1, 1, 1]
    assert theirs.state_dict().keys() == ours.state_dict().keys()


def test_a_step_that_is_broken_off_leaves_the_buffers_as_they_were() -> None:
    net = torch.nn.BatchNorm1d(3)
    buffers = ModelBuffers(net)
    net(torch.randn(4, 3))
    buffers.fetch(1)
    buffers.keep()
    kept = net.running_mean.clone()
    net(torch.randn(4, 3))
    buffers.undo()
    assert torch.equal(net.running_mean, kept)
    assert net.num_batches_tracked == 1


def test_a_backward_pass_ends_early_when_the_round_is_over() -> None:
    net = model()
    averager = Averager(net.parameters())
    averager.begin(1, group=SimpleNamespace(over=True))
    with pytest.raises(GroupLost):
        whole(net, batch(0)).backward()
    averager.abandon()
    averager.begin(1)
    whole(net, batch(0)).backward()
    assert same(gradients(net), alone(0, whole))


class Endless:
    """A collective that gloo has forgotten."""

    def wait(self, _: object) -> None:
        raise RuntimeError("Operation timed out!")

    def is_completed(self) -> bool:
        return False


def test_memory_that_a_collective_may_still_write_to_is_left_to_it() -> None:
    net = model()
    averager = Averager(net.parameters())
    averager.begin(1)
    old = [bucket.flat for bucket in averager._buckets]
    averager._works.append(Endless())
    averager.abandon()
    assert averager._buckets[0].flat is not old[0]
    assert all(bucket.flat is flat for bucket, flat in zip(averager._buckets[1:], old[1:], strict=True))
    assert not averager.under_way
    for slot in averager._slots:
        assert slot.view.untyped_storage().data_ptr() == slot.bucket.flat.untyped_storage().data_ptr()
