"""The mean of all ranks' gradients and the buffers of rank 0, over whichever group there is at the moment.

What DDP does, less what ties it to one group: a new group after a loss needs nothing built anew. Gradients go through a
few flat buckets, the first on its way while the next is filled. Buckets are made once, from the order of the parameters
alone, so the same world sums in the same order in every run: results are bit-identical.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist

BUCKET = 25 * 1024 * 1024
"""Bytes. DDP's own default: large enough for the wire, small enough that the first is on its way early."""


class Averager:
    """The gradients of one model."""

    def __init__(self, parameters: Iterable[torch.nn.Parameter], bucket: int = BUCKET) -> None:
        kinds: dict[tuple[torch.device, torch.dtype], list[list[torch.nn.Parameter]]] = {}
        for parameter in parameters:
            if not parameter.requires_grad:
                continue
            filled = kinds.setdefault((parameter.device, parameter.dtype), [[]])
            size = sum(p.numel() for p in filled[-1]) * parameter.element_size()
            if filled[-1] and size + parameter.numel() * parameter.element_size() > bucket:
                filled.append([])
            filled[-1].append(parameter)
        self._buckets: list[tuple[torch.Tensor, list[tuple[torch.nn.Parameter, torch.Tensor]]]] = []
        for (device, dtype), filled in kinds.items():
            for members in filled:
                flat = torch.zeros(sum(p.numel() for p in members), dtype=dtype, device=device)
                parts = flat.split([p.numel() for p in members])
                views = [(p, part.view_as(p)) for p, part in zip(members, parts, strict=True)]
                self._buckets.append((flat, views))

    def begin(self) -> None:
        """There are no gradients, and whatever a step that was broken off left of them is gone."""
        for _, views in self._buckets:
            for parameter, _ in views:
                parameter.grad = None

    def average(self, world: int) -> None:
        """Every gradient becomes the mean over the world; that of a parameter without one counts as 0.

        Raises:
            RuntimeError: the group broke; the gradients are good for nothing.
        """
        if world == 1:
            return
        works = []
        for flat, views in self._buckets:
            for parameter, view in views:
                if parameter.grad is None:
                    view.zero_()
                else:
                    torch.div(parameter.grad.detach(), world, out=view)
                parameter.grad = view
            works.append(dist.all_reduce(flat, async_op=True))
        for work in works:
            work.wait()


class Buffers:
    """A model's buffers (the running statistics of a batch norm, say), which a forward pass changes before its step.

    As with DDP, rank 0's count. What a step did to them is kept when the step is taken, and undone when it is not.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._buffers = list(model.buffers())
        self._kept = [buffer.clone() for buffer in self._buffers]
        self._next: list[torch.Tensor] | None = None

    def share(self, world: int) -> None:
        """Take rank 0's, for the step that is about to be taken.

        Raises:
            RuntimeError: the group broke; nothing has changed.
        """
        self._next = None
        if world == 1 or not self._buffers:
            return
        kinds: dict[tuple[torch.device, torch.dtype], list[int]] = {}
        for number, buffer in enumerate(self._buffers):
            kinds.setdefault((buffer.device, buffer.dtype), []).append(number)
        shared = list(self._buffers)
        for numbers in kinds.values():
            flat = torch.cat([self._buffers[number].reshape(-1) for number in numbers])
            dist.broadcast(flat, 0)
            parts = flat.split([self._buffers[number].numel() for number in numbers])
            for number, part in zip(numbers, parts, strict=True):
                shared[number] = part.view_as(self._buffers[number])
        self._next = shared

    def keep(self) -> None:
        """The step was taken, or the model was given another state."""
        for kept, buffer, following in zip(self._kept, self._buffers, self._next or self._buffers, strict=True):
            kept.copy_(following)
            if following is not buffer:
                buffer.copy_(following)
        self._next = None

    def undo(self) -> None:
        """The step was broken off."""
        self._next = None
        for kept, buffer in zip(self._kept, self._buffers, strict=True):
            buffer.copy_(kept)
