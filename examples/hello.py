"""Counts steps and reports them: a stand-in for training that starts in an instant.

It keeps its place in a file, so that after a restart it goes on where it was, as a training script does with a
checkpoint.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import tempfile
import time
from pathlib import Path

from resile.torch import report_step


def place_of_steps() -> Path:
    """The file that remembers the next step: with the job, so that it goes when the job does, or in `.cache`."""
    node = os.environ.get("RESILE_LOCAL_NODE")
    if node:
        return Path(node).parents[1] / "hello.steps"
    name = f"hello-{os.environ.get('TORCHELASTIC_RUN_ID', 'none')}-{os.environ.get('JOB_UID') or os.getppid()}"
    with contextlib.suppress(OSError):
        Path(".cache").mkdir(exist_ok=True)
    here = os.access(".cache", os.W_OK)  # not so in a container that may not write here
    return (Path(".cache") if here else Path(tempfile.gettempdir())) / name


def main() -> None:
    """Take the steps that are left."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100, help="how many steps to take in all")
    parser.add_argument("--seconds", type=float, default=0.1, help="how long one step takes")
    arguments = parser.parse_args()
    rank, world = os.environ.get("RANK", "0"), os.environ.get("WORLD_SIZE", "1")
    place = place_of_steps()
    first = int(place.read_text()) if place.exists() else 0
    print(f"rank {rank} of {world} starts at step {first}", flush=True)
    for step in range(first, arguments.steps):
        time.sleep(arguments.seconds)
        report_step(step + 1, arguments.steps)
        if rank == "0":
            draft = place.with_suffix(".new")
            draft.write_text(str(step + 1))
            os.replace(draft, place)
        if step % 20 == 0:
            print(f"step = {step}", flush=True)
    place.unlink(missing_ok=True)
    print(f"rank {rank} is done", flush=True)


if __name__ == "__main__":
    main()
