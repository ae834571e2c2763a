"""Train a CNN on a tree of digit images under plain DDP, and go on where it stopped after any interruption.

It runs unchanged under `python`, `torchrun`, `resile run` and `dlrover-run`. Of resile it uses two small things: the
sampler, so that the rest of an epoch is dealt again when the number of processes changes, and `report_step`.

Model, optimizer, epoch and position are one state. The first process of each node saves it; at the start everybody
takes the newest state that anybody has, so a replaced node goes on with the rest even where no disk is shared.
"""

from __future__ import annotations

import argparse
import gc
import io
import logging
import os
import pickle
import shutil
import tempfile
import time
import zlib
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from digits import Net, load_images, say
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from resile.torch import ElasticBatchSampler, report_step

KEEP = 2
"""Checkpoints kept: the newest, and the one before it in case the newest is damaged."""


# checkpoints ----------------------------------------------------------------------------------------------------------


def save_checkpoint(folder: Path, step: int, state: dict[str, Any]) -> None:
    """Write a checkpoint that exists completely or not at all, then drop all but the newest ones.

    The name carries the checksum: `torch.load` alone does not notice a flipped bit.
    """
    buffer = io.BytesIO()
    torch.save(state, buffer)
    data = buffer.getvalue()
    folder.mkdir(parents=True, exist_ok=True)
    handle, unfinished = tempfile.mkstemp(prefix=".unfinished-", dir=folder)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, folder / f"step-{step:010d}-{zlib.crc32(data):08x}.pt")
    except OSError:
        Path(unfinished).unlink(missing_ok=True)
        raise
    directory = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
    steps = sorted({file.name[5:15] for file in folder.glob("step-*.pt")})
    for file in folder.glob("step-*.pt"):
        if file.name[5:15] in steps[:-KEEP]:
            file.unlink(missing_ok=True)


def newest_checkpoint(folder: Path) -> tuple[int, bytes]:
    """Step and bytes of the newest undamaged checkpoint, (-1, b"") if there is none; says which ones are damaged."""
    for file in sorted(folder.glob("step-*.pt"), reverse=True):
        try:
            data = file.read_bytes()
            step, checksum = int(file.stem.split("-")[1]), int(file.stem.split("-")[2], 16)
            if zlib.crc32(data) != checksum:
                raise ValueError("checksum")
            torch.load(io.BytesIO(data), weights_only=True)
        except (OSError, ValueError, IndexError, RuntimeError, EOFError, pickle.UnpicklingError):
            say(f"checkpoint {file} is damaged; trying the one before it")
            continue
        return step, data
    return -1, b""


def agreed_checkpoint(folder: Path | None, local_rank: int, device: torch.device) -> dict[str, Any] | None:
    """The newest state that any node has, the same one on every rank, or None for a fresh start.

    The first process of each node reads; the holder of the newest sends its bytes to all.
    """
    step, data = newest_checkpoint(folder) if folder and local_rank == 0 else (-1, b"")
    mine = torch.tensor([step, len(data)], device=device)
    offers = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(offers, mine)
    holder = max(range(len(offers)), key=lambda rank: (int(offers[rank][0]), -rank))
    step, length = (int(number) for number in offers[holder])
    if step < 0:
        return None
    if dist.get_rank() == holder:
        content = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device)
    else:
        content = torch.empty(length, dtype=torch.uint8, device=device)
    dist.broadcast(content, holder)
    state: dict[str, Any] = torch.load(io.BytesIO(content.cpu().numpy().tobytes()), weights_only=True)
    return state


# training -------------------------------------------------------------------------------------------------------------


def accuracy_of(model: nn.Module, data: TensorDataset, device: torch.device) -> float:
    """The share of `data` that the model gets right; every rank looks at its part."""
    images, labels = (tensor[dist.get_rank() :: dist.get_world_size()] for tensor in data.tensors)
    right = torch.zeros(1, device=device)
    with torch.no_grad():
        for some, answers in zip(images.split(256), labels.split(256), strict=True):
            right += (model(some.to(device)).argmax(1) == answers.to(device)).sum()
    dist.all_reduce(right)
    return right.item() / len(data)


