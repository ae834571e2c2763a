"""Handles numpy's scalars, arrays and sums without importing numpy, because torch works without it."""

from __future__ import annotations

import sys
from typing import Any

import torch

PLAIN = frozenset((torch.Tensor, torch.nn.Parameter, bool, int, float, str, type(None)))
"""The most frequent types of values in a state. None is numpy's, so a save need not ask the functions below."""


def is_number(value: Any) -> bool:
    """True for a numpy scalar (`np.float64(0.1)`), which `item()` turns into a Python number."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.generic)


def is_array(value: Any) -> bool:
    """True for a numpy array whose element type torch has, too."""
    numpy = sys.modules.get("numpy")
    if numpy is None or type(value) is not numpy.ndarray or value.dtype.kind not in "biufc":
        return False
    return bool(value.dtype.isnative) and value.dtype.itemsize <= (16 if value.dtype.kind == "c" else 8)


def tensor_of(array: Any) -> torch.Tensor:
    """A numpy array as a tensor, in the same memory if torch can use it, otherwise as a copy."""
    return torch.from_numpy(array if array.flags.c_contiguous and array.flags.writeable else array.copy())


def sums_of_rows(words: torch.Tensor) -> list[int]:
    """The sum (modulo 2**64) of each row of 64-bit words, computed on this thread only.

    Torch would use its own threads and wait for all of them, even if one finds no free core.
    """
    numpy = sys.modules.get("numpy")
    if numpy is None:  # row by row, which is too little for torch to use threads
        return [int(row.sum()) for row in words]
    sums: list[int] = numpy.add.reduce(words.numpy(), axis=1).tolist()
    return sums
