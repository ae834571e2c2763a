"""What a script sees inside a step of several ranks is what it would see with DDP, and what it would see alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from resile.torch import Elastic, ElasticBatchSampler
from resile.torch._loop.averaging import Averager, TooManyPasses
from resile.torch._loop.training import EarlyStep
from tests.torch.ranks import found_by

WORLD = 2
STEPS = 4


class Net(torch.nn.Module):
    """A body, a head for odd and for even ranks, one that is never used, and buffers of all sorts."""

    def __init__(self, *, reentrant: bool = False) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.body = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Tanh(), torch.nn.Linear(6, 3))
        self.heads = torch.nn.ModuleList(torch.nn.Linear(3, 2) for _ in range(3))
        self.register_buffer("level", torch.zeros(3))
        self.register_buffer("unsaved", torch.zeros(3), persistent=False)
        self.reentrant = reentrant

    def forward(self, inputs: torch.Tensor, heads: tuple[int, ...] = (0, 1, 2)) -> torch.Tensor:
        body = checkpoint(self.body, inputs, use_reentrant=True) if self.reentrant else self.body(inputs)
        self.level = self.level * 0.5 + body.detach().mean(dim=0)  # another tensor
        self.unsaved += self.level
        return torch.cat([self.heads[head](body) for head in heads])


def batch(step: int, rank: int) -> torch.Tensor:
    return torch.randn(5, 4, generator=torch.Generator().manual_seed(step * WORLD + rank)).requires_grad_()


def adam(net: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(net.parameters(), lr=0.05, weight_decay=0.1)


def clip(net: torch.nn.Module) -> float:
    return float(torch.nn.utils.clip_grad_norm_(net.parameters(), 0.1))


def with_ddp(rank: int, heads: tuple[int, ...], passes: int = 1) -> dict[str, Any]:
    net = Net()
    ddp, optimizer, norms = DistributedDataParallel(net, find_unused_parameters=True), adam(net), []
    for step in range(STEPS):
        optimizer.zero_grad()
        for number in range(passes):
            if number < passes - 1:
                with ddp.no_sync():
                    ddp(batch(step, rank), heads).square().sum().backward()
            else:
                ddp(batch(step, rank), heads).square().sum().backward()
        norms.append(clip(net))
        optimizer.step()
    return {"state": net.state_dict(), "norms": norms}


def with_elastic(rank: int, heads: tuple[int, ...], passes: int = 1, **words: Any) -> dict[str, Any]:
    net = Net(**words)
    optimizer, norms = adam(net), []
    elastic = Elastic(net, optimizer)
    for step in elastic.steps(STEPS):
        with elastic.step(backwards=passes):
            for _ in range(passes):
                net(batch(step, rank), heads).square().sum().backward()
            norms.append(clip(net))
    unused = [name for name, parameter in net.named_parameters() if parameter.grad is None]
    return {"state": net.state_dict(), "norms": norms, "unused": unused, "unsaved": net.unsaved}


def frozen_and_unfrozen(rank: int) -> dict[str, Any]:
    """The body is unfrozen after one step, and the first head frozen after two."""
    net = Net()
    net.body.requires_grad_(False)
    elastic, seen = Elastic(net, adam(net)), []
    for step in elastic.steps(STEPS):
        if step == 1:
            net.body.requires_grad_(True)
        if step == 2:
            net.heads[0].requires_grad_(False)
        before = {name: value.clone() for name, value in net.state_dict().items()}
        with elastic.step():
            net(batch(step, rank)).square().sum().backward()
        seen.append(
            sorted(
                {n.rpartition(".")[0] for n, _ in net.named_parameters() if (net.state_dict()[n] != before[n]).any()}
            )
        )
    return {"state": net.state_dict(), "seen": seen}


def too_many(rank: int) -> bool:
    net = Net()
    averager = Averager(net.parameters())
    averager.begin(WORLD)
    net(batch(0, rank), (0,)).sum().backward()
    with pytest.raises(TooManyPasses, match=r"step\(backwards="):
        net(batch(0, rank), (1,)).sum().backward()  # of a head that the first pass did not use
    averager.finish()
    averager.close()
    net(batch(0, rank)).sum().backward()  # not in a step: nobody's affair
    return True


def two_steps_for_a_batch(rank: int) -> list[Any]:
    """One for the body and one for the heads, as an adversarial pair has it."""
    net, sampler = Net(), ElasticBatchSampler(40, global_batch_size=10)
    elastic, numbers = Elastic(net, adam(net), sampler=sampler), []
    for share, each in elastic.epochs(1, sampler):
        for part, other in ((net.body, net.heads), (net.heads, net.body)):
            part.requires_grad_(True)
            other.requires_grad_(False)
            with elastic.step():
                (net(batch(each[0], rank)).square().mean() * share.weight).backward()
        numbers += each
    return [numbers, elastic.completed, net.state_dict()]


def one_rank(rank: int) -> dict[str, Any]:
    some, own = (0, 1), (rank,)
    return {
        "ddp": with_ddp(rank, own),
        "elastic": with_elastic(rank, own),
        "ddp, passes": with_ddp(rank, some, passes=2),
        "elastic, passes": with_elastic(rank, some, passes=2),
        "reentrant": with_elastic(rank, own, reentrant=True),
        "frozen": frozen_and_unfrozen(rank),
        "too many": too_many(rank),
        "pair": two_steps_for_a_batch(rank),
    }


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return found_by(one_rank, WORLD, tmp_path_factory.mktemp("ranks"))


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def close(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return all(torch.allclose(left[name], right[name], atol=1e-5) for name in left if name != "level")


@pytest.mark.parametrize("kind", ["", ", passes"])
def test_gradients_clipped_after_the_backward_pass_are_the_mean_as_with_ddp(found: list[dict[str, Any]], kind: str):
    ours = [rank[f"elastic{kind}"] for rank in found]
    assert same(ours[0]["state"], ours[1]["state"])
    assert ours[0]["norms"] == ours[1]["norms"]
    for rank, theirs in zip(ours, [each[f"ddp{kind}"] for each in found], strict=True):
        assert rank["norms"] == pytest.approx(theirs["norms"], rel=1e-5)
        assert close(rank["state"], theirs["state"])


def test_a_parameter_that_no_rank_uses_has_no_gradient_and_is_not_moved(found: list[dict[str, Any]]):
    fresh = Net().state_dict()
    for rank in found:
        assert rank["elastic"]["unused"] == ["heads.2.weight", "heads.2.bias"]
        assert torch.equal(rank["elastic"]["state"]["heads.2.weight"], fresh["heads.2.weight"])


def test_a_pass_within_a_pass_does_not_end_it(found: list[dict[str, Any]]):
    for rank in found:
        assert rank["reentrant"]["norms"] == pytest.approx(rank["elastic"]["norms"], rel=1e-5)
        assert close(rank["reentrant"]["state"], rank["elastic"]["state"])


def test_buffers_that_are_assigned_anew_are_those_of_rank_0(found: list[dict[str, Any]]):
    assert found[0]["elastic"]["state"]["level"].any()
    assert torch.equal(found[0]["elastic"]["state"]["level"], found[1]["elastic"]["state"]["level"])
    assert torch.equal(found[0]["elastic"]["unsaved"], found[1]["elastic"]["unsaved"])


def test_what_is_unfrozen_is_averaged_from_then_on_and_what_is_frozen_is_left_alone(found: list[dict[str, Any]]):
    heads, body = [f"heads.{number}" for number in range(3)], ["body.0", "body.2"]
    assert found[0]["frozen"]["seen"] == [heads, body + heads, body + heads[1:], body + heads[1:]]
    assert same(found[0]["frozen"]["state"], found[1]["frozen"]["state"])


def test_a_pass_too_many_is_an_error_whichever_parameters_it_uses(found: list[dict[str, Any]]):
    assert all(rank["too many"] for rank in found)


def test_two_steps_for_one_batch_count_it_once(found: list[dict[str, Any]]):
    assert sorted(found[0]["pair"][0] + found[1]["pair"][0]) == list(range(40))
    assert found[0]["pair"][1] == 8
    assert same(found[0]["pair"][2], found[1]["pair"][2])


def test_alone_it_is_the_same():
    ours, sampler = Net(), ElasticBatchSampler(40, global_batch_size=10)
    elastic = Elastic(ours, adam(ours), sampler=sampler)
    for _ in elastic.epochs(1, sampler):
        for _ in range(2):
            with elastic.step():
                ours(batch(0, 0), (0,)).sum().backward()
    assert elastic.completed == 8
    assert ours.heads[1].weight.grad is None


def simplest() -> tuple[torch.nn.Linear, torch.optim.SGD, Elastic]:
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    return model, optimizer, Elastic(model, optimizer)


def test_a_step_that_the_script_takes_inside_the_block_is_refused_and_not_taken_twice():
    model, optimizer, elastic = simplest()

    def loss_and_step() -> None:
        model(torch.ones(1, 1)).sum().backward()
        optimizer.step()

    with pytest.raises(EarlyStep, match=r"^optimizer\.step\(\) was called inside"), elastic.step():
        loss_and_step()
    assert model.weight.item() == 0
    assert elastic.completed == 0


def test_outside_of_a_block_and_after_one_that_failed_the_optimizer_is_the_scripts_own():
    model, optimizer, elastic = simplest()
    with pytest.raises(ZeroDivisionError), elastic.step():
        raise ZeroDivisionError
    model(torch.ones(1, 1)).sum().backward()
    optimizer.step()
    assert model.weight.item() == -1
    with elastic.step():
        optimizer.zero_grad()
        model(torch.ones(1, 1)).sum().backward()
    assert model.weight.item() == -2
    optimizer.step()
    assert model.weight.item() == -3


def test_a_step_in_which_a_peer_is_lost_is_named_by_the_number_that_it_would_have_had(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    model, _, elastic = simplest()
    caplog.set_level("INFO")
    with elastic.step():
        model(torch.ones(1, 1)).sum().backward()
    monkeypatch.setattr(elastic._rendezvous, "is_loss", lambda error: True)
    with elastic.step():
        raise RuntimeError("Read error")
    assert elastic.completed == 1
    assert "step 2 is broken off: Read error" in caplog.messages


class _Reset:
    """A collective whose peer has reset the connection."""

    def wait(self) -> None:
        raise RuntimeError("[/__w/gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:3443: Connection reset")


def test_a_step_that_is_broken_off_is_logged_without_the_location_in_gloos_source(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    model, _, elastic = simplest()
    caplog.set_level("INFO")
    elastic.meet()
    monkeypatch.setattr(elastic._rendezvous, "world", 2)
    monkeypatch.setattr(elastic._rendezvous, "is_loss", lambda error: True)
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda *_, **__: _Reset())
    with elastic.step():
        model(torch.ones(1, 1)).sum().backward()
    words = "gradients were not averaged: Read error [127.0.0.1]:3443: Connection reset"
    assert f"step 1 is broken off: {words}" in caplog.messages


def test_a_scaler_before_the_step_leaves_out_what_is_not_finite_and_moves_its_scale():
    model, optimizer, _ = simplest()
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)

    def unscale() -> None:
        scaler.unscale_(optimizer)
        if not torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5).isfinite():
            optimizer.zero_grad()
        scaler.update()

    elastic = Elastic(model, optimizer, state={"scaler": scaler}, before_step=unscale)
    weights = []
    for factor in (1.0, float("inf"), 1.0):
        with elastic.step():
            optimizer.zero_grad()
            scaler.scale(model(torch.ones(1, 1)).sum() * factor).backward()
        weights.append((model.weight.item(), scaler.get_scale()))
    assert weights == [(pytest.approx(-0.5, abs=1e-5), 8), (weights[0][0], 4), (pytest.approx(-1, abs=1e-5), 4)]
