"""Training with Hugging Face's `Trainer` that loses no step when a process is lost.

    trainer = Trainer(model=model, args=args, train_dataset=dataset)
    ResileCallback("checkpoints", save_every=10).train(trainer)  # instead of trainer.train()

Under `resile run` every tenth step is kept in the agent's memory. A lost rank restarts all processes, because the
`Trainer` cannot exchange its group. They go on after the newest step, at the next sample, with the same random numbers.
Under torchrun and python the same script goes on from storage.

Why `trainer.train()` is not enough: the `Trainer` decides where in the data it begins before it calls any callback.
"""

from __future__ import annotations

import contextlib
import dataclasses
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Unpack

import msgspec

from resile.torch._support.error_file import is_peer_loss, print_briefly
from resile.torch._trainers.continuation import Continuation, Saving
from resile.torch.progress import report_step

try:
    from transformers import TrainerCallback
    from transformers.trainer_callback import ExportableState
except ImportError as error:
    raise ImportError(
        f"resile.torch.huggingface needs transformers and accelerate: pip install 'resile[huggingface]' ({error})"
    ) from error

__all__ = ["ResileCallback"]


class ResileCallback(TrainerCallback):  # type: ignore[misc]
    """Reports steps to the agent, saves the whole state every `save_every` steps, and restores the newest save."""

    def __init__(self, directory: str | Path | None = None, **saving: Unpack[Saving]) -> None:
        """Set the options. `train` restores the newest step.

        Args:
            directory: the storage, the same for all ranks, and not the Trainer's `output_dir`; None for memory only.
            saving: `save_every`, `store_every`, `keep_last` and `overlap`, as in `Continuation`.
        """
        self._continuation = Continuation(directory, **saving)
        self._trainer: Any = None
        """Set while `train` runs."""
        self._goes_on = False
        self._parts: dict[str, Any] = {}

    def train(self, trainer: Any, resume_from_checkpoint: str | bool | None = None, **options: Any) -> Any:
        """Call `trainer.train()` so that it begins at the newest step that all ranks can load. Returns its result.

        Args:
            trainer: the `Trainer`; this callback is added to it if necessary.
            resume_from_checkpoint: where to begin if there is no such step, as in `trainer.train`.
            options: for `trainer.train`.

        Raises:
            ValueError: the `Trainer` trains in a way that this callback cannot save; the text names it.
        """
        _check_that_ranks_are_alike(trainer)
        if self not in trainer.callback_handler.callbacks:
            trainer.add_callback(self)
        self._trainer = trainer
        try:
            found = self._continuation.peek()
            self._goes_on = found is not None
            if found is None:
                return trainer.train(resume_from_checkpoint=resume_from_checkpoint, **options)
            with tempfile.TemporaryDirectory(prefix="resile-") as folder, _no_weights_in_it(trainer):
                Path(folder, "trainer_state.json").write_text(found["trainer"], encoding="utf-8")
                return trainer.train(resume_from_checkpoint=folder, **options)
        except RuntimeError as error:
            if is_peer_loss(error):
                print_briefly(error)
            raise
        finally:
            self._trainer, self._parts = None, {}
            self._continuation.close()

    def on_train_begin(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        """Load the newest step, if there is one, into model, optimizer and scheduler, which exist by now."""
        if self._trainer is None:
            raise RuntimeError(
                "call ResileCallback.train(trainer) instead of trainer.train(): that would begin anew at every restart"
            )
        optimizer, scaler = objects["optimizer"], self._trainer.accelerator.scaler
        self._parts = {
            "model": objects["model"],
            "optimizer": getattr(optimizer, "optimizer", optimizer),  # without accelerate's wrapper
            "scheduler": objects["lr_scheduler"],
        } | ({"scaler": scaler} if scaler is not None else {})
        restored = self._continuation.restore(self._parts, state.global_step)
        if (restored is not None) != self._goes_on or (restored is not None and restored.step != state.global_step):
            raise RuntimeError(f"step {state.global_step} was there a moment ago and cannot be loaded any more")

    def on_step_begin(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        """Save the previous step if it is due. By now it is logged and evaluated."""
        self._continuation.begin_step()
        if self._continuation.is_due(state.global_step):
            self._save(state)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        self._continuation.before_update()

    def on_step_end(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        report_step(state.global_step, state.max_steps)

    def on_train_end(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        """Save the last step, unless `load_best_model_at_end` has replaced its model by that of the best step."""
        if not args.load_best_model_at_end and state.global_step:
            self._save(state, last=True)

    def _save(self, state: Any, last: bool = False) -> None:
        self._continuation.save(state.global_step, self._parts, {"trainer": self._described(state)}, {}, last=last)

    def _described(self, state: Any) -> str:
        callbacks: dict[str, list[Any]] = {}
        for callback in [*self._trainer.callback_handler.callbacks, self._trainer.control]:
            if isinstance(callback, ExportableState):
                callbacks.setdefault(type(callback).__name__, []).append(callback.state())
        fields = {field.name: getattr(state, field.name) for field in dataclasses.fields(state)}
        fields["stateful_callbacks"] = {name: one[0] if len(one) == 1 else one for name, one in callbacks.items()}
        return msgspec.json.encode(fields, enc_hook=float).decode()  # msgspec does not take numpy scalars for floats


def _check_that_ranks_are_alike(trainer: Any) -> None:
    kind = trainer.accelerator.distributed_type.value
    if kind != "NO" and not kind.startswith("MULTI_"):
        raise ValueError(f"ResileCallback saves models that are the same on every rank, not those of {kind}")
    if trainer.args.auto_find_batch_size:
        raise ValueError("ResileCallback needs one batch size for the whole training: auto_find_batch_size is on")


@contextlib.contextmanager
def _no_weights_in_it(trainer: Any) -> Iterator[None]:
    """Within this context, the `Trainer` does not look for weights in the folder from which it resumes.

    That folder has no weights, because `on_train_begin` loads them. `_load_from_checkpoint` is the only private name of
    the `Trainer` used here. If that name changes, the `Trainer` reports missing weights.
    """
    trainer._load_from_checkpoint = lambda *_, **__: None
    try:
        yield
    finally:
        del trainer._load_from_checkpoint
