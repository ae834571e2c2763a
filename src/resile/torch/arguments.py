"""What a script gave, looked at before anything is done with it: each mistake is one sentence that names the argument.

Only what would otherwise fail later and elsewhere, or quietly do nothing, is refused.
"""

from __future__ import annotations

import operator
import os
from collections.abc import Mapping
from typing import Any

import torch


def whole(name: str, value: Any, least: int = 0) -> int:
    """A whole number, as Python's; whatever can be an index is one, but for True and False.

    Raises:
        TypeError: it is none.
        ValueError: it is less than `least`.
    """
    wanted = f"{name}: must be a whole number of {least} or more, not"
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{wanted} {_shown(value)}") from None
    if isinstance(value, bool):
        raise TypeError(f"{wanted} {value}")
    if number < least:
        raise ValueError(f"{wanted} {number}")
    return number


def check_directory(directory: Any, store_every: int) -> None:
    """See that it can name a storage, and that there is one if something is to go there.

    Raises:
        TypeError: it is neither a path nor a URL.
        ValueError: it is empty, or missing.
    """
    if directory is None:
        if store_every:
            raise ValueError(f"store_every: {store_every} needs a directory for what is stored; give one, or 0")
    elif not isinstance(directory, str | os.PathLike):
        raise TypeError(f"directory: must be a path or a URL, or None for memory only, not {_shown(directory)}")
    elif not str(directory):
        raise ValueError("directory: must not be empty; None is memory only, and '.' is the working directory")


def check_state(state: Any) -> None:
    """See that what is saved and restored has names.

    Raises:
        TypeError: it has none.
    """
    if not isinstance(state, Mapping):
        raise TypeError(f'state: must be a dictionary, such as {{"model": model}}, not {_shown(state)}')


def check_model(model: Any, optimizer: Any) -> None:
    """See that the two are what they are called.

    Raises:
        TypeError: one is not, maybe because they were given in the other order.
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"model: must be a torch.nn.Module, not {_shown(model)}; the optimizer comes after it")
    if not hasattr(optimizer, "param_groups"):
        raise TypeError(f"optimizer: must be an optimizer of torch, not {_shown(optimizer)}")


def check_checkpointer(checkpointer: Any, every: Any) -> None:
    """See that there is one if checkpoints are wished for.

    Raises:
        TypeError: it is something else.
        ValueError: it is missing.
    """
    if checkpointer is None:
        if every != 1:
            raise ValueError("every: steps between two checkpoints need a checkpointer to save them; give one")
        return
    from resile.torch.checkpointer import Checkpointer  # whoever has one has imported it

    if not isinstance(checkpointer, Checkpointer):
        raise TypeError(
            f'checkpointer: must be a Checkpointer, such as Checkpointer("checkpoints"), not {_shown(checkpointer)}'
        )


def _shown(value: Any) -> str:
    """Plain values as they are; a model would fill the screen."""
    return repr(value) if isinstance(value, int | float | str | bytes | os.PathLike) else f"a {type(value).__name__}"
