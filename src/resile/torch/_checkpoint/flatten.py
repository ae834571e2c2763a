"""Takes a training state apart into named leaves and puts it together again.

The names are those of `torch.distributed.checkpoint` (`model.0.weight`, `optimizer.state.0.weight.exp_avg`), so that
DCP can load what is stored. A state is a dictionary of modules, optimizers, other objects with `state_dict` and
`load_state_dict`, tensors, numpy arrays, dictionaries of these, and plain values. Everything is restored with its type,
except that numpy scalars become Python numbers.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from typing import Any, NamedTuple

import torch
from torch.nn.parallel import DistributedDataParallel

from resile.checkpoint.layout import Path
from resile.torch._support.numpy_values import PLAIN, is_array, is_number, tensor_of
from resile.torch._support.sharding import is_sharded

State = MutableMapping[str, Any]


class StateMismatch(ValueError):
    """The checkpoint is sound but does not fit the state to be loaded; the text says what differs."""


class Leaf(NamedTuple):
    path: Path
    value: Any
    late: bool = False
    """True for a tensor that only the optimizer changes. It may be copied during the next forward and backward pass."""
    array: bool = False

    @property
    def key(self) -> str:
        return key_of(self.path)


class Name(NamedTuple):
    """The name of a parameter within its module, and within the whole state."""

    short: str
    full: str


def key_of(path: Path) -> str:
    """The dotted name of a leaf, such as `model.0.weight`."""
    return ".".join(str(key) for _, key in path)


def parts(state: Mapping[str, Any], above: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yield each value of a state with its path. `above` is the path of `state` itself.

    If a dictionary holds modules or other objects with a `state_dict`, its values are yielded instead, one by one.
    """
    for key, value in state.items():
        path: Path = (*above, ("d", _sound_key(above, key)))
        if not _is_stateful(value) and isinstance(value, MutableMapping) and _holds_stateful(value):
            yield from parts(value, path)
        else:
            yield path, value


def refuse_duplicates(leaves: Iterable[Leaf]) -> None:
    known: dict[str, Path] = {}
    for leaf in leaves:
        key = leaf.key
        if key in known:
            here, there = (" and then ".join(repr(step) for _, step in path) for path in (known[key], leaf.path))
            raise ValueError(
                f"two values of the state have the name {key} (by the keys {here}, and by {there}), and a checkpoint "
                "holds one of a name: rename a key"
            )
        known[key] = leaf.path


def flatten(state: Mapping[str, Any]) -> list[Leaf]:
    found = list(parts(state))
    names = _names(found)
    return [leaf for path, part in found for leaf in _leaves_of(path, part, names)]


def _is_stateful(value: Any) -> bool:
    return hasattr(value, "state_dict") and hasattr(value, "load_state_dict")


def _holds_stateful(value: Mapping[Any, Any]) -> bool:
    return any(
        _is_stateful(inner) or (isinstance(inner, MutableMapping) and _holds_stateful(inner))
        for inner in value.values()
    )


def _sound_key(path: Path, key: str | int) -> str | int:
    if type(key) not in (str, int):
        raise TypeError(f"{key_of(path)} has a key of type {type(key).__name__}: only str and int can be saved")
    return key


def _leaves_of(root: Path, part: Any, names: Mapping[int, Name]) -> Iterator[Leaf]:
    if isinstance(part, torch.nn.Module):
        module = unwrap(part)
        parameters = {key for key, _ in module.named_parameters(remove_duplicate=False)}
        for key, value in module.state_dict().items():
            yield _leaf((*root, ("d", _clean(key))), value, key in parameters)
    elif isinstance(part, torch.optim.Optimizer):
        yield from _optimizer_leaves(root, part, names)
    else:
        yield from _leaves(root, part.state_dict() if _is_stateful(part) else part)


def _optimizer_leaves(root: Path, optimizer: Any, names: Mapping[int, Name]) -> Iterator[Leaf]:
    for number, (group, called) in enumerate(zip(optimizer.param_groups, _called(optimizer, names), strict=True)):
        for parameter, name in zip(group["params"], called, strict=True):
            for key, value in optimizer.state.get(parameter, {}).items():
                late = isinstance(value, torch.Tensor)
                yield _leaf((*root, ("d", "state"), ("d", name), ("d", key)), value, late)
        for option, value in group.items():
            path: Path = (*root, ("d", "param_groups"), ("l", number), ("d", option))
            yield _leaf(path, called if option == "params" else value)


