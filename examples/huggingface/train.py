"""A tiny language model trained by Hugging Face's `Trainer`. Kill one of its processes: it goes on after its last step.

Nothing is downloaded: the model begins with random weights, and the text is a module of Python's own library.
"""

from __future__ import annotations

import argparse
import hashlib
import logging
import os
import sys
import tempfile
import textwrap
import time
from pathlib import Path
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

from resile.torch.huggingface import ResileCallback

LENGTH = 32
"""Characters of one sample."""


class Pause(TrainerCallback):
    """Leaves time to kill something."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def on_step_end(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        """Wait a moment."""
        time.sleep(self.seconds)


def samples(count: int) -> list[dict[str, Any]]:
    """Pieces of text, a number for each character."""
    codes = torch.tensor(list(Path(textwrap.__file__).read_bytes()[: count * LENGTH])).view(count, LENGTH)
    return [{"input_ids": piece, "labels": piece} for piece in codes]


def main() -> None:
    """Train, and say what came out: every rank has the same model."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--pause", type=float, default=0.0, help="seconds after each step")
    parser.add_argument("--storage", help="directory for checkpoints; without it they are kept in memory alone")
    options = parser.parse_args()
    sys.stdout.write(f"rank = {os.environ.get('RANK', '0')}, pid = {os.getpid()}\n")
    sys.stdout.flush()
    logging.basicConfig(format="%(message)s")
    logging.getLogger("resile").setLevel(logging.INFO)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=256, n_positions=LENGTH, n_embd=32, n_layer=2, n_head=2, bos_token_id=None, eos_token_id=None
    )
    args = TrainingArguments(
        output_dir=str(Path(tempfile.gettempdir(), "resile-huggingface")),
        num_train_epochs=options.epochs,
        per_device_train_batch_size=8,
        learning_rate=1e-3,
        logging_steps=5,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        ddp_find_unused_parameters=False,
    )
    trainer = Trainer(
        model=GPT2LMHeadModel(config), args=args, train_dataset=samples(320), callbacks=[Pause(options.pause)]
    )
    ResileCallback(options.storage, save_every=1).train(trainer)
    weights = b"".join(weight.numpy().tobytes() for weight in trainer.model.state_dict().values())
    digest = hashlib.sha256(weights).hexdigest()[:16]
    steps = trainer.state.global_step
    sys.stdout.write(f"rank = {args.process_index} of {args.world_size}, steps = {steps}, weights = {digest}\n")


if __name__ == "__main__":
    main()
