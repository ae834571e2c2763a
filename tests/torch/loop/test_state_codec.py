"""What goes from one process to another comes back as it was, and nothing else gets through."""

from __future__ import annotations

from collections import Counter, OrderedDict, namedtuple

import msgspec
import numpy as np
import pytest
import torch

from resile.torch import Elastic
from resile.torch._loop import state_codec


def sent(state):
    description, tensors = state_codec.describe(state)
    return state_codec.rebuild(state_codec.shapes_of(description), [tensor.clone() for tensor in tensors])


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


Moment = namedtuple("Moment", ["mean", "spread"])


@pytest.mark.parametrize(
    "value",
    [
        torch.Size([2, 3]),
        OrderedDict(b=1, a=2),
        Counter([2, 5, 5]),
        1 << 100,
        -(1 << 63) - 1,
        np.random.default_rng(1).bit_generator.state,
    ],
)
def test_what_is_more_than_a_plain_tuple_dict_or_number_stays_that(value):
    back = sent({"x": value})["x"]
    assert type(back) is type(value)
    assert back == value


def test_named_tuples_keep_their_fields():
    back = sent([Moment(1.5, [2])])[0]
    assert (back, back.mean, back.spread) == ((1.5, [2]), 1.5, [2])


def test_numpys_numbers_arrive_as_pythons_and_its_arrays_as_arrays():
    back = sent({"lr": np.float64(0.1), "n": np.int64(3), "yes": np.bool_(True), "a": np.arange(4, dtype=np.uint32)})
    assert [type(back[key]) for key in ("lr", "n", "yes")] == [float, int, bool]
    assert (back["lr"], back["n"], back["yes"]) == (0.1, 3, True)
    assert back["a"].dtype == np.uint32
    assert back["a"].tolist() == [0, 1, 2, 3]


def test_a_scheduler_of_milestones_goes_on_from_what_it_was_sent():
    def made():
        model = torch.nn.Linear(1, 1)
        return torch.optim.lr_scheduler.MultiStepLR(torch.optim.SGD(model.parameters(), lr=1.0), [2, 2, 3])

    ours, theirs = made(), made()
    theirs.load_state_dict(sent(ours.state_dict()))
    assert theirs._get_closed_form_lr() == ours._get_closed_form_lr()


class Odd:
    """Something whose state nobody can be given."""

    def state_dict(self):
        return {"x": {1, 2}}

    def load_state_dict(self, state):
        pass


def test_a_state_that_nobody_could_be_given_is_named_in_the_first_step():
    model = torch.nn.Linear(1, 1)
    elastic = Elastic(model, torch.optim.SGD(model.parameters(), lr=0.1), state={"odd": Odd()})
    elastic.meet()
    with pytest.raises(state_codec.BadState, match=r"state\['parts'\]\['odd'\]\['x'\] is a set"), elastic.step():
        model(torch.ones(1, 1)).sum().backward()
    elastic.close()


def test_a_state_is_tried_once():
    class Counted(Odd):
        asked = 0

        def state_dict(self):
            self.asked += 1
            return {"x": 1}

    counted = Counted()
    model = torch.nn.Linear(1, 1)
    elastic = Elastic(model, torch.optim.SGD(model.parameters(), lr=np.float64(0.1)), state={"counted": counted})
    for _ in elastic.steps(3):
        with elastic.step():
            model(torch.ones(1, 1)).sum().backward()
    assert counted.asked == 1
    elastic.close()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.int8, torch.bool, torch.complex64])
def test_every_kind_of_tensor_can_be_described(dtype):
    tensor = torch.ones(2, 3).to(dtype)
    assert torch.equal(sent(tensor), tensor)


@pytest.mark.parametrize(
    ("state", "where"),
    [
        ({"a": [object()]}, r"state\['a'\]\[0\] is a object"),
        ({"a": {(1, 2): 3}}, r"state\['a'\] has the key \(1, 2\)"),
        ({"s": torch.eye(2).to_sparse()}, r"state\['s'\] is a sparse tensor"),
        ({"f": print}, r"state\['f'\] is a builtin_function_or_method"),
    ],
)
def test_what_cannot_be_sent_is_named_by_its_place(state, where):
    with pytest.raises(state_codec.BadState, match=where):
        state_codec.describe(state)


def received(bytes_):
    description = state_codec.shapes_of(bytes_)
    return state_codec.rebuild(description, [shape.empty(torch.device("cpu")) for shape in description.shapes])


@pytest.mark.parametrize(
    "bytes_",
    [
        b"",
        b"\xc1",
        b"\x92\x90\xa1\x80",  # a text that is no UTF-8
        msgspec.msgpack.encode([[], ["tensor", 0]]),
        msgspec.msgpack.encode([[], ["module", "os"]]),
        msgspec.msgpack.encode([[], "value"]),
        msgspec.msgpack.encode([[], ["dict", [1]]]),
        msgspec.msgpack.encode([[], ["named", ["a", ["import os"], []]]]),
        msgspec.msgpack.encode([[], ["integer", 1]]),
        msgspec.msgpack.encode([[["float32", [-1]]], ["tensor", 0]]),
        msgspec.msgpack.encode([[["os.system", [1]]], ["tensor", 0]]),
    ],
)
def test_bytes_that_are_no_state_are_refused(bytes_):
    with pytest.raises(state_codec.BadState):
        received(bytes_)


def test_a_state_on_another_device_has_the_same_kinds():
    pair = namedtuple("Pair", "left right")
    state = {
        "pair": pair(torch.ones(1), 2),
        "seen": Counter("aab"),
        "sizes": torch.Size([3]),
        "deep": [(torch.ones(2),)],
    }
    moved = state_codec.moved(state, torch.device("meta"))
    assert (moved["pair"].left.device.type, moved["pair"].right) == ("meta", 2)
    assert moved["deep"][0][0].device.type == "meta"
    assert (moved["seen"], type(moved["seen"]), moved["sizes"]) == (Counter("aab"), Counter, torch.Size([3]))
