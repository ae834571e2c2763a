"""A training loop that goes on when a rank is lost: without a restart under `resile run`, as ever under torchrun.

Kill one of its processes while it runs: the others go on, and another one joins them with their state.
"""

from __future__ import annotations

import sys
import time

import torch
from torch.utils.data import DataLoader, TensorDataset

from resile.torch import Elastic, ElasticBatchSampler

STEP_SECONDS = 0.005
"""So that there is time to kill something."""


def main() -> None:
    """Learn a line from points that all ranks share; every point is used exactly once in an epoch."""
    torch.manual_seed(0)
    points = torch.randn(480, 4)
    dataset = TensorDataset(points, points.sum(dim=1, keepdim=True))
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sampler = ElasticBatchSampler(len(dataset), global_batch_size=24)
    loader = DataLoader(dataset, batch_sampler=sampler)
    elastic = Elastic(model, optimizer, sampler=sampler)
    for share, (inputs, targets) in elastic.epochs(5, loader):
        with elastic.step():
            loss = torch.nn.functional.mse_loss(model(inputs), targets)
            (loss * share.weight).backward()
        time.sleep(STEP_SECONDS)
    checksum = sum(parameter.double().sum().item() for parameter in model.parameters())
    words = f"rank = {elastic.rank} of {elastic.world}, steps = {elastic.completed}, loss = {loss.item():.4f}"
    sys.stdout.write(f"elastic {words}, checksum = {checksum:.6f}\n")


if __name__ == "__main__":
    main()
