"""What a training script imports: the elastic loop, the sampler that survives resizing, and the report of its progress.

Importing this package costs some 40 ms and does not import torch, so a launcher or a data process may do so; `Elastic`
imports it when it is asked for. Everything here works the same under plain `torchrun` or `python`, where there is no
agent to talk to.
"""

from typing import TYPE_CHECKING, Any

from resile.torch.progress import report_step
from resile.torch.sampler import ElasticBatchSampler, Share

if TYPE_CHECKING:
    from resile.torch.elastic import Elastic

__all__ = ["Elastic", "ElasticBatchSampler", "Share", "report_step"]


def __getattr__(name: str) -> Any:
    if name == "Elastic":
        from resile.torch.elastic import Elastic

        return Elastic
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
