"""Makes every wait for a collective end with the round, also waits in torch, the script or `fully_shard`.

When a connection ends, gloo wakes the collectives that still wait for their first byte. It forgets the collectives of
which a part was sent or received, and those whose write fails before gloo has read the end of the connection. These
wait for their own time-out, half an hour. With small messages that happens in about one of twenty-five aborted groups
(torch 2.13). So no wait in a round is gloo's own: the two functions of torch that wait for a collective are replaced,
and check every `LOOK` seconds whether the round is over. A wait then costs some microseconds more. `wait_tensor`
(DTensor's) also costs a thread, about 0.1 ms. `fully_shard` does not call it, and clipping by the norm calls it once.

Two waits of torch use neither function and can still be forgotten: `monitored_barrier`, and `wait` of the future that
`get_future` returns. A process that also has groups of another backend keeps torch's own waits: in NCCL a wait with a
time-out aborts its group.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import math
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch._ops import OpOverloadPacket
from torch.distributed import Work

LOOK = 0.05
"""Seconds between two checks whether the round is over, in a wait for a collective."""
GRACE = 0.05
"""Seconds for a collective to raise after its group was aborted. It takes milliseconds if it raises at all."""
_POINT_TO_POINT = frozenset({12, 13, 14})
"""Torch's numbers for send, receive, and receive from any rank."""
_torch_wait = Work.wait
_NO_TIMEOUT = timedelta(0)
"""Torch's value for a wait without a time-out."""

T = TypeVar("T")
OverSince = Callable[[], float]
"""Returns when the round ended, by the monotonic clock; infinity while the round runs."""


class GroupLost(RuntimeError):
    """The process group is broken or could not be made, because a member was lost or the round is over."""


def wait(work: Any, over_since: OverSince, timeout: timedelta = _NO_TIMEOUT) -> None:
    """Wait until the gloo operation `work` is done.

    Raises GroupLost when the round is over, and RuntimeError if `work` failed or took longer than `timeout`.
    """
    if work._get_op_type() in _POINT_TO_POINT:  # gloo disconnects when such a wait times out, so it must not be short
        call(lambda: _torch_wait(work, timeout), over_since)
        return
    deadline = time.monotonic() + timeout.total_seconds() if timeout > _NO_TIMEOUT else math.inf
    while not _ends_within(work, LOOK):
        if time.monotonic() > over_since() + GRACE:
            raise GroupLost("the round is over, and a collective of it does not end")
        if time.monotonic() > deadline:
            raise RuntimeError(f"the collective did not end within {timeout.total_seconds():g} s")


def call(function: Callable[[], T], over_since: OverSince) -> T:
    """Run `function` on a new thread, and return its result or raise its error.

    Raises GroupLost if the round ends first. The thread is then left running.
    """
    found = concurrent.futures.Future[T]()

    def run() -> None:
        try:
            found.set_result(function())
        except Exception as error:
            found.set_exception(error)

    threading.Thread(target=run, name="resile-wait", daemon=True).start()
    while not concurrent.futures.wait([found], LOOK).done:
        if time.monotonic() > over_since() + GRACE:
            raise GroupLost("the round is over")
    return found.result()


@contextlib.contextmanager
def end_with_round(over_since: OverSince) -> Iterator[None]:
    """Patch torch within this context, so that a wait for a collective raises GroupLost when the round is over.

    Waits behave as in plain torch while some process group uses another backend than gloo, and while torch traces.
    """

    def wait_for_work(work: Any, timeout: timedelta = _NO_TIMEOUT) -> Any:
        if work.is_completed() or not _all_gloo():
            return _torch_wait(work, timeout)
        wait(work, over_since, timeout)
        return True

    class WaitTensor(OpOverloadPacket):  # type: ignore[misc]  # torch is untyped here
        """The class of the operator `wait_tensor` in a round. The object stays the one that torch keeps in tables."""

        def __call__(self, tensor: Any) -> Any:
            torch_wait = super().__call__
            traced = type(tensor) not in (torch.Tensor, torch.nn.Parameter) or torch.compiler.is_compiling()
            if traced or not _all_gloo():
                return torch_wait(tensor)
            alias = tensor.detach()  # waiting for any tensor of the same memory is enough
            call(lambda: torch_wait(alias), over_since)
            return torch_wait(tensor)

    operator = torch.ops._c10d_functional.wait_tensor  # there also before DTensor, which a script may import in a round
    with replaced(Work, "wait", wait_for_work), replaced(operator, "__class__", WaitTensor):
        yield


@contextlib.contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Within this context, the attribute `name` of `owner` is `value`."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def _all_gloo() -> bool:
    return all(backend == "gloo" for backend, _ in dist.distributed_c10d._world.pg_map.values())


def _ends_within(work: Any, seconds: float) -> bool:
    try:
        _torch_wait(work, timedelta(seconds=seconds))
        return True
    except RuntimeError:
        if not work.is_completed():
            return False
    _torch_wait(work)  # raises the collective's error, unless it succeeded just after the time-out
    return True
