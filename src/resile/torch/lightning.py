"""Training with Lightning's `Trainer` that loses no step when a process is lost.

    environment = ResileEnvironment()
    trainer = Trainer(
        devices=environment.devices,
        num_nodes=environment.num_nodes,
        plugins=[environment],
        callbacks=[ResileCallback("checkpoints", save_every=10)],
    )
    trainer.fit(module)

Under `resile run` every tenth step is kept in the agent's memory. A lost rank restarts all processes, because Lightning
cannot exchange its group. They go on after the newest step, at the next sample, with the same random numbers. Under
torchrun and python the same script goes on from storage.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Unpack

from resile.torch._support.error_file import is_peer_loss, print_briefly
from resile.torch._trainers.continuation import Continuation, Saving
from resile.torch._trainers.resumable_loader import ResumableLoader
from resile.torch.progress import report_step

try:
    from lightning.fabric.plugins.environments import TorchElasticEnvironment
    from lightning.pytorch import Callback
    from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, SingleDeviceStrategy
    from lightning.pytorch.utilities import CombinedLoader
except ImportError as error:
    raise ImportError(f"resile.torch.lightning needs lightning: pip install 'resile[lightning]' ({error})") from error

__all__ = ["ResileCallback", "ResileEnvironment"]

LOADERS = "combined_loader"
"""The key under which Lightning's loop keeps the states of the loaders."""


class ResileEnvironment(TorchElasticEnvironment):  # type: ignore[misc]
    """Ranks and addresses as `resile run` or torchrun gave them to this process; one rank under plain python.

    It starts no processes. Give its `devices` and `num_nodes` to the `Trainer`.
    """

    @property
    def devices(self) -> int:
        """Training processes on this node."""
        return _variable("LOCAL_WORLD_SIZE", 1)

    @property
    def num_nodes(self) -> int:
        """Nodes of this round."""
        return self.world_size() // self.devices

    @property
    def main_address(self) -> str:
        return os.environ.get("MASTER_ADDR", "127.0.0.1")

    @property
    def main_port(self) -> int:
        return _variable("MASTER_PORT", 0)

    def world_size(self) -> int:
        return _variable("WORLD_SIZE", 1)

    def global_rank(self) -> int:
        return _variable("RANK", 0)

    def local_rank(self) -> int:
        return _variable("LOCAL_RANK", 0)

    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        """Raise ValueError if the `Trainer` has other numbers of devices and nodes than the launcher."""
        if (num_devices, num_nodes) != (self.devices, self.num_nodes):
            raise ValueError(
                f"there are {self.devices} training processes on each of {self.num_nodes} nodes: give the Trainer "
                f"devices={self.devices}, num_nodes={self.num_nodes}, not devices={num_devices}, num_nodes={num_nodes}"
            )


