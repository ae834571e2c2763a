"""A state taken apart and put together: what a checkpoint holds can be read, and comes back as what it was."""

from __future__ import annotations

import collections
import enum
import pathlib
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from resile.torch import Checkpointer
from resile.torch._checkpoint.flatten import LoadTarget, StateMismatch, flatten
from resile.torch._checkpoint.packing import PackedState
from resile.torch._checkpoint.pickling import CannotRestore
from resile.torch._checkpoint.rank_layout import Saver, lay_out, still_fits
from tests.torch.checkpoint.checkpoint_servers import PATIENCE

PLACE = Saver(rank=0, world=1, leads=True, attempt="1")


class Colour(enum.Enum):
    RED = 1


class Noted:
    """Something with a state of its own."""

    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


def saved(state: dict[str, Any]) -> PackedState:
    leaves = flatten(state)
    layout = lay_out(leaves, PLACE)
    image = PackedState(bytearray(max(layout.length, 1)), 0, layout)
    image.write_frames()
    image.fill(leaves)
    return image


def restored(state: dict[str, Any], into: dict[str, Any]) -> dict[str, Any]:
    image, landing = saved(state), LoadTarget(into)
    landing.check(item.path for item in image.layout.items)
    image.read(landing)
    landing.finish()
    return into


@pytest.mark.parametrize(
    ("value", "what"),
    [
        (Colour.RED, "is a Colour"),
        (pathlib.PurePosixPath("/x"), "is a PurePosixPath"),
        (collections.deque([1]), "is a deque"),
        ([1, (2, {"a": frozenset([3])})], "holds a frozenset"),
        (np.array(["text"]), "is a ndarray"),
        (lambda: 1, "is a function"),
        ([torch.nn.Linear(1, 1)], "holds a Linear: what has a state_dict is saved in the state itself"),
    ],
)
def test_what_no_restore_could_read_is_refused_by_name_when_it_is_saved(value: Any, what: str, tmp_path: Path) -> None:
    checkpointer = Checkpointer(tmp_path)
    with pytest.raises(CannotRestore, match=rf"^mine\.x {what}"):
        checkpointer.save(1, {"mine": {"x": value, "fine": 1}}, store=True)
    checkpointer.close()


def test_a_value_that_becomes_one_that_cannot_be_read_is_refused_too() -> None:
    state: dict[str, Any] = {"history": [1.5]}
    image = saved(state)
    state["history"].append(Colour.RED)
    assert still_fits(image.layout, flatten(state), PLACE)
    with pytest.raises(CannotRestore, match=r"^history holds a Colour"):
        image.fill(flatten(state))


def test_a_class_that_the_script_allows_is_saved() -> None:
    with torch.serialization.safe_globals([Colour]):
        assert restored({"x": Colour.RED}, {"x": None}) == {"x": Colour.RED}


def test_numpys_numbers_come_back_as_pythons_wherever_they_are() -> None:
    state = {"a": np.float64(0.5), "b": {"c": np.int64(3)}, "d": [np.bool_(True), (np.float32(1.5), "x")]}
    back = restored(state, {"a": 0.0, "b": {"c": 0}, "d": []})
    assert back == {"a": 0.5, "b": {"c": 3}, "d": [True, (1.5, "x")]}
    assert [type(each) for each in (back["a"], back["b"]["c"], back["d"][0], back["d"][1][0])] == [
        float,
        int,
        bool,
        float,
    ]


def test_an_optimizer_whose_rate_is_one_of_numpys_numbers_is_restored() -> None:
    model = torch.nn.Linear(2, 2)
    optimizers = [torch.optim.SGD(model.parameters(), lr=lr) for lr in (np.float64(0.25), 0.5)]
    restored({"model": model, "optimizer": optimizers[0]}, {"model": model, "optimizer": optimizers[1]})
    assert optimizers[1].param_groups[0]["lr"] == 0.25


@pytest.mark.parametrize("through", ["memory", "storage"])
def test_arrays_come_back_as_arrays(through: str, tmp_path: Path) -> None:
    def state(fill: int) -> dict[str, Any]:
        turned = np.arange(6.0).reshape(2, 3).T[::-1] * fill
        counts = np.full((), fill, dtype=np.uint32)
        counts.flags.writeable = False
        return {"x": np.full(3, fill), "mine": {"y": [turned]}, "noted": Noted({"z": counts})}

    ours, theirs = state(7), state(0)
    if through == "memory":
        restored(ours, theirs)
    else:
        writer, reader = Checkpointer(tmp_path), Checkpointer(tmp_path)
        assert writer.save(1, ours, store=True)
        writer.wait(PATIENCE)
        assert reader.restore(theirs) == 1
        writer.close()
        reader.close()
    for left, right in (
        (ours["x"], theirs["x"]),
        (ours["mine"]["y"][0], theirs["mine"]["y"][0]),
        (ours["noted"].state["z"], theirs["noted"].state["z"]),
    ):
        assert isinstance(right, np.ndarray)
        assert left.dtype == right.dtype
        assert np.array_equal(left, right)


