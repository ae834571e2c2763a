"""What a training script imports: the elastic loop, checkpoints, data that survive resizing, reports of progress.

Importing this package costs some 40 ms and does not import torch, so a launcher or a data process may do so. Names that
need torch import it on first use. Everything works the same under plain `torchrun` or `python`, without an agent.
"""

import importlib
from typing import TYPE_CHECKING, Any

from resile.torch.progress import report_step
from resile.torch.sampler import ElasticBatchSampler, ElasticSampler, Share

if TYPE_CHECKING:
    from resile.torch.checkpointer import Checkpointer
    from resile.torch.elastic import Elastic
    from resile.torch.loader import ElasticLoader

__all__ = [
    "Checkpointer",
    "Elastic",
    "ElasticBatchSampler",
    "ElasticLoader",
    "ElasticSampler",
    "Share",
    "report_step",
]


_NEED_TORCH = {"Checkpointer": "checkpointer", "Elastic": "elastic", "ElasticLoader": "loader"}


def __getattr__(name: str) -> Any:
    if name not in _NEED_TORCH:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_NEED_TORCH[name]}"), name)