class ResileCallback(Callback):  # type: ignore[misc]
    """Reports steps to the agent, saves the whole state every `save_every` steps, and restores the newest save."""

    def __init__(self, directory: str | Path | None = None, **saving: Unpack[Saving]) -> None:
        """Set the options. `fit` restores the newest step.

        Args:
            directory: the storage, the same for all ranks; None for memory only.
            saving: `save_every`, `store_every`, `keep_last` and `overlap`, as in `Continuation`.
        """
        self._continuation = Continuation(directory, **saving)
        self._parts: dict[str, Any] = {}
        self._loops: dict[str, Any] | None = None
        """The state of Lightning's loop after a step that is saved when the next one begins; None if no step is due."""
        self._step = 0
        self._total = 0
        self._positions: list[Any] = []
        """Restored positions of loaders that Lightning has not made yet."""

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """When `fit` begins, make its loaders resumable. Raises ValueError for an unsupported strategy or world."""
        if stage != "fit":
            return
        strategy = trainer.strategy
        if not isinstance(strategy, SingleDeviceStrategy | DDPStrategy) or isinstance(strategy, DeepSpeedStrategy):
            raise ValueError(
                f"ResileCallback saves models that are the same on every rank, not those of {type(strategy).__name__}"
            )
        if trainer.world_size != (world := ResileEnvironment().world_size()):
            raise ValueError(f"there are {world} training processes, but the Trainer works with {trainer.world_size}")
        strategy.process_dataloader = self._resumable(trainer, strategy.process_dataloader)

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Load the newest step, if there is one. Raises ValueError if `fit` was given a `ckpt_path`."""
        if trainer.ckpt_path:
            raise ValueError(
                "fit(ckpt_path=...) would undo what ResileCallback restores: load weights into the module before fit"
            )
        self._parts = {
            "model": pl_module,
            **{f"optimizer_{n}": optimizer for n, optimizer in enumerate(trainer.optimizers)},
            **{f"scheduler_{n}": config.scheduler for n, config in enumerate(trainer.lr_scheduler_configs)},
            "extra": {},
        }
        self._loops, self._step, self._positions = None, 0, []
        restored = self._continuation.restore(self._parts)
        if restored is None:
            return
        self._step = restored.step
        common, own = restored.common, restored.own
        checkpoint = _checkpoint(trainer, restored.step) | self._parts["extra"]
        pl_module.on_load_checkpoint(checkpoint)
        for callback in trainer.callbacks:
            callback.on_load_checkpoint(trainer, pl_module, checkpoint)
            if callback.state_key in common["callbacks"]:
                callback.load_state_dict(common["callbacks"][callback.state_key])
        if common["precision"]:
            trainer.precision_plugin.load_state_dict(common["precision"])
        if trainer.datamodule is not None and common["datamodule"]:
            trainer.datamodule.load_state_dict(common["datamodule"])
        trainer.fit_loop.load_state_dict(common["loops"])
        if common["epoch_begins"]:  # Lightning would take it for the end of the previous epoch
            trainer.fit_loop.epoch_loop.restarting = False
        if trainer.train_dataloader is None:
            self._positions = own["loaders"]
        elif own["loaders"]:  # the module has asked for the number of steps, so the loaders exist already
            for loader, state in zip(_stateful_loaders(trainer), own["loaders"], strict=True):
                loader.load_state_dict(state)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Remember the total number of optimizer steps, which Lightning knows by now; 0 without a limit."""
        steps = trainer.estimated_stepping_batches
        self._total = int(steps) if steps > 0 and not math.isinf(steps) else 0

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Save the previous step if it is due. By now it is logged and validated."""
        self._continuation.begin_step()
        if self._loops is not None:
            states = self._loops["state_dict"].get(LOADERS, [])
            loops = self._loops if batch_idx else _without_the_first_batch(trainer.fit_loop.state_dict())
            self._save(trainer, loops, _positions(trainer, states, batch_idx), epoch_begins=not batch_idx)
            self._loops = None

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self._continuation.before_update()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Report a step to the agent. A batch whose gradients are only accumulated is no step."""
        if trainer.global_step != self._step:
            self._step = trainer.global_step
            report_step(self._step, self._total)
            if self._continuation.is_due(self._step):
                self._loops = trainer.fit_loop.state_dict()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        if self._step:
            self._save(trainer, trainer.fit_loop.state_dict(), [], last=True)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Close the checkpointer.

        If the exception means that a peer was lost, its traceback will show only the script's own lines.
        """
        if is_peer_loss(exception):
            print_briefly(exception)
        self._continuation.close()

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self._continuation.close()

    def _resumable(self, trainer: Any, process: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def processed(loader: Any) -> Any:
            done = process(loader)
            if not trainer.training:
                return done
            done = done if _is_stateful(done) else ResumableLoader(done)
            if self._positions:
                done.load_state_dict(self._positions.pop(0))
            return done

        return processed

    def _save(
        self, trainer: Any, loops: dict[str, Any], loaders: list[Any], *, epoch_begins: bool = False, last: bool = False
    ) -> None:
        loops["state_dict"].pop(LOADERS, None)
        self._parts["extra"] = _extra(trainer, self._step)
        common = {
            "loops": loops,
            "epoch_begins": epoch_begins,
            "callbacks": {each.state_key: state for each in trainer.callbacks if (state := each.state_dict())},
            "precision": trainer.precision_plugin.state_dict(),
            "datamodule": trainer.datamodule.state_dict() if trainer.datamodule is not None else {},
        }
        self._continuation.save(self._step, self._parts, common, {"loaders": loaders}, last=last)


def _variable(name: str, default: int) -> int:
    return int(os.environ.get(name, default))


def _checkpoint(trainer: Any, step: int) -> dict[str, Any]:
    """A checkpoint for the hooks of Lightning, with the entries that they may expect to find in it."""
    return {"epoch": trainer.current_epoch, "global_step": step, "state_dict": trainer.lightning_module.state_dict()}


def _extra(trainer: Any, step: int) -> dict[str, Any]:
    """Call all `on_save_checkpoint` hooks with a checkpoint, and return the entries that they add to it.

    The hooks are those of the callbacks and of the module. The `state_dict` is returned, too, if a hook changed it.
    """
    module = trainer.lightning_module
    checkpoint = _checkpoint(trainer, step)
    before = checkpoint | {"state_dict": dict(checkpoint["state_dict"])}
    for callback in trainer.callbacks:
        callback.on_save_checkpoint(trainer, module, checkpoint)
    module.on_save_checkpoint(checkpoint)
    extra = {name: value for name, value in checkpoint.items() if name not in before}
    if not _same_tensors(before["state_dict"], checkpoint["state_dict"]):
        extra["state_dict"] = checkpoint["state_dict"]
    return extra


def _same_tensors(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(one[name] is other[name] for name in one)


def _is_stateful(loader: Any) -> bool:
    return hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")


def _without_the_first_batch(loops: dict[str, Any]) -> dict[str, Any]:
    """Set `loops`, the state of Lightning's loops, back to before the first batch of an epoch was fetched.

    `loops` itself is changed and returned.
    """
    for count in ("total", "current"):
        batches = loops["epoch_loop.batch_progress"][count]
        batches["ready"] = batches["completed"]
    return loops


def _stateful_loaders(trainer: Any) -> list[Any]:
    return [loader for loader in CombinedLoader(trainer.train_dataloader).flattened if _is_stateful(loader)]


def _positions(trainer: Any, states: list[Any], batch_idx: int) -> list[Any]:
    loaders = _stateful_loaders(trainer)
    given = [loader.batches for loader in loaders if isinstance(loader, ResumableLoader)]
    ahead = max(given, default=0) - batch_idx
    return [
        loader.state_dict(unused=ahead) if isinstance(loader, ResumableLoader) else state
        for loader, state in zip(loaders, states, strict=True)
    ]