def test_the_state_of_numpys_generator_can_be_set_again() -> None:
    before = np.random.RandomState(1)
    after = np.random.RandomState(2)
    after.set_state(restored({"x": before.get_state()}, {"x": None})["x"])
    assert before.random() == after.random()


def pair(seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    models = {name: torch.nn.Linear(3, 2) for name in ("generator", "critic")}
    optimizers = {name: torch.optim.Adam(model.parameters()) for name, model in models.items()}
    for name, model in models.items():
        model(torch.randn(4, 3)).sum().backward()
        optimizers[name].step()
    return {"models": models, "moved": {"by": optimizers, "steps": seed}, "rest": {"noted": Noted({"n": seed})}}


def test_modules_and_optimizers_in_dictionaries_are_restored() -> None:
    ours, theirs = pair(1), pair(2)
    models = dict(theirs["models"])
    restored(ours, theirs)
    assert theirs["models"] == models, "the objects stay, and get what was saved"
    for name in models:
        assert torch.equal(ours["models"][name].weight, theirs["models"][name].weight)
        left, right = (each["moved"]["by"][name].state_dict()["state"] for each in (ours, theirs))
        assert torch.equal(left[0]["exp_avg"], right[0]["exp_avg"])
    assert theirs["moved"]["steps"] == 1
    assert theirs["rest"]["noted"].state == {"n": 1}


def test_an_object_in_a_dictionary_that_the_checkpoint_lacks_is_named() -> None:
    image = saved({"rest": {"a": Noted({"n": 1})}})
    landing = LoadTarget({"rest": {"a": Noted({}), "b": Noted({})}})
    with pytest.raises(StateMismatch, match=r"the checkpoint has no 'rest\.b'"):
        landing.check(item.path for item in image.layout.items)


def test_what_was_saved_as_a_state_dict_is_found_in_the_state_and_not_given_to_an_optimizer() -> None:
    ours, theirs = (pair(seed)["moved"]["by"]["critic"] for seed in (1, 2))
    given: dict[str, Any] = {"o": torch.optim.Adam(torch.nn.Linear(3, 2).parameters()).state_dict()}
    restored({"o": ours.state_dict()}, given)
    theirs.load_state_dict(given["o"])
    assert torch.equal(theirs.state_dict()["state"][0]["exp_avg"], ours.state_dict()["state"][0]["exp_avg"])
    with pytest.raises(StateMismatch, match=r"^the checkpoint has the state_dict\(\) of an optimizer, not the optim"):
        restored({"o": ours.state_dict()}, {"o": theirs})


@pytest.mark.parametrize(
    ("state", "name"),
    [
        ({"m": {"a.b": torch.ones(2), "a": {"b": torch.zeros(2)}}}, "m.a.b"),
        ({"m": {1: "one", "1": "uno"}}, "m.1"),
        ({"a.b": 1, "a": Noted({"b": 2})}, "a.b"),
    ],
)
def test_two_values_of_one_name_are_refused_and_named(state: dict[str, Any], name: str) -> None:
    with pytest.raises(ValueError, match=rf"two values of the state have the name {re.escape(name)} "):
        saved(state)


def test_one_optimizer_of_two_modules_whose_parameters_have_the_same_names_is_restored() -> None:
    def both(seed: int) -> dict[str, Any]:
        torch.manual_seed(seed)
        models = {name: torch.nn.Linear(3, 2) for name in ("generator", "critic")}
        optimizer = torch.optim.Adam([p for model in models.values() for p in model.parameters()])
        sum(model(torch.randn(4, 3)).sum() for model in models.values()).backward()
        optimizer.step()
        return {**models, "optimizer": optimizer}

    ours, theirs = both(1), both(2)
    restored(ours, theirs)
    left, right = (each["optimizer"].state_dict()["state"] for each in (ours, theirs))
    assert len(left) == 4
    assert all(torch.equal(left[number]["exp_avg"], right[number]["exp_avg"]) for number in left)