def train(options: argparse.Namespace, folder: Path | None, local_rank: int, device: torch.device) -> None:
    """Train to the end, from wherever the newest checkpoint left off."""
    rank, world = dist.get_rank(), dist.get_world_size()
    training = load_images("--training_data", options.training_data)
    validation = load_images("--validation_data", options.validation_data)
    batch = {"global_batch_size": options.global_batch_size} if options.global_batch_size else None
    batch = batch or {"batch_size": options.batch_size}
    sampler = ElasticBatchSampler(len(training), rank=rank, world=world, seed=options.seed, **batch)
    loader = DataLoader(training, batch_sampler=sampler)
    torch.manual_seed(options.seed)
    model = Net().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=options.learning_rate, momentum=0.9)
    step = 0
    if state := agreed_checkpoint(folder, local_rank, device):
        try:
            sampler.load_state_dict(state["sampler"])
        except ValueError as error:
            raise SystemExit(f"--checkpoint_dir {folder} belongs to another training: {error}") from None
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        optimizer.param_groups[0]["lr"] = options.learning_rate  # what the command line says now, not what it said then
        step = state["step"]
    ddp = DistributedDataParallel(model)

    def save() -> None:
        if folder and local_rank == 0:
            parts = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            save_checkpoint(folder, step, {**parts, "sampler": sampler.state_dict(), "step": step})

    started_at = step
    accuracy = None
    for epoch in range(sampler.epoch, options.num_epochs):
        sampler.set_epoch(epoch)
        steps_of_an_epoch = -(-len(training) // sampler.step_size)
        total = step + len(sampler) + (options.num_epochs - epoch - 1) * steps_of_an_epoch
        for share, (images, labels) in zip(sampler.shares(), loader, strict=True):
            if options.max_steps and step >= options.max_steps:
                save()
                if rank == 0:
                    say(f"training stopped by --max_steps: epochs = {epoch}, steps = {step}")
                return
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(ddp(images.to(device)), labels.to(device))
            (loss * share.weight).backward()
            optimizer.step()
            if step % options.log_every == 0 or step == started_at:
                say(f"loss = {loss.item()}, step = {step}")
            step += 1
            sampler.advance(share.total)
            report_step(step, total)
            if step % options.save_every == 0:
                save()
            if options.step_delay:
                time.sleep(options.step_delay)
        save()
        accuracy = accuracy_of(model, validation, device)
        if rank == 0:
            say(f"accuracy = {accuracy:.4f}, epoch = {epoch}")
    if accuracy is None:  # it had finished before
        accuracy = accuracy_of(model, validation, device)
    if rank == 0:
        say(f"training finished: epochs = {options.num_epochs}, steps = {step}, accuracy = {accuracy:.4f}")


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line, checked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--training_data", type=Path, required=True, help="a folder with <digit>/<name>.png")
    parser.add_argument("--validation_data", type=Path, required=True, help="such a folder, for the accuracy")
    parser.add_argument("--num_epochs", type=int, default=5)
    parser.add_argument("--batch_size", type=int, default=32, help="samples of one process in a step (32)")
    parser.add_argument("--global_batch_size", type=int, default=0, help="instead: samples of all processes in a step")
    parser.add_argument("--learning_rate", type=float, default=0.05)
    parser.add_argument("--seed", type=int, default=0, help="of the first weights and the order of the samples")
    parser.add_argument(
        "--checkpoint_dir",
        type=Path,
        help="where checkpoints stay; by default a temporary folder that lives as long as the launcher's run, and none "
        "under plain python",
    )
    parser.add_argument("--save_every", type=int, default=20, help="steps between checkpoints (20)")
    parser.add_argument("--log_every", type=int, default=20, help="steps between log lines (20)")
    parser.add_argument("--max_steps", type=int, default=0, help="stop there and save, to be continued (0: never)")
    parser.add_argument("--step_delay", type=float, default=0.0, help="seconds to sleep after each step, for demos")
    options = parser.parse_args(arguments)
    for name in ("num_epochs", "batch_size", "save_every", "log_every"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} must be at least 1")
    for name in ("global_batch_size", "max_steps", "step_delay"):
        if getattr(options, name) < 0:
            parser.error(f"--{name} must not be negative")
    return options


def checkpoint_folder(options: argparse.Namespace) -> tuple[Path | None, bool]:
    """Where to keep checkpoints, and whether it is a temporary place."""
    if options.checkpoint_dir:
        return options.checkpoint_dir, False
    run = os.environ.get("TORCHELASTIC_RUN_ID", "none").replace("/", "_")
    if run == "none":
        return None, False
    return Path(tempfile.gettempdir()) / f"cnn_train-{os.getuid()}-{run}", True


def main() -> None:
    """Join the process group that the launcher describes, or be alone, and train."""
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
    backend = "nccl" if device.type == "cuda" else "gloo"
    if "RANK" in os.environ:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    rank = dist.get_rank()
    say(f"rank {rank} is initialized local_rank = {local_rank}\nrank = {rank}, pid = {os.getpid()}")
    folder, temporary = checkpoint_folder(options)
    train(options, folder, local_rank, device)
    if folder and temporary:
        dist.barrier()
        shutil.rmtree(folder, ignore_errors=True)
    dist.destroy_process_group()
    # What is left of the model still refers to the group. Let go of it now: a thread of gloo that lives on while the
    # interpreter ends can abort the process after all its work is done.
    gc.collect()


if __name__ == "__main__":
    main()