def _called(optimizer: Any, names: Mapping[int, Name]) -> list[list[str]]:
    groups = [
        [names.get(id(p)) or Name(*[f"param_{number}_{place}"] * 2) for place, p in enumerate(group["params"])]
        for number, group in enumerate(optimizer.param_groups)
    ]
    often = Counter(name.short for group in groups for name in group)
    return [[name.short if often[name.short] == 1 else name.full for name in group] for group in groups]


def _leaves(path: Path, value: Any) -> Iterator[Leaf]:
    if isinstance(value, Mapping) and value:
        for key, inner in value.items():
            yield from _leaves((*path, ("d", _sound_key(path, key))), inner)
    elif isinstance(value, list) and _has_inside(value):
        for place, inner in enumerate(value):
            yield from _leaves((*path, ("l", place)), inner)
    elif type(value) is tuple and _has_array(value):
        for place, inner in enumerate(value):
            yield from _leaves((*path, ("t", place)), inner)
    else:
        yield _leaf(path, dict(value) if isinstance(value, Mapping) else value)


def _leaf(path: Path, value: Any, late: bool = False) -> Leaf:
    if type(value) in PLAIN:
        return Leaf(path, value, late)
    if is_number(value):
        return Leaf(path, value.item())
    return Leaf(path, tensor_of(value), array=True) if is_array(value) else Leaf(path, value, late)


def _has_inside(value: list[Any]) -> bool:
    return any(
        isinstance(inner, (torch.Tensor, Mapping)) or (isinstance(inner, list) and _has_inside(inner))
        for inner in value
    ) or _has_array(value)


def _has_array(value: Any) -> bool:
    if type(value) in PLAIN:
        return False
    if isinstance(value, list | tuple):
        return any(map(_has_array, value))
    return any(map(_has_array, value.values())) if isinstance(value, dict) else is_array(value)


def _names(found: Iterable[tuple[Path, Any]]) -> dict[int, Name]:
    return {
        id(parameter): Name(_clean(name), f"{key_of(path)}.{_clean(name)}")
        for path, part in found
        if isinstance(part, torch.nn.Module)
        for name, parameter in unwrap(part).named_parameters()
    }


def unwrap(module: Any) -> Any:
    return module.module if isinstance(module, DistributedDataParallel) else module


def _clean(name: str) -> str:
    return name.replace("_orig_mod.", "")


def local(tensor: Any) -> Any:
    return tensor.to_local() if is_sharded(tensor) else tensor


