"""Checks a script's arguments before they are used. Each error is one sentence that names the argument.

Only values that would otherwise fail later and elsewhere, or silently do nothing, are refused.
"""

from __future__ import annotations

import operator
import os
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any


def whole(name: str, value: Any, least: int = 0) -> int:
    """`value` as Python's int. Raises TypeError if it is no whole number, ValueError if it is less than `least`.

    Any value that can be an index is a whole number, except True and False. `name` begins the text of the error.
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
    """Raise TypeError or ValueError if `directory` cannot name a storage, or is None although steps will be stored."""
    if directory is None:
        if store_every:
            raise ValueError(f"store_every: {store_every} needs a directory for what is stored; give one, or 0")
    elif not isinstance(directory, str | os.PathLike):
        raise TypeError(f"directory: must be a path or a URL, or None for memory only, not {_shown(directory)}")
    elif not str(directory):
        raise ValueError("directory: must not be empty; None is memory only, and '.' is the working directory")


def check_state(state: Any) -> None:
    if not isinstance(state, Mapping):
        raise TypeError(f'state: must be a dictionary, such as {{"model": model}}, not {_shown(state)}')


def state_dicts_in(state: Mapping[str, Any]) -> list[str]:
    """The names of values that are a module's or an optimizer's `state_dict()` instead of the object itself."""
    return [
        name
        for name, value in state.items()
        if isinstance(value, Mapping) and (hasattr(value, "_metadata") or value.keys() == {"state", "param_groups"})
    ]


def check_model(model: Any, optimizer: Any) -> None:
    """Raise TypeError for a wrong type, ValueError if an optimizer of torch has no parameter of the model."""
    import torch  # here, because this module also serves code without torch

    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"model: must be a torch.nn.Module, not {_shown(model)}; the optimizer comes after it")
    if not hasattr(optimizer, "param_groups"):
        raise TypeError(f"optimizer: must be an optimizer of torch, not {_shown(optimizer)}")
    trained = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    torchs = type(optimizer).__module__.startswith("torch.optim")  # others may train copies and write them back
    if torchs and parameters and not any(id(parameter) in trained for parameter in parameters):
        raise ValueError("optimizer: has no parameter of this model, so nothing would be trained; make it for this one")


def check_parts(sampler: Any, scheduler: Any, state: Any, before_step: Any) -> None:
    if sampler is not None and not hasattr(sampler, "resize"):
        raise TypeError(f"sampler: must be an ElasticBatchSampler or an ElasticLoader, not {_shown(sampler)}")
    if scheduler is not None and not hasattr(scheduler, "step"):
        raise TypeError(f"scheduler: must have a step(), and {_shown(scheduler)} has none")
    if before_step is not None and not callable(before_step):
        raise TypeError(f"before_step: must be a function, not {_shown(before_step)}")
    if state is None:
        return
    check_state(state)
    for name, value in state.items():
        if not (hasattr(value, "state_dict") and hasattr(value, "load_state_dict")):
            raise TypeError(
                f"state: {name!r} must have state_dict() and load_state_dict(), and {_shown(value)} has not"
            )


def check_known(given: Mapping[str, Any], known: Mapping[str, Any], whose: str) -> None:
    """Raise TypeError if a name in `given` is not in `known`, the arguments of the class with the name `whose`.

    The error's text suggests a similar argument.
    """
    for name in given:
        if name not in known:
            near = get_close_matches(name, known, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise TypeError(f"{name}: {whose} has no such argument{hint}")


def check_checkpointer(checkpointer: Any, every: Any) -> None:
    if checkpointer is None:
        if every != 1:
            raise ValueError("every: steps between two checkpoints need a checkpointer to save them; give one")
        return
    from resile.torch.checkpointer import Checkpointer  # already imported by a script that has one

    if not isinstance(checkpointer, Checkpointer):
        raise TypeError(
            f'checkpointer: must be a Checkpointer, such as Checkpointer("checkpoints"), not {_shown(checkpointer)}'
        )


def _shown(value: Any) -> str:
    """`value` as the text of an error shows it: plain values in full, others by their type.

    A model in full would fill the screen.
    """
    return repr(value) if isinstance(value, int | float | str | bytes | os.PathLike) else f"a {type(value).__name__}"
