"""What a training script imports: the elastic loop, checkpoints, data that survive resizing, reports of progress.

Importing this package costs some 40 ms and does not import torch, so a launcher or a data process may do so. Names that
need torch import it on first use. Everything works the same under plain `torchrun` or `python`, without an agent.
"""

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


def __getattr__(name: str) -> Any:
    """Import names that need torch on first use."""
    if name == "Checkpointer":
        from resile.torch.checkpointer import Checkpointer

        return Checkpointer
    if name == "Elastic":
        from resile.torch.elastic import Elastic

        return Elastic
    if name == "ElasticLoader":
        from resile.torch.loader import ElasticLoader

        return ElasticLoader
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