class LoadTarget:
    """The state that receives a checkpoint. Its tensors are filled in place; `finish` hands out all other values."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._parts = list(parts(state))
        self._names = _names(self._parts)
        self._live: dict[str, Any] = {}
        self._parameters: dict[Path, dict[str, Any]] = {}
        for path, part in self._parts:
            if isinstance(part, torch.optim.Optimizer):
                called = itertools.chain(*_called(part, self._names))
                parameters = itertools.chain(*(group["params"] for group in part.param_groups))
                self._parameters[path] = dict(zip(called, parameters, strict=True))
            if isinstance(part, torch.optim.Optimizer | torch.nn.Module | torch.Tensor | Mapping):
                for leaf in _leaves_of(path, part, self._names):
                    if isinstance(leaf.value, torch.Tensor):
                        self._live[leaf.key] = leaf.value
        self._loaded: dict[Path, Any] = {}
        self._arrays: set[Path] = set()
        self._covered: dict[Path, dict[tuple[int, ...], int]] = {}

    def wants(self, path: Path) -> bool:
        return path[0][1] in self._state

    def tensor(self, path: Path, dtype: Any, shape: tuple[int, ...], *, array: bool = False) -> Any:
        """Return the tensor that is to be filled with the checkpoint's values for this path.

        `shape` is the shape of the checkpoint's tensor over all ranks. Raises StateMismatch if the state's tensor has
        another shape. With `array`, `finish` converts the tensor to a numpy array.
        """
        key = key_of(path)
        target = self._loaded.get(path, self._live.get(key))
        if target is None:
            target = self._new(path, dtype, shape)
        if tuple(target.shape) != tuple(shape):
            raise StateMismatch(f"{key} has the shape {tuple(shape)} in the checkpoint and {tuple(target.shape)} here")
        self._loaded[path] = target
        if array:
            self._arrays.add(path)
        return target

    def cover(self, path: Path, origin: tuple[int, ...], count: int) -> None:
        """Note that a block of a tensor is filled: `count` elements, the first at `origin`."""
        self._covered.setdefault(path, {})[origin] = count

    def missing(self) -> str:
        """The name of a tensor that was not filled completely; empty if all were."""
        for path, target in self._loaded.items():
            filled = sum(self._covered.get(path, {}).values())
            if isinstance(target, torch.Tensor) and filled < local(target).numel():
                return key_of(path)
        return ""

    def value(self, path: Path, value: Any) -> None:
        self._loaded[path] = value

    def check(self, paths: Iterable[Path]) -> None:
        """Raise StateMismatch if the state needs a value that the checkpoint lacks. `paths` are the checkpoint's."""
        found = list(paths)
        keys = {key_of(path) for path in found}
        known = {_steps(path[:length]) for path in found for length in range(1, len(path) + 1)}
        for path, part in self._parts:
            if isinstance(part, torch.nn.Module):
                for leaf in _leaves_of(path, part, self._names):
                    if leaf.key not in keys:
                        raise StateMismatch(f"the checkpoint has no {leaf.key}")
            elif _steps(path) not in known:
                raise StateMismatch(f"the checkpoint has no {key_of(path)!r}")

    def finish(self) -> None:
        """Hand the loaded values to the objects of the state. Call this only when all tensors are filled."""
        for root, part in self._parts:
            leaves = {
                path[len(root) :]: value.cpu().numpy() if path in self._arrays else value
                for path, value in self._loaded.items()
                if _steps(path[: len(root)]) == _steps(root)
            }
            if isinstance(part, torch.nn.Module):
                rest = {str(p[0][1]): v for p, v in leaves.items() if not isinstance(v, torch.Tensor)}
                if rest:
                    unwrap(part).load_state_dict(rest, strict=False)
            elif isinstance(part, torch.optim.Optimizer):
                self._finish_optimizer(part, nest(leaves), self._parameters[root])
            elif _is_stateful(part):
                part.load_state_dict(nest(leaves))
            elif not isinstance(part, torch.Tensor):
                above: Any = self._state
                for _, key in root[:-1]:
                    above = above[key]
                above[root[-1][1]] = nest(leaves)

    def _new(self, path: Path, dtype: Any, shape: tuple[int, ...]) -> Any:
        parameters = self._parameters.get(path[:-3])
        if parameters is not None and path[-3] == ("d", "state"):
            parameter = parameters.get(str(path[-2][1]))
            if parameter is not None and tuple(parameter.shape) == tuple(shape):
                return torch.empty_like(parameter, dtype=dtype, requires_grad=False)
        return torch.empty(shape, dtype=dtype)

    @staticmethod
    def _finish_optimizer(optimizer: Any, saved: Any, parameters: Mapping[str, Any]) -> None:
        numbers = {name: number for number, name in enumerate(parameters)}
        state, groups = saved.get("state", {}), []
        for group, old in zip(optimizer.param_groups, saved["param_groups"], strict=False):
            missing = [name for name in old["params"] if name not in numbers]
            if any(isinstance(name, int) for name in missing):
                raise StateMismatch(
                    "the checkpoint has the state_dict() of an optimizer, not the optimizer: give save and restore "
                    "the optimizer itself"
                )
            if missing or len(old["params"]) != len(group["params"]):
                which = ", ".join(missing) or "their sizes differ"
                raise StateMismatch(f"the optimizer's groups are not those of the checkpoint: {which}")
            groups.append({**old, "params": [numbers[name] for name in old["params"]]})
        here, there = len(optimizer.param_groups), len(saved["param_groups"])
        if here != there:
            raise StateMismatch(f"the checkpoint has {there} parameter groups, the optimizer has {here}")
        by_number = {numbers[name]: values for name, values in state.items() if name in numbers}
        optimizer.load_state_dict({"state": by_number, "param_groups": groups})


def _steps(path: Path) -> tuple[str | int, ...]:
    """The keys of a path without their letters. A letter says if its key is of a dictionary, a list or a tuple.

    In DCP, an integer key of a dictionary looks like a position in a list. So paths are compared without letters.
    """
    return tuple(key for _, key in path)


def nest(leaves: Mapping[Path, Any]) -> Any:
    """Build the nested dictionaries, lists and tuples that have these values at these paths."""
    if () in leaves:
        return leaves[()]
    heads: dict[tuple[str, str | int], dict[Path, Any]] = {}
    for path, value in leaves.items():
        heads.setdefault(path[0], {})[path[1:]] = value
    kind = next(iter(heads))[0] if heads else "d"
    if kind != "d":
        values = [nest(heads[head]) for head in sorted(heads, key=lambda head: int(head[1]))]
        return values if kind == "l" else tuple(values)
    return {head[1]: nest(rest) for head, rest in heads.items()}
