"""Tests whether storage can be written before training begins, instead of failing at its first step.

Under an agent it is the agent that writes, as the same user on the same machine, so the result holds for it too.
"""

from __future__ import annotations

from collections.abc import Callable

from resile.checkpoint.errors import NotWritable
from resile.checkpoint.object_storage import ObjectStorage
from resile.checkpoint.storage import Storage
from resile.torch._support.error_file import recorded_in_error_file


@recorded_in_error_file(NotWritable, permanent=True)
def check_writable(
    storage: Storage | ObjectStorage | None, tell: Callable[[str], list[str]] = lambda words: [words]
) -> None:
    """Write something and remove it again.

    Args:
        storage: None passes the test.
        tell: exchanges messages between all ranks, so that all raise the same sentence; by default this rank is alone.

    Raises:
        NotWritable: storage will never accept a step, on this rank or on another.
    """
    words = ""
    try:
        if storage is not None:
            storage.check_writable()
    except NotWritable as error:
        words = str(error)
    if refusal := next(filter(None, tell(words)), ""):
        raise NotWritable(refusal)
