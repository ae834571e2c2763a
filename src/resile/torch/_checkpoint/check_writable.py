"""Whether storage can be written at all: found out before a training begins that relies on it, not at its first step.

Under an agent it is the agent that writes, as the same user and in the same place: what a process finds holds for it.
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
        storage: where; None: there is nothing to find out.
        tell: gives every rank's words for this rank's, so that all end with the same sentence; without it, this rank is
            on its own.

    Raises:
        NotWritable: storage will never take a step, on this rank or on another.
    """
    words = ""
    try:
        if storage is not None:
            storage.check_writable()
    except NotWritable as error:
        words = str(error)
    if refusal := next(filter(None, tell(words)), ""):
        raise NotWritable(refusal)
