"""The training of one model on one rank. A step changes it completely or not at all.

Model, optimizer, scheduler and the rest of the state change together, at the end of a step and in one function. Until
then a step changes only gradients and the model's buffers, and these changes can be undone.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any, Protocol

import torch

from resile.torch._loop import state_codec
from resile.torch._loop.averaging import Averager
from resile.torch._loop.group import Group
from resile.torch._loop.model_buffers import ModelBuffers
from resile.torch._support.arguments import check_model
from resile.torch._support.sharding import is_sharded

DIGEST = 64
"""How many values of each parameter go into a digest."""


class EarlyStep(Exception):
    """The script called `optimizer.step()` inside `with elastic.step()`, so the step would be taken twice.

    Not a RuntimeError, because the loop takes some RuntimeErrors for the loss of a peer.
    """


class Stateful(Protocol):
    """An object whose state belongs to the training, such as a sampler, an average or a gradient scaler."""

    def state_dict(self) -> Mapping[str, Any]: ...

    def load_state_dict(self, state_dict: Any, /) -> Any: ...


Built = tuple[torch.nn.Module, torch.optim.Optimizer] | tuple[torch.nn.Module, torch.optim.Optimizer, Any]


class LoopTraining:
    """One model in training. A step is `begin`, forward and backward passes, `share` and `update`."""

    def __init__(self, built: Built, rest: Mapping[str, Stateful]) -> None:
        """Hook into the model's gradients, until `close`. `rest` has the objects of the state that `built` lacks."""
        self.model, self.optimizer = built[0], built[1]
        self.scheduler = built[2] if len(built) > 2 else None
        self.parts: dict[str, Any] = {"model": self.model, "optimizer": self.optimizer}
        if self.scheduler is not None:
            self.parts["scheduler"] = self.scheduler
        self.parts.update(rest)
        self.device = next((p.device for p in self.model.parameters()), torch.device("cpu"))
        parameters = list(self.model.parameters())
        self._sharded = [parameter for parameter in parameters if is_sharded(parameter)]
        self._averager = Averager(parameter for parameter in parameters if not is_sharded(parameter))
        self._buffers = ModelBuffers(self.model)
        self._can_be_given = False
        self._open = False
        """True during a step, when only `update` may call the optimizer."""
        self._hook = self.optimizer.register_step_pre_hook(self._refuse_early_step)

    def begin(self, world: int, backwards: int, group: Group | None) -> None:
        """Begin a step of `backwards` backward passes and discard all gradients. Arguments as for `Averager.begin`."""
        self._open = True
        self._averager.begin(world, backwards, group)
        for parameter in self._sharded:
            parameter.grad = None

    def share(self, world: int, group: Group | None) -> None:
        """Average the gradients and receive rank 0's module buffers. Raises GroupLost if the group broke."""
        self._averager.finish()
        self._buffers.fetch(world, group)

    def update(self) -> None:
        """Take the step with the averaged gradients. No collective, so the loss of a peer cannot interrupt it.

        The first step raises BadState if the state holds a value that could not be sent to a newcomer.
        """
        self._open = False
        self.optimizer.step()
        if self.scheduler is not None:
            self.scheduler.step()
        self._buffers.keep()
        if not self._can_be_given and not self._sharded:
            state_codec.describe(self.state())
            self._can_be_given = True

    def break_off(self, group: Group | None, *, lost: bool) -> None:
        """End a step that raised an error, so that the script may use the optimizer again.

        If a peer is `lost`, or collectives are pending, abort the group, so that no peer waits.
        """
        self._open = False
        if group is not None and (lost or self._averager.under_way):
            group.abort()
            self._averager.abandon()

    def undo(self) -> None:
        """Set the buffers of the model's modules back to their values before an aborted step."""
        self._buffers.undo()

    def digest(self) -> int:
        """A checksum of a few values of each parameter. Sharded and non-contiguous parameters are left out.

        A few values are enough, because an error in training changes nearly all values of a parameter.
        """
        kinds: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
        for parameter in self.model.parameters():
            if parameter.is_contiguous() and not is_sharded(parameter):  # otherwise flattening would copy it
                flat = parameter.detach().view(-1)
                some = flat[:: max(1, flat.numel() // DIGEST)][:DIGEST]
                kinds.setdefault((parameter.device, parameter.dtype), []).append(some)
        digest = 0
        for samples in kinds.values():
            digest = zlib.crc32(torch.cat(samples).view(torch.uint8).cpu().numpy(), digest)
        return digest

    def state(self) -> dict[str, Any]:
        return {
            "parts": {name: part.state_dict() for name, part in self.parts.items()},
            "buffers": self._buffers.unsaved(),
            "trained": self._averager.trained,
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Load a state that the method `state` returned on another rank. The tensors in it are in host memory."""
        for name, part in self.parts.items():
            theirs = state["parts"][name]
            copies = part is self.model or part is self.optimizer  # other parts may keep the tensors they are given
            part.load_state_dict(theirs if copies else state_codec.moved(theirs, self.device))
        self._buffers.load(state_codec.moved(state["buffers"], self.device))
        self._averager.train(state["trained"])
        self.loaded()

    def loaded(self) -> None:
        """Accept the state that was loaded into the model, so that `undo` does not bring older module buffers back."""
        self._buffers.keep()

    def close(self) -> None:
        self._averager.close()
        self._hook.remove()

    def _refuse_early_step(self, *_: Any) -> None:
        if self._open:
            raise EarlyStep(
                "optimizer.step() was called inside `with elastic.step()`, whose end takes the step: leave the call "
                "out, and a scheduler's and a scaler's as well"
            )


def built_of(model: torch.nn.Module | None, optimizer: torch.optim.Optimizer | None, scheduler: Any) -> Built:
    """Check a script's own model and optimizer, and return them with the scheduler, which may be None.

    Raises ValueError if model or optimizer is missing, and the errors of `check_model`.
    """
    if model is None or optimizer is None:
        raise ValueError("model: give a model and its optimizer, or a function that builds them (`build`)")
    check_model(model, optimizer)
    return model, optimizer, scheduler


def rest_of_state(sampler: Stateful | None, state: Mapping[str, Stateful]) -> dict[str, Stateful]:
    """Return the sampler, if there is one, and the objects of `state`, by name.

    Raises ValueError if `state` uses a name that `Elastic` needs itself.
    """
    for name in state:
        if name in ("model", "optimizer", "scheduler", "sampler"):
            raise ValueError(f"state: '{name}' is a name that Elastic uses itself; give it another one")
    return {**({} if sampler is None else {"sampler": sampler}), **state}
