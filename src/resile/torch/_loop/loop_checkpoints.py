"""Saves and restores the state of an elastic loop: model, optimizer, data position and the script's own values.

A checkpoint is read when no process has the state any more, because all were killed at once or the job was started
again. While one process lives, its state counts and no checkpoint is read. (A sharded model is different: no process
has its whole state, so every new round reads the checkpoint.)
"""

from __future__ import annotations

import logging
import os
from collections.abc import MutableMapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from resile.torch._support.arguments import whole
from resile.wire.env import AGENT_SOCKET

if TYPE_CHECKING:
    from resile.torch.checkpointer import Checkpointer

log = logging.getLogger(__name__)

PAUSES = (0.1, 0.2, 0.5, *[1.0] * 600)
"""Seconds between tries to save the last step. The number of tries is fixed, so that all ranks stop together."""
Parts = MutableMapping[str, Any]
"""The objects whose state makes up a training, by name."""


class LoopCheckpoints:
    """Saves and restores the state of one loop. Methods are collectives unless they say otherwise.

    Every collective raises RuntimeError if the group broke.
    """

    def __init__(self, checkpointer: Checkpointer, every: int) -> None:
        """`every` is the number of steps between two saves. The checkpointer decides which saves go to storage."""
        every = whole("every", every, least=1)
        if checkpointer.store_every % every:
            raise ValueError(
                f"every: {every} steps are between two checkpoints, so one of {checkpointer.store_every} (store_every) "
                "would never be due for storage; give a divisor of it"
            )
        self._checkpointer = checkpointer
        self.ranks = checkpointer.collectives
        self._every = every
        self._saved: int | None = None
        """The last step that this group saved or restored; None if there is none."""

    def restore(self, parts: Parts) -> int | None:
        """Load the newest complete step into `parts` and return its number; None, with no change, if there is no step.

        Raises StateMismatch if the checkpoint is of another training, NotWritable if storage will never accept a step.
        """
        self._saved = self._checkpointer.restore(parts, will_store=True)  # at least the last step is stored
        if self._saved is not None and (mark := _lost_mark()) is not None:
            mark.unlink(missing_ok=True)
        return self._saved

    def gives_up(self, trained: bool) -> bool:
        """True if the state is lost, False if training has not begun. Call this only if `restore` returned None.

        The state is lost if some member has taken steps (`trained`), or if a member finds the mark of an earlier loss.
        The mark is a file beside the agent's socket, and disappears with the agent. If the state is lost, this method
        writes the mark. Agents replace processes that give up, and the new processes learn of the loss from the mark.
        """
        mark = _lost_mark()
        if not trained and not any(row[0] for row in self.ranks.gather([int(mark is not None and mark.exists())])):
            return False
        if mark is not None:
            mark.touch()
        return True

    def enter(self, parts: Parts) -> None:
        """Prepare for saves in a new group. Call this if the group goes on from a member's state.

        A group that goes on from a checkpoint calls `restore` instead.
        """
        self._checkpointer.regroup()
        self._checkpointer.reserve(parts)
        self._saved = None

    def taken(self, step: int, parts: Parts) -> None:
        if step % self._every == 0:
            self.save(step, parts)

    def save(self, step: int, parts: Parts, store: bool | None = None) -> None:
        """Save now; `store` is as in `Checkpointer.save`. Call `before_update` before the state changes again."""
        if self._checkpointer.save(step, parts, store=store, overlap=True):
            self._saved = step

    def before_update(self) -> None:
        """Wait until a pending save has copied the state. Call this before the state changes. No collective."""
        self._checkpointer.before_update()

    def finish(self, step: int, parts: Parts) -> None:
        """Save the last step, unless every rank has saved it.

        The ranks skip a save while storage or a replica is behind. No later save makes up for the last one, so the
        ranks try again together, for as long as `Checkpointer.wait` waits for storage.
        """
        for seconds in PAUSES:
            if all(row[0] for row in self.ranks.gather([int(self._saved == step)])):
                return
            self.save(step, parts, store=True)
            if not any(row[0] for row in self.ranks.gather([int(self._checkpointer.behind)])):
                return
            self.ranks.pause(seconds)

    def wait_stored(self) -> None:
        """Wait until storage has the last step. Log the reason if storage does not get it. No collective."""
        try:
            self._checkpointer.wait()
        except OSError as error:  # including TimeoutError; the training itself is complete
            log.error("the last checkpoint is not in storage: %s", error)


def _lost_mark() -> Path | None:
    socket = os.environ.get(AGENT_SOCKET)
    return Path(socket).with_name("lost-for-good") if socket else None
