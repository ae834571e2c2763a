"""Plain DDP as written for torchrun: it knows nothing of resile and must behave the same under any launcher.

Every rank learns the same line from its own points; at the end all ranks hold the same weights and say so.
"""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    """Train for a few steps and print a checksum of the weights, the same one on every rank."""
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    rank, world, local_rank = dist.get_rank(), dist.get_world_size(), int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
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
    # One write, so that the lines of two ranks do not mix.
    sys.stdout.write(f"ddp rank = {rank} of {world}, loss = {loss.item():.4f}, checksum = {checksum:.6f}\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
