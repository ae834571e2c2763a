"""The ranks of a real group, each in a process of its own, for tests that compare the tensors they find."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

from resile.api.ids import Rank, Round
from resile.protocol.worker_to_agent import WorkerAssignment
from resile.wire.env import AGENT_SOCKET, WORKER


def placed(rank: int, world: int, port: int) -> WorkerAssignment:
    """The place of a rank in round 1."""
    return WorkerAssignment(
        round=Round(1),
        rank=rank,
        world_size=world,
        local_rank=rank,
        local_world_size=world,
        group_rank=Rank(0),
        group_world_size=1,
        master_addr="127.0.0.1",
        master_port=port,
    )


def found_by(work: Callable[[int], Any], world: int, directory: Path) -> list[Any]:
    """What `work(rank)` returns on each of so many ranks; it passes through an empty directory."""
    multiprocessing.start_processes(_one, (work, world, str(directory)), world, start_method="forkserver")
    return [torch.load(directory / str(rank)) for rank in range(world)]


def _one(rank: int, work: Callable[[int], Any], world: int, directory: str) -> None:
    torch.set_num_threads(1)
    for name in (AGENT_SOCKET, WORKER):  # a fork server keeps what the test that started it had set
        os.environ.pop(name, None)
    dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=rank, world_size=world)
    torch.save(work(rank), f"{directory}/{rank}")
    dist.destroy_process_group()
