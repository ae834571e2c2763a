"""A training loop that goes on when a rank is lost: without a restart under `resile run`, as ever under torchrun.

With `--pause 0.2` there is time to kill one of its processes (`kill -9` and the pid that it prints): the others go on,
and another one joins them with their state.
"""

from __future__ import annotations

import argparse
import os
import sys
import time

import torch
from torch.utils.data import DataLoader, TensorDataset

from resile.torch import Elastic, ElasticBatchSampler


def main() -> None:
    """Learn a line from points that all ranks share; every point is used exactly once in an epoch."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pause", type=float, default=0.005, help="seconds after each of 100 steps (0.005)")
    options = parser.parse_args()
    sys.stdout.write(f"rank = {os.environ.get('RANK', '0')}, pid = {os.getpid()}\n")
    sys.stdout.flush()
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
        if elastic.rank == 0 and elastic.stepped and elastic.completed % 10 == 0:
            sys.stdout.write(f"step = {elastic.completed}, world = {elastic.world}, loss = {loss.item():.4f}\n")
            sys.stdout.flush()
        time.sleep(options.pause)
    checksum = sum(parameter.double().sum().item() for parameter in model.parameters())
    words = f"rank = {elastic.rank} of {elastic.world}, steps = {elastic.completed}, loss = {loss.item():.4f}"
    sys.stdout.write(f"elastic {words}, checksum = {checksum:.6f}\n")


if __name__ == "__main__":
    main()
