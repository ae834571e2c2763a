"""The checkpoints of an elastic loop: one commit holds all that makes up the training.

They are for the moment when nobody is left who has the state: all processes killed at once, or the whole job started
again. As long as one process lives its state counts, and no checkpoint is looked at.
"""

from __future__ import annotations

import logging
from collections.abc import MutableMapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from resile.torch.checkpointer import Checkpointer

log = logging.getLogger(__name__)


class Keeping:
    """Saves and brings back the parts of one loop. Every method but `before_update` is for all ranks together."""

    def __init__(self, checkpointer: Checkpointer, parts: MutableMapping[str, Any], every: int) -> None:
        """Nothing happens yet.

        Args:
            checkpointer: where to; how often something goes to storage is its own decision.
            parts: all that makes up the training, by name.
            every: steps between two saves.
        """
        if every < 1:
            raise ValueError(f"every: a checkpoint is saved every 1 step or more, not {every}")
        if checkpointer.store_every % every:
            raise ValueError(
                f"every: {every} steps are between two checkpoints, so one of {checkpointer.store_every} (store_every) "
                "would never be due for storage; give a divisor of it"
            )
        self._checkpointer = checkpointer
        self._parts = parts
        self._every = every
        self._saved: int | None = None
        """The last step that was saved in this group."""

    def restore(self) -> int | None:
        """Bring the newest whole step back; None if there is none, and nothing has changed.

        Raises:
            RuntimeError: the group broke.
            Misfit: what was saved is not of this training.
        """
        step = self._checkpointer.restore(self._parts)
        self._saved = step
        return step

    def enter(self, step: int, changed: bool) -> None:
        """The group is a new one.

        Args:
            step: where its members stand.
            changed: some member had another state before, so its memory has none of this one.

        Raises:
            RuntimeError: the group broke.
        """
        self._checkpointer.regroup()
        self._checkpointer.reserve(self._parts)
        self._saved = None
        if changed and step:
            self._save(step)

    def taken(self, step: int) -> None:
        """A step was taken."""
        if step % self._every == 0:
            self._save(step)

    def before_update(self) -> None:
        """The state is about to change: return when a save that is under way has it as it was."""
        self._checkpointer.before_update()

    def finish(self, step: int) -> None:
        """The last step was taken: returns when it is in storage, or in the agent's memory, which goes to storage."""
        if self._saved != step:
            self._save(step, store=True)
        try:
            self._checkpointer.wait()
        except OSError as error:  # a TimeoutError, too. The training itself is complete.
            log.error("the last checkpoint is not in storage: %s", error)

    def _save(self, step: int, store: bool | None = None) -> None:
        if self._checkpointer.save(step, self._parts, store=store, overlap=True):
            self._saved = step
