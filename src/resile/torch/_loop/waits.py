"""Waits for a collective that end with the round, also where torch, the script or `fully_shard` does the waiting.

When a connection ends, gloo wakes the collectives that still wait for their first byte. It forgets those of which a
part was sent or received, and those whose write fails before the end was read: they wait for their own time-out, half
an hour. With small messages that is about one in twenty-five groups that are broken off (torch 2.13). So no wait of a
round is gloo's own: as long as a round runs, the two functions of torch that wait for a collective look every `LOOK`
seconds whether it is over. The price is that two private names of torch are replaced; a wait costs some microseconds
more, and one by `wait_tensor` (DTensor's) a thread.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, TypeVar

from torch.distributed import Work

LOOK = 0.05
"""Seconds between two looks whether the round is over, in a wait for a collective."""
GRACE = 0.05
"""Seconds for a collective to raise once its group is broken off; it takes milliseconds, or it never does."""
_POINT_TO_POINT = frozenset({12, 13, 14})
"""torch's numbers for send, receive, and receive from any rank."""
_FUNCTIONAL = "torch.distributed._functional_collectives"
_torch_wait = Work.wait

T = TypeVar("T")
OverSince = Callable[[], float]
"""When the round was over, by the monotonic clock; infinity as long as it is not."""


class GroupLost(RuntimeError):
    """The process group is broken or could not be made: a member was lost, or the round is over."""


def wait(work: Any, over_since: OverSince) -> None:
    """Wait for a gloo collective, or a message to or from one rank, until the round is over.

    Raises:
        GroupLost: the round is over first.
        RuntimeError: the collective failed.
    """
    if work._get_op_type() in _POINT_TO_POINT:  # gloo hangs up when such a wait times out, so none may be short
        call(lambda: _torch_wait(work), over_since)
        return
    while not _ends_within(work, LOOK):
        if time.monotonic() > over_since() + GRACE:
            raise GroupLost("the round is over, and a collective of it does not end")


def call(function: Callable[[], T], over_since: OverSince) -> T:
    """What a function returns or raises; if the round is over first, its thread is left behind.

    Raises:
        GroupLost: the round is over first.
    """
    found: list[T] = []
    errors: list[Exception] = []
    done = threading.Event()

    def run() -> None:
        try:
            found.append(function())
        except Exception as error:
            errors.append(error)
        done.set()

    threading.Thread(target=run, name="resile-wait", daemon=True).start()
    while not done.wait(LOOK):
        if time.monotonic() > over_since() + GRACE:
            raise GroupLost("the round is over")
    if errors:
        raise errors[0]
    return found[0]


@contextlib.contextmanager
def end_with_round(over_since: OverSince) -> Iterator[None]:
    """Have every wait for a collective of this process end with the round, as long as this lasts."""

    def wait_for_work(work: Any, *timeout: Any, **options: Any) -> Any:
        if timeout or options or work.is_completed():
            return _torch_wait(work, *timeout, **options)
        wait(work, over_since)
        return True

    functional = sys.modules.get(_FUNCTIONAL)  # not imported yet: nothing is sharded, and its import takes long
    wait_tensor = getattr(functional, "wait_tensor", None)

    def wait_for_tensor(tensor: Any) -> Any:
        assert wait_tensor is not None
        alias = tensor.detach()  # a wait for any tensor of the same memory is one for all
        call(lambda: wait_tensor(alias), over_since)
        return wait_tensor(tensor)

    Work.wait = wait_for_work
    if functional is not None and wait_tensor is not None:
        functional.wait_tensor = wait_for_tensor  # type: ignore[attr-defined]
    try:
        yield
    finally:
        Work.wait = _torch_wait
        if functional is not None and wait_tensor is not None:
            functional.wait_tensor = wait_tensor  # type: ignore[attr-defined]


def _ends_within(work: Any, seconds: float) -> bool:
    """Whether a collective ends within so many seconds.

    Raises:
        RuntimeError: it ends badly.
    """
    try:
        _torch_wait(work, timedelta(seconds=seconds))
        return True
    except RuntimeError:
        if not work.is_completed():
            return False
    _torch_wait(work)  # raises what it came to, unless it ended well just after it was given up
    return True
