"""Plain DDP as written for torchrun: it knows nothing of resile and must behave the same under any launcher.

Every rank learns the same line from its own points; at the end all ranks hold the same weights and say so.
"""

from __future__ import annotations

import gc
import os
import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def train(device: torch.device) -> str:
    """Train for a few steps and return a line with a checksum of the weights."""
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(4, 1).to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    points = torch.randn(32, 4, generator=torch.Generator().manual_seed(rank)).to(device)
    targets = points.sum(dim=1, keepdim=True)
    for _ in range(20):
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(points), targets)
        loss.backward()
        optimizer.step()
    checksum = sum(parameter.double().sum().item() for parameter in model.parameters())
    return f"ddp rank = {rank} of {world}, loss = {loss.item():.4f}, checksum = {checksum:.6f}\n"


def main() -> None:
    """Train in the launcher's process group and print the result, the same checksum on every rank."""
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
    sys.stdout.write(train(device))  # one write, so that the lines of two ranks do not mix
    dist.destroy_process_group()
    # What is left of the model still refers to the group. Let go of it now: a thread of gloo that lives on while the
    # interpreter ends can abort the process after all its work is done.
    gc.collect()


if __name__ == "__main__":
    main()
