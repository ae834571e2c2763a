"""Turns values that are no tensors into bytes and back. A value that could not be read again is refused when saving.

Reading constructs plain values and tensors only (`weights_only=True`), so that a checkpoint runs no code. Pickle,
however, writes nearly anything. So a pickle that names other classes is read back once before it is saved. If that
succeeds, these classes are trusted from then on, and later values made of them are not read back.
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
"""Classes and functions that were named by pickles that could be read back."""


class CannotRestore(TypeError):
    """A value cannot be saved, because no restore could read it back. The text is one sentence that names the value."""


class _Unknown(Exception):
    """A pickle would name a class or function that is not in `_READABLE`."""


class _Known(pickle.Pickler):
    """Pickles only what `_READABLE` allows, and raises `_Unknown` for anything else.

    Plain values are always allowed, because `pickle` does not call `reducer_override` for them.
    """

    def reducer_override(self, thing: Any) -> Any:
        if _named(thing) not in _READABLE:
            raise _Unknown
        return NotImplemented


def pickled(value: Any, key: str = "the value") -> bytes:
    """Pickle a value that is no tensor. Numpy scalars become Python numbers. `unpickled` ignores padding at the end.

    Raises CannotRestore, with the key in its text, if `unpickled` could not read the value.
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
    """Unpickle a value, constructing only tensors and plain values."""
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
            warnings.simplefilter("ignore")  # about classes without source
            data = _dumped(value, Noting)
            unpickled(data)
    except Exception:  # a value's own methods may raise anything
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
