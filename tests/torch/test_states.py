"""What goes from one process to another comes back as it was, and nothing else gets through."""

from __future__ import annotations

import msgspec
import pytest
import torch

from resile.torch import states


def sent(state):
    description, tensors = states.describe(state)
    return states.rebuild(states.shapes_of(description), [tensor.clone() for tensor in tensors])


def test_a_trained_optimizer_goes_to_a_fresh_one_bit_by_bit():
    torch.manual_seed(1)
    models = [torch.nn.Linear(4, 2) for _ in range(2)]
    ours, theirs = (torch.optim.Adam(model.parameters(), lr=0.01) for model in models)
    for _ in range(3):
        models[0](torch.randn(8, 4)).sum().backward()
        ours.step()
    models[1].load_state_dict(sent(models[0].state_dict()))
    theirs.load_state_dict(sent(ours.state_dict()))
    batch = torch.randn(8, 4)
    for model, optimizer in zip(models, (ours, theirs), strict=True):
        optimizer.zero_grad()
        model(batch).sum().backward()
        optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True))


def test_plain_values_keep_their_types():
    state = {"a": (1, 2.5, None), 3: [True, "x", b"y"], "deep": {"t": torch.tensor(7), "e": torch.empty(0, 3)}}
    back = sent(state)
    assert back["a"] == (1, 2.5, None)
    assert back[3] == [True, "x", b"y"]
    assert back["deep"]["t"].item() == 7
    assert back["deep"]["e"].shape == (0, 3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.int8, torch.bool, torch.complex64])
def test_every_kind_of_tensor_can_be_described(dtype):
    tensor = torch.ones(2, 3).to(dtype)
    assert torch.equal(sent(tensor), tensor)


@pytest.mark.parametrize(
    ("state", "where"),
    [
        ({"a": [object()]}, r"state\['a'\]\[0\] is a object"),
        ({"a": {(1, 2): 3}}, r"state\['a'\] has the key \(1, 2\)"),
        ({"f": print}, r"state\['f'\] is a builtin_function_or_method"),
    ],
)
def test_what_cannot_be_sent_is_named_by_its_place(state, where):
    with pytest.raises(states.BadState, match=where):
        states.describe(state)


def received(bytes_):
    description = states.shapes_of(bytes_)
    return states.rebuild(description, [shape.empty(torch.device("cpu")) for shape in description.shapes])


@pytest.mark.parametrize(
    "bytes_",
    [
        b"",
        b"\xc1",
        msgspec.msgpack.encode([[], ["tensor", 0]]),
        msgspec.msgpack.encode([[], ["module", "os"]]),
        msgspec.msgpack.encode([[], "value"]),
        msgspec.msgpack.encode([[], ["dict", [1]]]),
        msgspec.msgpack.encode([[["float32", [-1]]], ["tensor", 0]]),
        msgspec.msgpack.encode([[["os.system", [1]]], ["tensor", 0]]),
    ],
)
def test_bytes_that_are_no_state_are_refused(bytes_):
    with pytest.raises(states.BadState):
        received(bytes_)
