"""The mean of all ranks' gradients and the buffers of rank 0, over whichever group there is at the moment.

What DDP does, less what ties it to one group: a new group after a loss needs nothing built anew. Gradients go through a
few flat buckets. A hook puts each gradient into its bucket when the backward pass has made it, divided by the world on
the way, and what the optimizer sees is the bucket itself: one copy where DDP makes two. A bucket goes over the group as
soon as it is full, while the backward pass goes on. Buckets are made once, from the reversed order of the parameters
alone, and go in that order, so the same world sums in the same order in every run: results are bit-identical.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from resile.torch.group import GroupLost

BUCKET = 25 * 1024 * 1024
"""Bytes. DDP's own default: large enough for the wire, small enough that the first is on its way early."""
FIRST_BUCKET = 1024 * 1024
"""Bytes of the first bucket, as DDP has it: the wire is idle until it is full."""
DRAIN = 10.0
"""Seconds for what is under way in a group to end once the group is broken off; it takes milliseconds."""


class TooManyPasses(ValueError):
    """There were more backward passes in a step than were announced."""


class _Bucket:
    """Some gradients that go over the group together."""

    def __init__(self, members: list[torch.nn.Parameter]) -> None:
        first = members[0]
        self.flat = torch.zeros(sum(p.numel() for p in members), dtype=first.dtype, device=first.device)
        parts = self.flat.split([p.numel() for p in members])
        self.slots = [_Slot(self, p, part.view_as(p)) for p, part in zip(members, parts, strict=True)]
        self.missing = 0
        """Gradients that are not in it yet."""


class _Slot:
    """The place of one gradient."""

    def __init__(self, bucket: _Bucket, parameter: torch.nn.Parameter, view: torch.Tensor) -> None:
        self.bucket = bucket
        self.parameter = parameter
        self.view = view
        self.passes = 0
        """Backward passes of this step that it is still to come from."""
        self.full = False

    def fill(self, world: int) -> None:
        """Put the gradient in; none counts as 0."""
        gradient = self.parameter.grad
        if gradient is None:
            self.view.zero_()
        else:
            torch.div(gradient.detach() if gradient.requires_grad else gradient, world, out=self.view)
        self.parameter.grad = self.view
        self.full = True
        self.bucket.missing -= 1


class Averager:
    """The gradients of one model."""

    def __init__(
        self, parameters: Iterable[torch.nn.Parameter], bucket: int = BUCKET, first_bucket: int = FIRST_BUCKET
    ) -> None:
        """Hook into the backward pass of these parameters, until `close`."""
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        self._buckets = [_Bucket(members) for members in _divided(trained, bucket, first_bucket)]
        self._slots = [slot for each in self._buckets for slot in each.slots]
        self._hooks = [slot.parameter.register_post_accumulate_grad_hook(self._hook(slot)) for slot in self._slots]
        self._world = 1
        self._open = False
        """Whether gradients belong to a step of several ranks."""
        self._sent = 0
        self._works: list[Any] = []

    def begin(self, world: int, backwards: int = 1) -> None:
        """A step begins. There are no gradients, and whatever a step that was broken off left of them is gone.

        Args:
            world: ranks.
            backwards: backward passes that add up to this rank's gradient; ranks may have different numbers.
        """
        self._world, self._open, self._sent = world, world > 1, 0
        for bucket in self._buckets:
            bucket.missing = len(bucket.slots)
        for slot in self._slots:
            slot.passes, slot.full = backwards, False
            slot.parameter.grad = None

    def send(self) -> None:
        """No more gradients come: have all that is not under way yet sent. One that is missing counts as 0.

        Raises:
            GroupLost: the group broke; the gradients are good for nothing.
        """
        if not self._open:
            return
        for slot in self._slots:
            if not slot.full:
                slot.fill(self._world)
        self._open = False
        self._send_full()

    def wait(self) -> None:
        """Every gradient is the mean over the world when this returns.

        Raises:
            GroupLost: the group broke; the gradients are good for nothing.
        """
        try:
            for work in self._works:
                work.wait()
        except RuntimeError as error:
            raise GroupLost(f"gradients were not averaged: {error}") from error
        self._works.clear()

    @property
    def under_way(self) -> bool:
        """Whether something of this step went to the group and did not come back."""
        return bool(self._works)

    def abandon(self) -> None:
        """The step is broken off, and so is its group: nothing touches the buckets any more when this returns.

        Raises:
            RuntimeError: something does.
        """
        self._open = False
        for work in self._works:
            with contextlib.suppress(RuntimeError):  # what it came to does not matter
                work.wait(timedelta(seconds=DRAIN))
            if not work.is_completed():
                raise RuntimeError(f"a collective did not end within {DRAIN:g} s after its group was broken off")
        self._works.clear()

    def close(self) -> None:
        """Leave the parameters alone."""
        for hook in self._hooks:
            hook.remove()

    def _hook(self, slot: _Slot) -> Callable[[torch.Tensor], None]:
        def arrived(_: torch.Tensor) -> None:
            if not self._open:
                return
            slot.passes -= 1
            if slot.passes > 0:
                return
            if slot.passes < 0:
                raise TooManyPasses("a step has more backward passes than it was told of: use step(backwards=...)")
            slot.fill(self._world)
            if not slot.bucket.missing:
                self._send_full()

        return arrived

    def _send_full(self) -> None:
        """Always in the same order, whichever is full first."""
        try:
            while self._sent < len(self._buckets) and not self._buckets[self._sent].missing:
                self._works.append(dist.all_reduce(self._buckets[self._sent].flat, async_op=True))
                self._sent += 1
        except RuntimeError as error:
            raise GroupLost(f"gradients were not averaged: {error}") from error


