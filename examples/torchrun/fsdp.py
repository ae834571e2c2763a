"""FSDP (`fully_shard`) on a device mesh as written for torchrun: it knows nothing of resile.

Each rank holds its part of every parameter; the parts add up to the same model whatever the launcher.
"""

from __future__ import annotations

import gc
import os
import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def train(kind: str) -> str:
    """Train a sharded model for a few steps and return a line with a checksum of the whole."""
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh(kind, (world,), mesh_dim_names=("shard",))
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1)).to(kind)
    whole = sum(parameter.numel() for parameter in model.parameters())
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    own = sum(parameter.to_local().numel() for parameter in model.parameters())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    points = torch.randn(32, 4, generator=torch.Generator().manual_seed(rank)).to(kind)
    targets = points.sum(dim=1, keepdim=True)
    for _ in range(10):
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(points), targets)
        loss.backward()
        optimizer.step()
    checksum = sum(parameter.full_tensor().double().sum().item() for parameter in model.parameters())
    parts = f"holds {own} of {whole}, loss = {loss.item():.4f}, checksum = {checksum:.6f}"
    return f"fsdp rank = {rank} of {world}, {parts}\n"


def main() -> None:
    """Train in the launcher's process group and print the result, the same checksum on every rank."""
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    if kind == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if kind == "cuda" else "gloo")
    sys.stdout.write(train(kind))  # one write, so that the lines of two ranks do not mix
    dist.destroy_process_group()
    # What is left of the model still refers to the group. Let go of it now: a thread of gloo that lives on while the
    # interpreter ends can abort the process after all its work is done.
    gc.collect()


if __name__ == "__main__":
    main()
