"""A small network trained by Lightning's `Trainer`; kill one of its processes, and it goes on after its last step."""

from __future__ import annotations

import argparse
import hashlib
import logging
import os
import sys
import time
from typing import Any

import lightning.pytorch as lightning
import torch
from torch.utils.data import DataLoader, TensorDataset

from resile.torch.lightning import ResileCallback, ResileEnvironment


class Sums(lightning.LightningModule):
    """Learns to add up numbers."""

    def __init__(self, pause: float) -> None:
        super().__init__()
        self.pause = pause
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Dropout(0.1), torch.nn.Linear(32, 1)
        )

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        """The loss, after a moment in which something may be killed."""
        time.sleep(self.pause)
        numbers, sums = batch
        return torch.nn.functional.mse_loss(self.layers(numbers), sums)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Say how far it got."""
        if self.trainer.is_global_zero and self.global_step % 5 == 0:
            sys.stdout.write(f"step = {self.global_step}, loss = {outputs['loss'].item():.4f}\n")
            sys.stdout.flush()

    def configure_optimizers(self) -> Any:
        """Adam, with a rate that falls."""
        optimizer = torch.optim.Adam(self.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=10, gamma=0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def main() -> None:
    """Train, and say what came out: every rank has the same model."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--pause", type=float, default=0.0, help="seconds before each step")
    parser.add_argument("--storage", help="directory for checkpoints; without it they are kept in memory alone")
    options = parser.parse_args()
    sys.stdout.write(f"rank = {os.environ.get('RANK', '0')}, pid = {os.getpid()}\n")
    sys.stdout.flush()
    logging.basicConfig(format="%(message)s")
    logging.getLogger("resile").setLevel(logging.INFO)
    torch.set_num_threads(1)
    lightning.seed_everything(0, verbose=False)
    numbers = torch.randn(320, 8)
    loader = DataLoader(TensorDataset(numbers, numbers.sum(dim=1, keepdim=True)), batch_size=8, shuffle=True)
    environment = ResileEnvironment()
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=environment.devices,
        num_nodes=environment.num_nodes,
        plugins=[environment],
        callbacks=[ResileCallback(options.storage, save_every=1)],
        max_epochs=options.epochs,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = Sums(options.pause)
    trainer.fit(module, loader)
    weights = b"".join(weight.numpy().tobytes() for weight in module.state_dict().values())
    digest = hashlib.sha256(weights).hexdigest()[:16]
    where = f"rank = {trainer.global_rank} of {trainer.world_size}"
    sys.stdout.write(f"{where}, steps = {trainer.global_step}, weights = {digest}\n")


if __name__ == "__main__":
    main()