def _divided(parameters: list[torch.nn.Parameter], size: int, first: int) -> Iterable[list[torch.nn.Parameter]]:
    """Parameters by bucket, in about the order in which a backward pass makes their gradients."""
    kinds: dict[tuple[torch.device, torch.dtype], list[list[torch.nn.Parameter]]] = {}
    filled: dict[tuple[torch.device, torch.dtype], int] = {}
    for parameter in reversed(parameters):
        kind = (parameter.device, parameter.dtype)
        buckets = kinds.setdefault(kind, [])
        more = parameter.numel() * parameter.element_size()
        limit = size if len(buckets) > 1 else first
        if not buckets or filled[kind] + more > limit:
            buckets.append([])
            filled[kind] = 0
        buckets[-1].append(parameter)
        filled[kind] += more
    return [members for buckets in kinds.values() for members in buckets]


class Buffers:
    """A model's buffers (the running statistics of a batch norm, say), which a forward pass changes before its step.

    As with DDP, rank 0's count. What a step did to them is kept when the step is taken, and undone when it is not.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._buffers = list(model.buffers())
        self._kept = [buffer.clone() for buffer in self._buffers]
        self._flats: list[tuple[torch.Tensor, list[int]]] = []
        kinds: dict[tuple[torch.device, torch.dtype], list[int]] = {}
        for number, buffer in enumerate(self._buffers):
            kinds.setdefault((buffer.device, buffer.dtype), []).append(number)
        self._kinds = list(kinds.values())
        self._works: list[Any] = []

    def send(self, world: int) -> None:
        """Begin to take rank 0's, for the step that is about to be taken.

        Raises:
            GroupLost: the group broke; nothing has changed.
        """
        self._flats.clear()
        self._works.clear()  # of a step that was broken off; what they write to is nobody's any more
        if world == 1:
            return
        try:
            for numbers in self._kinds:
                flat = torch.cat([self._buffers[number].reshape(-1) for number in numbers])
                self._flats.append((flat, numbers))
                self._works.append(dist.broadcast(flat, 0, async_op=True))
        except RuntimeError as error:
            raise GroupLost(f"buffers were not shared: {error}") from error

    def wait(self) -> None:
        """Rank 0's are here when this returns, and will be the model's with `keep`.

        Raises:
            GroupLost: the group broke; nothing has changed.
        """
        try:
            for work in self._works:
                work.wait()
        except RuntimeError as error:
            raise GroupLost(f"buffers were not shared: {error}") from error

    def keep(self) -> None:
        """The step was taken, or the model was given another state."""
        for flat, numbers in self._flats:
            parts = flat.split([self._buffers[number].numel() for number in numbers])
            for number, part in zip(numbers, parts, strict=True):
                self._buffers[number].copy_(part.view_as(self._buffers[number]))
        self._flats.clear()
        for kept, buffer in zip(self._kept, self._buffers, strict=True):
            kept.copy_(buffer)

    def undo(self) -> None:
        """The step was broken off."""
        self._flats.clear()
        for kept, buffer in zip(self._kept, self._buffers, strict=True):
            buffer.copy_(kept)
