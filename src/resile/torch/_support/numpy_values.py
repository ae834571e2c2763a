"""numpy's numbers, arrays and sums, where there is numpy: torch can do without it, so it is not imported here."""

from __future__ import annotations

import sys
from typing import Any

import torch

PLAIN = frozenset((torch.Tensor, torch.nn.Parameter, bool, int, float, str, type(None)))
"""What most values are, and is not numpy's: a state is looked through at every save."""


def is_number(value: Any) -> bool:
    """Whether it is one of numpy's numbers (`np.float64(0.1)`): `item()` makes it Python's."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.generic)


def is_array(value: Any) -> bool:
    """Whether it is an array of something that torch has a type for."""
    numpy = sys.modules.get("numpy")
    if numpy is None or type(value) is not numpy.ndarray or value.dtype.kind not in "biufc":
        return False
    return bool(value.dtype.isnative) and value.dtype.itemsize <= (16 if value.dtype.kind == "c" else 8)


def tensor_of(array: Any) -> torch.Tensor:
    """An array as a tensor: the same memory, if torch can work in it."""
    return torch.from_numpy(array if array.flags.c_contiguous and array.flags.writeable else array.copy())


def sums_of_rows(words: torch.Tensor) -> list[int]:
    """The sum of each row of 64-bit words, with wrap-around, made by this thread alone.

    torch would spread it over threads of its own, and wait for all of them even if one finds no free core.
    """
    numpy = sys.modules.get("numpy")
    if numpy is None:  # one by one: few enough words for torch not to spread them
        return [int(row.sum()) for row in words]
    sums: list[int] = numpy.add.reduce(words.numpy(), axis=1).tolist()
    return sums
