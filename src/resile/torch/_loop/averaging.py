"""Averages the gradients of all ranks over the current process group.

It does what DDP does without being tied to one group: a new group after a loss requires no rebuilding. Gradients go
through a few flat buckets. A hook divides each gradient by the world size and puts it into its bucket as soon as the
backward pass has computed it. The optimizer then sees the bucket's own memory: one copy where DDP makes two. A full
bucket is sent at once, while the backward pass continues. The last pass of a step returns when all buckets are back, so
code that reads gradients after it sees the mean. Buckets depend only on the reversed order of the parameters
and are sent in that order. The same world therefore sums in the same order in every run: results are bit-identical.

A parameter without a gradient on any rank keeps none, and optimizers skip it, as in a world of one. Each bucket ends
with one number per parameter that tells whether any rank had a gradient. A rank reads it only for gradients it lacks.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import time
import traceback
from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd import Variable
from torch.autograd.function import BackwardCFunction

from resile.torch._loop.group import Group, GroupLost, wait
from resile.torch._support.error_file import in_brief

BUCKET = 25 * 1024 * 1024
"""Bytes of a bucket, as in DDP: large enough for the network, small enough to be sent during the backward pass."""
FIRST_BUCKET = 1024 * 1024
"""Bytes of the first bucket, as in DDP: fewer, because the network is idle until it is sent. A bucket ends with the
parameter that reaches its size, so that a small parameter followed by a large one is not sent alone."""
DRAIN = 0.05
"""Seconds for pending collectives to end after their group was aborted. They need milliseconds, or never end
(see `resile.torch._loop.group`)."""


class TooManyPasses(ValueError):
    """A step had more backward passes than `begin` was given."""


class _Bucket:
    """Several gradients in one flat tensor, which the ranks sum in one collective."""

    def __init__(self, members: list[torch.nn.Parameter]) -> None:
        self.slots = [_Slot(self, parameter) for parameter in members]
        self.allocate()
        self.divisor: torch.Tensor | int = 1
        """The world size, as a tensor if the bucket's type holds it exactly: that saves 3 us for each parameter."""
        self._world = 1
        self.missing = 0
        """Number of gradients that are not in the bucket yet."""
        self._without: list[int] = []
        """Indices of the gradients that this rank does not have."""

    def allocate(self) -> None:
        """Allocate memory; anew if an abandoned collective may still write to the old memory."""
        members = [slot.parameter for slot in self.slots]
        sizes = [*(parameter.numel() for parameter in members), len(members)]
        self.flat = torch.zeros(sum(sizes), dtype=members[0].dtype, device=members[0].device)
        *parts, self._had = self.flat.split(sizes)
        for slot, part in zip(self.slots, parts, strict=True):
            slot.view = part.view_as(slot.parameter)

    def begin(self, world: int) -> None:
        self.missing = len(self.slots)
        if world != self._world:
            self._world = world
            exact = self.flat.itemsize >= 4  # half precision does not hold every world size
            self.divisor = torch.tensor(world, dtype=self.flat.dtype, device="cpu") if exact else world

    def send(self) -> Any:
        self._had.fill_(1)
        self._without = [number for number, slot in enumerate(self.slots) if slot.without]
        for number in self._without:
            self._had[number] = 0
        return dist.all_reduce(self.flat, async_op=True)

    def publish(self) -> None:
        """Set each gradient to its sum over the ranks, or to None if no rank had it. Call this after the collective."""
        for slot in self.slots:
            slot.parameter.grad = slot.view
        if self._without:
            any_rank = self._had.tolist()
            for number in self._without:
                if not any_rank[number]:
                    self.slots[number].parameter.grad = None


