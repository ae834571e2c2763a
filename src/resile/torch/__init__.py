"""What a training script imports: the sampler that survives resizing, and the report of its progress.

Importing this package costs some 40 ms and does not import torch, so a launcher or a data process may do so.
Everything here works the same under plain `torchrun` or `python`, where there is no agent to talk to.
"""

from resile.torch.progress import report_step
from resile.torch.sampler import ElasticBatchSampler, Share

__all__ = ["ElasticBatchSampler", "Share", "report_step"]
