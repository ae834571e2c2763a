"""Encodes training state as a msgpack description and a list of tensors, for sending it from one process to another.

Without pickle, the receiver constructs numbers, strings, lists, dicts and tensors, and runs no code of the sender. The
description does not contain the tensors, which are sent one by one without a copy. The decoded state can be used like
the original. Only numpy scalars become Python numbers, and a named tuple becomes another class with the same fields.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict, namedtuple
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import torch

from resile.torch._support.numpy_values import is_array, is_number, tensor_of

MAX_DESCRIPTION = 256 * 1024 * 1024
"""The most bytes of an encoded description. It holds no tensors, so a bigger one cannot be valid."""
MAX_DEPTH = 64

_DTYPES: dict[str, torch.dtype] = {
    name: dtype for name in dir(torch) if isinstance(dtype := getattr(torch, name), torch.dtype)
}
_NAMES = {dtype: str(dtype).removeprefix("torch.") for dtype in _DTYPES.values()}


class BadState(ValueError):
    """A state cannot be sent, or received data is not a state; the text is one sentence that names the bad value."""


class Shape(msgspec.Struct, frozen=True, array_like=True):
    dtype: str
    sizes: list[int]

    @property
    def nbytes(self) -> int:
        return math.prod(self.sizes) * int(self._type.itemsize)

    def empty(self, device: torch.device) -> torch.Tensor:
        return torch.empty(self.sizes, dtype=self._type, device=device)

    @property
    def _type(self) -> torch.dtype:
        dtype = _DTYPES.get(self.dtype)
        if dtype is None or any(size < 0 for size in self.sizes):
            raise BadState(f"there is no tensor of type {self.dtype} and sizes {self.sizes}")
        return dtype


class Description(msgspec.Struct, frozen=True, array_like=True):
    """What a state consists of: the shapes of its tensors, and its structure with all other values (`tree`)."""

    shapes: list[Shape]
    tree: Any


def describe(state: Any) -> tuple[bytes, list[torch.Tensor]]:
    """Return the encoded `Description` of a state, and the state's tensors in the order of the description.

    Raises BadState if a value cannot be sent.
    """
    tensors: list[torch.Tensor] = []
    tree = _take_apart(state, tensors, "state", 0)
    shapes = [Shape(_NAMES[tensor.dtype], list(tensor.shape)) for tensor in tensors]
    return msgspec.msgpack.encode(Description(shapes, tree)), tensors


def shapes_of(description: bytes) -> Description:
    """Decode the description of a state. Raises BadState if the bytes are no description."""
    try:
        return msgspec.msgpack.decode(description, type=Description)
    except (ValueError, RecursionError) as error:
        raise BadState(f"this is not the description of a state: {error}") from None


def rebuild(description: Description, tensors: list[torch.Tensor]) -> Any:
    """Build the state from its description and its tensors. Raises BadState if the two do not belong together."""
    if len(tensors) != len(description.shapes):
        raise BadState(f"a state of {len(description.shapes)} tensors cannot be made of {len(tensors)}")
    return _put_together(description.tree, tensors, 0)


def moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, dict):
        return type(value)({key: moved(each, device) for key, each in value.items()})
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(moved(each, device) for each in value))
    return type(value)(moved(each, device) for each in value) if type(value) in (list, tuple) else value


def _take_apart(value: Any, tensors: list[torch.Tensor], where: str, depth: int) -> Any:
    """Encode a value as nested [kind, content], and append its tensors to `tensors`.

    The kinds preserve types such as tuples; a tensor's content is its index in `tensors`. `where` names the value in
    errors, and `depth` is how deep it is nested. Raises BadState if the value cannot be sent.
    """
    if depth > MAX_DEPTH:
        raise BadState(f"{where} is nested more than {MAX_DEPTH} deep")
    if isinstance(value, torch.Tensor):
        if value.layout is not torch.strided:
            raise BadState(f"{where} is a sparse tensor, which cannot be sent; make it dense")
        tensors.append(value.detach())
        return ["tensor", len(tensors) - 1]
    if is_number(value):
        value = value.item()
    if type(value) is int and not -(1 << 63) <= value < 1 << 63:
        return ["integer", hex(value)]
    if value is None or type(value) in (bool, int, float, str, bytes):
        return ["value", value]
    if is_array(value):
        tensors.append(tensor_of(value))
        return ["array", len(tensors) - 1]
    if isinstance(value, Mapping):
        for key in value:
            if type(key) not in (int, str, bool):
                raise BadState(f"{where} has the key {key!r}; a state's keys are strings and whole numbers")
        kind = {Counter: "counter", OrderedDict: "ordered"}.get(type(value), "dict")
        return [kind, [[k, _take_apart(v, tensors, f"{where}[{k!r}]", depth + 1)] for k, v in value.items()]]
    fields = getattr(value, "_fields", None) if isinstance(value, tuple) else None
    if type(value) in (list, tuple, torch.Size) or fields is not None:
        parts = [_take_apart(v, tensors, f"{where}[{n}]", depth + 1) for n, v in enumerate(value)]
        if fields is not None:
            return ["named", [type(value).__name__, list(fields), parts]]
        return [{list: "list", tuple: "tuple", torch.Size: "size"}[type(value)], parts]
    raise BadState(
        f"{where} is a {type(value).__name__}; a state is made of numbers, strings, bytes, None, lists, tuples, "
        "dicts, tensors and numpy arrays"
    )


def _put_together(node: Any, tensors: list[torch.Tensor], depth: int) -> Any:
    if depth > MAX_DEPTH or type(node) is not list or len(node) != 2:
        raise BadState("the description of a state is broken")
    kind, content = node

    def inside(nodes: Any) -> list[Any]:
        return [_put_together(each, tensors, depth + 1) for each in nodes]

    def pairs() -> dict[Any, Any]:
        return {key: _put_together(value, tensors, depth + 1) for key, value in content}

    make: dict[str, Callable[[], Any]] = {
        "value": lambda: content,
        "integer": lambda: int(content, 16),
        "tensor": lambda: tensors[content],
        "array": lambda: tensors[content].cpu().numpy(),
        "dict": pairs,
        "ordered": lambda: OrderedDict(pairs()),
        "counter": lambda: Counter(pairs()),
        "list": lambda: inside(content),
        "tuple": lambda: tuple(inside(content)),
        "size": lambda: torch.Size(inside(content)),
        "named": lambda: namedtuple(content[0], content[1])(*inside(content[2])),
    }
    try:
        return make[kind]()
    except (KeyError, IndexError, TypeError, ValueError) as error:
        if isinstance(error, BadState):
            raise
        raise BadState(f"the description of a state is broken at a {kind!r}") from None