class _Slot:
    view: torch.Tensor
    """The gradient's place in the memory of the bucket."""

    def __init__(self, bucket: _Bucket, parameter: torch.nn.Parameter) -> None:
        self.bucket = bucket
        self.parameter = parameter
        self.passes = 0
        """Backward passes of this step that will still add to the gradient."""
        self.full = False
        self.without = False

    def fill(self) -> None:
        gradient = self.parameter.grad
        self.without = gradient is None
        if gradient is None:
            self.view.zero_()
        else:
            torch.div(gradient.detach() if gradient.requires_grad else gradient, self.bucket.divisor, out=self.view)
            self.parameter.grad = None  # hides the gradient until it is the mean
        self.full = True
        self.bucket.missing -= 1


class Averager:
    """Averages the gradients of one model. A step is `begin`, the backward passes, and `finish`."""

    def __init__(
        self, parameters: Iterable[torch.nn.Parameter], bucket: int = BUCKET, first_bucket: int = FIRST_BUCKET
    ) -> None:
        """Hook into the backward passes of these parameters, until `close`.

        `bucket` is the size of a bucket in bytes, and `first_bucket` that of the first one. Frozen parameters cost
        nothing. A parameter that is unfrozen gets a place in a bucket at the next step, and keeps the place when it is
        frozen again. So the buckets are not rebuilt again and again if a model trains its halves in turns.
        """
        self._parameters = list(parameters)
        self._limits = (bucket, first_bucket)
        self._buckets: list[_Bucket] = []
        self._slots: list[_Slot] = []
        self._hooks: list[Any] = []
        self._ever: list[bool] = [False] * len(self._parameters)
        """For each parameter, True if it has a slot."""
        self._closed = False
        self._look()
        self._open = False
        """True during a step of several ranks."""
        self._averaged = False
        self._passes = 0
        self._tasks: set[int] = set()
        """Torch's ids of this step's backward passes whose end will be reported."""
        self._group: Group | None = None
        self._sent = 0
        self._works: list[Any] = []

    @property
    def trained(self) -> dict[str, list[bool]]:
        """Two lists of flags: `now` tells which parameters are trained now, `ever` which ones ever were.

        The parameters are in the same order on all ranks.
        """
        return {"now": [parameter.requires_grad for parameter in self._parameters], "ever": list(self._ever)}

    def train(self, trained: dict[str, list[bool]]) -> None:
        """Freeze and unfreeze parameters as on another rank, and build the same buckets as there.

        `trained` is the property `trained` of the other rank.
        """
        for parameter, now in zip(self._parameters, trained["now"], strict=True):
            if parameter.requires_grad != now:
                parameter.requires_grad_(now)
        self._divide(trained["ever"])

    def begin(self, world: int, backwards: int = 1, group: Group | None = None) -> None:
        """Begin a step and discard all gradients, also those that an aborted step has left.

        `backwards` is the number of backward passes that add up to this rank's gradient; ranks may differ. When the
        round of `group` is over, backward passes raise GroupLost. Without rounds, `group` is None.
        """
        self._group = group
        self._look()
        self._open, self._averaged, self._sent = world > 1, False, 0
        self._passes = backwards
        self._tasks.clear()
        for bucket in self._buckets:
            bucket.begin(world)
        for slot in self._slots:
            slot.passes, slot.full = backwards, False
            slot.parameter.grad = None

    def finish(self) -> None:
        """End the step's backward passes. Every gradient is the mean over the world when this returns.

        A gradient that this rank lacks counts as 0. A gradient that all ranks lack stays None. Raises GroupLost if the
        group broke. The gradients are unusable then.
        """
        if self._open:
            self._average()
            self._open = False

    @property
    def under_way(self) -> bool:
        """True while a collective of this step is pending."""
        return bool(self._works)

    def abandon(self) -> None:
        """End a step whose group was aborted. Nothing writes to the buckets after this returns."""
        self._open = False
        deadline = time.monotonic() + DRAIN
        for bucket, work in zip(self._buckets, self._works, strict=False):  # the other buckets were not sent
            with contextlib.suppress(RuntimeError):  # the outcome does not matter
                work.wait(timedelta(seconds=max(0.001, deadline - time.monotonic())))
            if not work.is_completed():
                bucket.allocate()
        self._works.clear()

    def close(self) -> None:
        self._closed = True
        for hook in self._hooks:
            hook.remove()

    def _look(self) -> None:
        self._divide([ever or each.requires_grad for each, ever in zip(self._parameters, self._ever, strict=True)])

    def _divide(self, ever: list[bool]) -> None:
        """Build new buckets, unless the parameters that were `ever` trained already have a place in the old ones."""
        if ever == self._ever:
            return
        self._ever = ever
        for hook in self._hooks:
            hook.remove()
        trained = [parameter for parameter, has_slot in zip(self._parameters, ever, strict=True) if has_slot]
        self._buckets = [_Bucket(members) for members in _divided(trained, *self._limits)]
        self._slots = [slot for each in self._buckets for slot in each.slots]
        self._hooks = [] if self._closed else [self._hooked(slot) for slot in self._slots]

    def _hooked(self, slot: _Slot) -> Any:
        """Have `_arrived` called at every new gradient. The parameter may be frozen now and unfrozen later."""
        trained = slot.parameter.requires_grad
        slot.parameter.requires_grad_(True)  # torch refuses a hook on a frozen one
        handle = slot.parameter.register_post_accumulate_grad_hook(functools.partial(self._arrived, slot))
        slot.parameter.requires_grad_(trained)
        return handle

    def _arrived(self, slot: _Slot, _: torch.Tensor) -> None:
        if self._group is not None and self._group.over:
            raise GroupLost("the round is over")
        if not self._open:
            return
        if slot.full:
            raise TooManyPasses("a step has more backward passes than it was told of: use step(backwards=...)")
        task = torch._C._current_graph_task_id()
        if task not in self._tasks:
            self._tasks.add(task)
            Variable._execution_engine.queue_callback(self._pass_ended)
        slot.passes -= 1
        if slot.passes > 0:
            return
        slot.fill()
        if not slot.bucket.missing:
            self._send_full()

    def _pass_ended(self) -> None:
        """Average the gradients if the step's last backward pass has ended, or if all buckets are sent.

        Torch calls this after each pass. A pass that runs inside another pass is not counted.
        """
        if self._open and not _within_another_pass():
            self._passes -= 1
        if self._open and (self._passes == 0 or self._sent == len(self._buckets)):
            self._average()

    def _average(self) -> None:
        if self._averaged:
            return
        for slot in self._slots:
            if not slot.full:
                slot.fill()
        self._send_full()
        try:
            for work in self._works:
                wait(work, self._group)
        except RuntimeError as error:
            raise GroupLost(f"gradients were not averaged: {in_brief(error)}") from error
        self._works.clear()
        for bucket in self._buckets:
            bucket.publish()
        self._averaged = True

    def _send_full(self) -> None:
        """Send the next buckets until one is not full, because all ranks must send the buckets in the same order."""
        try:
            while self._sent < len(self._buckets) and not self._buckets[self._sent].missing:
                self._works.append(self._buckets[self._sent].send())
                self._sent += 1
        except RuntimeError as error:
            raise GroupLost(f"gradients were not averaged: {in_brief(error)}") from error


def _within_another_pass() -> bool:
    """True if the backward pass that ends here runs inside another one, as with reentrant checkpointing."""
    around = BackwardCFunction.apply.__code__
    return any(frame.f_code is around for frame, _ in traceback.walk_stack(sys._getframe()))


def _divided(parameters: list[torch.nn.Parameter], size: int, first: int) -> Iterable[list[torch.nn.Parameter]]:
    kinds: dict[tuple[torch.device, torch.dtype], list[list[torch.nn.Parameter]]] = {}
    filled: dict[tuple[torch.device, torch.dtype], int] = {}
    for parameter in reversed(parameters):
        kind = (parameter.device, parameter.dtype)
        buckets = kinds.setdefault(kind, [])
        if not buckets or filled[kind] >= (size if len(buckets) > 1 else first):
            buckets.append([])
            filled[kind] = 0
        buckets[-1].append(parameter)
        filled[kind] += parameter.nbytes
    return [members for buckets in kinds.values() for members in buckets]
