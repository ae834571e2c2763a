"""Values that are no tensors as bytes, and back: what was written can be read, or it is not written.

Reading makes plain values and tensors only (`weights_only=True`), so that a checkpoint runs no code. Pickle writes
nearly anything. So what a pickle names beyond the plainest values is read back once, before it counts as saved, and is
taken for readable from then on: a value that is made of the same classes as before costs nothing more.
"""

from __future__ import annotations

import io
import pickle
import types
import warnings
from typing import Any

import torch

from resile.torch._support.numpy_values import is_number

_READABLE: set[Any] = set()
"""Classes and functions that were named by pickles which could be read."""


class CannotRestore(TypeError):
    """Something was to be saved that no restore could read; the text is one sentence that names it."""


class _Unknown(Exception):
    """A pickle names something that was not tried yet."""


class _Known(pickle.Pickler):
    """Refuses what was not tried; plain values do not come by here."""

    def reducer_override(self, thing: Any) -> Any:
        if _named(thing) not in _READABLE:
            raise _Unknown
        return NotImplemented


def pickled(value: Any, key: str = "the value") -> bytes:
    """A value that is no tensor; bytes that follow it do not matter to `torch.load`.

    numpy's numbers become Python's.

    Raises:
        CannotRestore: `unpickled` could not read it; the text names the key.
    """
    try:
        return _dumped(value, _Known)
    except _Unknown:
        value = _without_numpy(value)
    try:
        return _dumped(value, _Known)
    except _Unknown:
        return _tried(value, key)


def unpickled(data: Any) -> Any:
    """The value again. Only what tensors and plain values are made of is unpickled."""
    return torch.load(io.BytesIO(data), weights_only=True)


def _dumped(value: Any, pickler: type[pickle.Pickler]) -> bytes:
    out = io.BytesIO()
    module = types.SimpleNamespace(__name__="pickle", Pickler=pickler, dump=pickle.dump)
    torch.save(value, out, pickle_module=module, _use_new_zipfile_serialization=False)
    return out.getvalue()


def _named(thing: Any) -> Any:
    return thing if isinstance(thing, type | types.FunctionType | types.BuiltinFunctionType) else type(thing)


def _tried(value: Any, key: str) -> bytes:
    met: set[Any] = set()

    class Noting(pickle.Pickler):
        def reducer_override(self, thing: Any) -> Any:
            met.add(_named(thing))
            return NotImplemented

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about classes whose source is not found
            data = _dumped(value, Noting)
            unpickled(data)
    except Exception:  # whatever a value's own methods raise, too
        culprit = _culprit(value)
        what = f"{key} {'is' if culprit is value else 'holds'} a {type(culprit).__name__}"
        if hasattr(culprit, "state_dict"):
            raise CannotRestore(
                f"{what}: what has a state_dict is saved in the state itself or in dictionaries there, under a name"
            ) from None
        raise CannotRestore(
            f"{what}, which no restore could read: save numbers, strings, tensors, numpy arrays and lists, tuples, "
            "sets and dictionaries of them, or allow its class with torch.serialization.add_safe_globals"
        ) from None
    _READABLE.update(met)
    return data


def _culprit(value: Any) -> Any:
    """The innermost of what is wrong with it."""
    inside: list[Any] = []
    if isinstance(value, dict):
        inside = [*value, *value.values()]
    elif isinstance(value, list | tuple | set | frozenset):
        inside = list(value)
    for each in inside:
        try:
            pickled(each)
        except CannotRestore:
            return _culprit(each)
    return value


def _without_numpy(value: Any) -> Any:
    if is_number(value):
        return value.item()
    if type(value) in (list, tuple, set):
        return type(value)(_without_numpy(each) for each in value)
    if type(value) is dict:
        return {_without_numpy(key): _without_numpy(each) for key, each in value.items()}
    return value
