"""Train the CNN of `cnn_train.py` in the elastic loop: the loss of a process restarts nobody else.

It runs unchanged under `python`, `torchrun`, `resile run` and `dlrover-run`, and prints the same lines. All that
`cnn_train.py` does to go on after an interruption (a checkpoint, agreeing on the newest one, dealing the rest of the
epoch again) is in the three objects that `main` makes.
"""

from __future__ import annotations

import argparse
import logging
import os
import time
from pathlib import Path

import torch
from digits import Net, load_images, say
from torch import nn
from torch.utils.data import TensorDataset

from resile.torch import Checkpointer, Elastic, ElasticLoader


def accuracy_of(model: nn.Module, data: TensorDataset, device: torch.device) -> float:
    """The share of `data` that the model gets right; one process looks at all of it, so nobody is waited for."""
    images, labels = data.tensors
    with torch.no_grad():
        right = sum(
            int((model(some.to(device)).argmax(1) == answers.to(device)).sum())
            for some, answers in zip(images.split(256), labels.split(256), strict=True)
        )
    return right / len(data)


def parse() -> argparse.Namespace:
    """The command line, checked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--training_data", type=Path, required=True, help="a folder with <digit>/<name>.png")
    add("--validation_data", type=Path, required=True, help="such a folder, for the accuracy")
    add("--num_epochs", type=int, default=5)
    add("--global_batch_size", type=int, default=64, help="samples of all processes in a step (64)")
    add("--micro_batch_size", type=int, default=32, help="samples that a process takes at a time (32)")
    add("--num_workers", type=int, default=0, help="processes that load data, for each training process (0)")
    add("--learning_rate", type=float, default=0.05)
    add("--seed", type=int, default=0, help="of the first weights and the order of the samples")
    add("--checkpoint_dir", type=Path, help="where to go on from when all processes were lost (none)")
    add("--save_every", type=int, default=20, help="steps between checkpoints (20)")
    add("--log_every", type=int, default=20, help="steps between log lines (20)")
    add("--step_delay", type=float, default=0.0, help="seconds to sleep in each step, for demos")
    options = parser.parse_args()
    for name in ("num_epochs", "global_batch_size", "micro_batch_size", "save_every", "log_every"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} must be at least 1")
    for name in ("num_workers", "step_delay"):
        if getattr(options, name) < 0:
            parser.error(f"--{name} must not be negative")
    return options


def main() -> None:
    """Train to the end, from wherever training stands."""
    options = parse()
    logging.basicConfig(
        level=logging.INFO,
        format="[%(asctime)s] [%(levelname)s] [%(filename)s:%(lineno)d:%(funcName)s] %(message)s",
    )
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
    validation = load_images("--validation_data", options.validation_data)
    torch.manual_seed(options.seed)
    model = Net().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=options.learning_rate, momentum=0.9)
    loader = ElasticLoader(
        load_images("--training_data", options.training_data),
        global_batch_size=options.global_batch_size,
        micro_batch_size=options.micro_batch_size,
        seed=options.seed,
        num_workers=options.num_workers,
    )
    checkpointer = Checkpointer(options.checkpoint_dir, store_every=options.save_every if options.checkpoint_dir else 0)
    elastic = Elastic(model, optimizer, sampler=loader, checkpointer=checkpointer, every=options.save_every)
    elastic.meet()
    say(f"rank {elastic.rank} is initialized local_rank = {local_rank}\nrank = {elastic.rank}, pid = {os.getpid()}")
    for step in elastic.epochs(options.num_epochs, loader):
        mean = 0.0
        with elastic.step():
            for share, (images, labels) in step:
                loss = nn.functional.cross_entropy(model(images.to(device)), labels.to(device))
                (loss * share.weight).backward()
                mean += loss.item() * share.weight
            time.sleep(options.step_delay)
        if not elastic.stepped:
            continue
        if (elastic.completed - 1) % options.log_every == 0:
            say(f"loss = {mean}, step = {elastic.completed - 1}")
        if loader.completed == loader.size and elastic.rank == 0:
            say(f"accuracy = {accuracy_of(model, validation, device):.4f}, epoch = {loader.epoch}")
    if elastic.rank == 0:
        words = f"steps = {elastic.completed}, accuracy = {accuracy_of(model, validation, device):.4f}"
        say(f"training finished: epochs = {options.num_epochs}, {words}")


if __name__ == "__main__":
    main()
