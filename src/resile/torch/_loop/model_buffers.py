"""Keeps a model's buffers (such as the running statistics of a batch norm) the same on all ranks, step by step.

A forward pass changes buffers before its step is taken. The changes are kept when the step is taken and undone when the
step is aborted. As with DDP, rank 0's buffers count. A module may assign another tensor to a buffer or register a new
buffer while it runs. Buffers are therefore looked up by name whenever they are needed, in the modules that the model
had at the beginning. A tensor assigned since the last step is replaced instead of written to, because it may belong to
the script's data.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist

from resile.torch._loop.group import Group, GroupLost, wait
from resile.torch._support.error_file import in_brief

Place = tuple[int, str]
"""The index of a module, and the name of a buffer in it."""


class _Kept(NamedTuple):
    tensor: torch.Tensor
    copy: torch.Tensor


class ModelBuffers:
    def __init__(self, model: torch.nn.Module) -> None:
        self._modules = [(f"{name}." if name else "", module) for name, module in model.named_modules()]
        self._homes = [module._buffers for _, module in self._modules]
        self._kept: dict[Place, _Kept] = {}
        self._flats: list[tuple[torch.Tensor, list[Place]]] = []
        self._remember()

    def fetch(self, world: int, group: Group | None = None) -> None:
        """Receive rank 0's buffers. `keep` writes them into the model later. Raises GroupLost if the group broke."""
        self._flats.clear()
        if world == 1:
            return
        buffers = self._now()
        kinds: dict[tuple[torch.device, torch.dtype], list[Place]] = {}
        for place, buffer in buffers.items():
            kinds.setdefault((buffer.device, buffer.dtype), []).append(place)
        try:
            works = []
            for places in kinds.values():
                flat = torch.cat([buffers[place].detach().reshape(-1) for place in places])
                self._flats.append((flat, places))
                works.append(dist.broadcast(flat, 0, async_op=True))
            for work in works:
                wait(work, group)
        except RuntimeError as error:
            raise GroupLost(f"buffers were not shared: {in_brief(error)}") from error

    def keep(self) -> None:
        """Write the buffers that `fetch` received into the model. Remember the values of all buffers for `undo`."""
        for flat, places in self._flats:
            buffers = [self._homes[number][name] for number, name in places]
            parts = flat.split([buffer.numel() for buffer in buffers])
            for place, buffer, part in zip(places, buffers, parts, strict=True):
                self._write(place, part.view_as(buffer))
        self._flats.clear()
        self._remember()

    def undo(self) -> None:
        """Set the buffers back to their values at the last `keep`. Call this if a step was aborted."""
        self._flats.clear()
        for place, kept in self._kept.items():
            self._write(place, kept.copy)

    def unsaved(self) -> dict[str, torch.Tensor]:
        """The buffers that the model's `state_dict` leaves out (`persistent=False`), by name."""
        found = {}
        for (number, name), buffer in self._now().items():
            prefix, module = self._modules[number]
            if name in module._non_persistent_buffers_set:
                found[prefix + name] = buffer.detach()
        return found

    def load(self, unsaved: dict[str, torch.Tensor]) -> None:
        """Load another rank's `unsaved` buffers. A buffer that a module lacks is registered."""
        for number, (prefix, module) in enumerate(self._modules):
            for full, tensor in unsaved.items():
                name = full.removeprefix(prefix)
                if full.startswith(prefix) and "." not in name:
                    module._non_persistent_buffers_set.add(name)
                    self._write((number, name), tensor)

    def _now(self) -> dict[Place, torch.Tensor]:
        return {
            (number, name): buffer
            for number, home in enumerate(self._homes)
            if home
            for name, buffer in home.items()
            if buffer is not None
        }

    def _write(self, place: Place, value: torch.Tensor) -> None:
        number, name = place
        buffer, kept = self._homes[number].get(name), self._kept.get(place)
        if buffer is not None and kept is not None and kept.tensor is buffer and buffer.shape == value.shape:
            buffer.detach().copy_(value)
        else:
            self._homes[number][name] = value.clone()

    def _remember(self) -> None:
        before, self._kept = self._kept, {}
        for place, buffer in self._now().items():
            kept = before.get(place)
            if kept is not None and kept.copy.shape == buffer.shape and kept.copy.dtype == buffer.dtype:
                self._kept[place] = kept if kept.tensor is buffer else _Kept(buffer, kept.copy)
                kept.copy.copy_(buffer.detach())
            else:
                self._kept[place] = _Kept(buffer, buffer.detach().clone())
