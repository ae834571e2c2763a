"""A script that records its errors for the launcher (`@record`), as written for torchrun: it knows nothing of resile.

With `--fail-rank R` rank R raises, and the launcher is expected to name that error as the first one.
With `--once` it does so only in the first attempt, so a launcher that restarts (`--max-restarts`) succeeds.
"""

from __future__ import annotations

import argparse
import os
import sys

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record


@record
def main() -> None:
    """Add up the ranks together, unless told to fail."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--fail-rank", type=int, default=-1, help="the rank that raises (default: none)")
    parser.add_argument("--once", action="store_true", help="raise in the first attempt only")
    arguments = parser.parse_args()
    attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    rank = dist.get_rank()
    if rank == arguments.fail_rank and not (arguments.once and attempt > 0):
        raise RuntimeError(f"rank {rank} fails as it was told to, attempt = {attempt}")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else "cpu"
    total = torch.tensor(rank, device=device)
    dist.all_reduce(total)
    # One write, so that the lines of two ranks do not mix.
    sys.stdout.write(f"recorded rank = {rank}, sum of ranks = {total.item()}, attempt = {attempt}\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
