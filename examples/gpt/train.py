"""Train a small character GPT on Python's own standard library, and lose any process on the way.

It runs unchanged under `python`, `torchrun` and `resile run`. A step has the same global batch whatever the number of
processes; each takes its part in passes of at most `--micro-batch` windows. Under `resile run` the loss of a process
costs the step that was under way: the others go on in memory, and its replacement gets their state. Checkpoints are
for the day on which all of them are lost.
"""

from __future__ import annotations

import argparse
import hashlib
import logging
import os
import sys
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from model import GPT, encode
from torch.utils.data import Dataset

from resile.torch import Checkpointer, Elastic, ElasticLoader


def say(line: str) -> None:
    """Print in one write, so that the lines of two processes do not mix."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def sources() -> Iterator[str]:
    """The modules of the standard library, in the order of their names."""
    for file in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        yield file.read_text(encoding="utf-8", errors="ignore")


def library_text(characters: int) -> torch.Tensor:
    """The first so many characters of it; every machine must have the same Python to have the same text.

    Raises:
        SystemExit: it is not there.
    """
    parts: list[torch.Tensor] = []
    for text in sources():
        parts.append(encode(text))
        characters -= len(parts[-1])
        if characters <= 0:
            return torch.cat(parts)[: characters or None]
    raise SystemExit(
        "--characters: the standard library of this Python is shorter than that, or is not there as source"
    )


class Windows(Dataset):
    """A text in pieces of `context` characters, each with the one that follows it."""

    def __init__(self, text: torch.Tensor, context: int) -> None:
        self._text = text
        self._context = context

    def __len__(self) -> int:
        return (len(self._text) - 1) // self._context

    def __getitem__(self, number: int) -> torch.Tensor:
        start = number * self._context
        return self._text[start : start + self._context + 1]


def weights_of(model: torch.nn.Module) -> str:
    """A word for all weights, bit by bit."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(name.encode() + tensor.cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def parse() -> argparse.Namespace:
    """The command line, checked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--epochs", type=int, default=2)
    add("--characters", type=int, default=1_000_000, help="of the standard library to learn from (1,000,000)")
    add("--context", type=int, default=128, help="characters that the model looks back (128)")
    add("--width", type=int, default=128, help="of a layer (128)")
    add("--layers", type=int, default=4)
    add("--heads", type=int, default=4)
    add("--batch", type=int, default=64, help="windows in a step, of all processes together (64)")
    add("--micro-batch", type=int, default=32, help="windows that one process takes at a time (32)")
    add("--workers", type=int, default=0, help="processes that load data, for each training process (0)")
    add("--learning-rate", type=float, default=1e-3)
    add("--seed", type=int, default=0, help="of the first weights, the order and what is written in the end")
    add("--checkpoints", type=Path, help="a folder to go on from when everything was lost (none)")
    add("--save-every", type=int, default=10, help="steps between two checkpoints in memory (10)")
    add("--store-every", type=int, default=100, help="steps between two that go to the folder, if there is one (100)")
    add("--log-every", type=int, default=20, help="steps between two lines (20)")
    add("--write", type=int, default=300, help="characters to write in the end (300)")
    add("--step-delay", type=float, default=0.0, help="seconds to sleep in each step, to have time to kill something")
    options = parser.parse_args()
    for name in ("epochs", "context", "width", "layers", "heads", "batch", "micro_batch", "log_every"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1")
    if not 1 <= options.save_every <= options.store_every or options.store_every % options.save_every:
        parser.error("--store-every must be a multiple of --save-every")
    if options.width % options.heads:
        parser.error("--width must be a multiple of --heads")
    if options.characters <= options.context:
        parser.error("--characters must be more than --context")
    return options


def main() -> None:
    """Train to the end, and write a few lines."""
    options = parse()
    logging.basicConfig(level=logging.INFO, format="[%(asctime)s] [%(levelname)s] %(message)s")
    say(f"rank = {os.environ.get('RANK', '0')}, pid = {os.getpid()}")
    torch.manual_seed(options.seed)
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    shape = {"context": options.context, "width": options.width, "layers": options.layers, "heads": options.heads}
    model = GPT(**shape).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.learning_rate)
    loader = ElasticLoader(
        Windows(library_text(options.characters), options.context),
        global_batch_size=options.batch,
        micro_batch_size=options.micro_batch,
        seed=options.seed,
        num_workers=options.workers,
    )
    checkpointer = Checkpointer(options.checkpoints, store_every=options.store_every if options.checkpoints else 0)
    elastic = Elastic(
        model,
        optimizer,
        sampler=loader,
        before_step=lambda: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0),
        checkpointer=checkpointer,
        every=options.save_every,
    )
    mean = 0.0
    for step in elastic.epochs(options.epochs, loader):
        began = time.perf_counter()
        with elastic.step():
            mean = 0.0
            for share, windows in step:
                loss = model.loss(windows.to(device))
                (loss * share.weight).backward()
                mean += loss.item() * share.weight
            time.sleep(options.step_delay)
        if elastic.stepped and (elastic.completed - 1) % options.log_every == 0:
            took = time.perf_counter() - began
            where = f"step = {elastic.completed}, epoch = {loader.epoch}, rank = {elastic.rank} of {elastic.world}"
            say(f"loss = {mean:.4f}, {where}, passes = {len(step)}, seconds = {took:.3f}")
    if elastic.rank == 0:
        say(model.write("def ", options.write, seed=options.seed))
    words = f"rank = {elastic.rank} of {elastic.world}, steps = {elastic.completed}, loss = {mean:.4f}"
    say(f"training finished: {words}, weights = {weights_of(model)}")


if __name__ == "__main__":
    main()
