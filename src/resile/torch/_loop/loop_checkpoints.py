"""The checkpoints of an elastic loop: each holds everything that makes up the training.

They are for the case that no process has the state any more, because all were killed at once or the job was started
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
    from resile.torch._loop.collectives import Collectives
    from resile.torch.checkpointer import Checkpointer

log = logging.getLogger(__name__)

PAUSES = (0.1, 0.2, 0.5, *[1.0] * 600)
"""Seconds between tries to save the last step. Counting tries keeps all ranks in step."""
Parts = MutableMapping[str, Any]
"""Everything that makes up a training, by name."""


class LoopCheckpoints:
    """Saves and restores the parts of one loop. Methods are collectives unless they say otherwise."""

    def __init__(self, checkpointer: Checkpointer, every: int) -> None:
        """Nothing happens yet.

        Args:
            checkpointer: saves the steps and decides which of them go to storage.
            every: steps between two saves.
        """
        every = whole("every", every, least=1)
        if checkpointer.store_every % every:
            raise ValueError(
                f"every: {every} steps are between two checkpoints, so one of {checkpointer.store_every} (store_every) "
                "would never be due for storage; give a divisor of it"
            )
        self._checkpointer = checkpointer
        self._every = every
        self._saved: int | None = None
        """The last step that was saved in this group."""

    @property
    def ranks(self) -> Collectives:
        """The ranks that save and restore together."""
        return self._checkpointer.collectives

    def restore(self, parts: Parts) -> int | None:
        """Restore the newest complete step in a new group; None if there is none, and then nothing has changed.

        Raises:
            RuntimeError: the group broke.
            StateMismatch: the checkpoint is of another training.
            NotWritable: storage will never accept a step on some rank; raised on all ranks.
        """
        self._saved = self._checkpointer.restore(parts, will_store=True)  # at least the last step is stored
        if self._saved is not None and (told := _lost()) is not None:
            told.unlink(missing_ok=True)
        return self._saved

    def gives_up(self, trained: bool) -> bool:
        """With nothing to restore, True if training is lost, as opposed to about to begin.

        Agents replace processes that give up, and the new processes have taken no step. A file beside the agent's
        socket tells them that training was lost. It goes with the agent.

        Args:
            trained: True if one of the members has taken steps.

        Raises:
            RuntimeError: the group broke.
        """
        told = _lost()
        if not trained and not any(row[0] for row in self.ranks.gather([int(told is not None and told.exists())])):
            return False
        if told is not None:
            told.touch()
        return True

    def enter(self, parts: Parts) -> None:
        """Enter a new group in which nothing was restored.

        Raises:
            RuntimeError: the group broke.
        """
        self._checkpointer.regroup()
        self._checkpointer.reserve(parts)
        self._saved = None

    def taken(self, step: int, parts: Parts) -> None:
        """Save after a step if it is due.

        Raises:
            RuntimeError: the group broke, which only saves of a sharded state notice.
        """
        if step % self._every == 0:
            self.save(step, parts)

    def save(self, step: int, parts: Parts, store: bool | None = None) -> None:
        """Save now. Copying what only an update changes may continue until `before_update`."""
        if self._checkpointer.save(step, parts, store=store, overlap=True):
            self._saved = step

    def before_update(self) -> None:
        """Return when a pending save has copied the state, which is about to change. No collective."""
        self._checkpointer.before_update()

    def finish(self, step: int, parts: Parts) -> None:
        """Save the last step, unless every rank has it.

        If storage or a copy is behind, the ranks skip a save. It is then tried again for as long as storage would be
        waited for, since no later save makes up for it. All ranks do so together and notice if one of them is lost.

        Raises:
            RuntimeError: the group broke.
        """
        for seconds in PAUSES:
            if all(row[0] for row in self.ranks.gather([int(self._saved == step)])):
                return
            self.save(step, parts, store=True)
            behind = self._checkpointer.behind
            if not any(row[0] for row in self.ranks.gather([int(behind)])):
                return
            self.ranks.pause(seconds)

    def wait_stored(self) -> None:
        """Return when the last step is in storage or in the agent's memory, which goes to storage. No collective."""
        try:
            self._checkpointer.wait()
        except OSError as error:  # including TimeoutError; the training itself is complete
            log.error("the last checkpoint is not in storage: %s", error)


def _lost() -> Path | None:
    """The file that says on this node that the state of the training is lost; None without an agent."""
    socket = os.environ.get(AGENT_SOCKET)
    return Path(socket).with_name("lost-for-good") if socket else None
