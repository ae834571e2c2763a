"""Estimates what an optimizer adds to a state at its first step, to reserve memory for it before the first save."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from resile.checkpoint.buffer import PAGE
from resile.torch._checkpoint.flatten import local, parts

_EXTRA_STATE = {"SGD": 0, "Adagrad": 0, "RMSprop": 1, "ASGD": 2, "Rprop": 2}
"""Tensors of a parameter's size that an optimizer adds at its first step, where that is not two (as with Adam)."""


def estimate_growth(state: Mapping[str, Any], *, leads: bool) -> int:
    """Estimated bytes that optimizers will add to this rank's part of the state.

    Args:
        state: the state to be saved.
        leads: True if this rank keeps what all ranks of the node have alike.
    """
    total = 0
    for _, part in parts(state):
        if isinstance(part, torch.optim.Optimizer):
            times = _EXTRA_STATE.get(type(part).__name__, 2)
            for group in part.param_groups:
                extra = times + sum(bool(group.get(option)) for option in ("momentum", "amsgrad", "centered"))
                for parameter in group["params"]:
                    mine = leads or isinstance(parameter, DTensor)
                    if mine and parameter.requires_grad and parameter not in part.state:
                        own = local(parameter)
                        total += extra * (own.numel() * own.element_size() + 2 * PAGE)
    return total
