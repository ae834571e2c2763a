"""The checkpoints of an elastic loop: one commit holds all that makes up the training.

They are for the moment when nobody is left who has the state: all processes killed at once, or the whole job started
again. As long as one process lives its state counts, and no checkpoint is looked at. (No process has the whole state of
a sharded model, so there it is looked at in every new round.)
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
"""Seconds between two tries to save the last step. Counted, not timed: all ranks try equally often."""
Parts = MutableMapping[str, Any]
"""All that makes up a training, by name."""


class LoopCheckpoints:
    """Saves and brings back the parts of one loop. What does not say otherwise is for all ranks together."""

    def __init__(self, checkpointer: Checkpointer, every: int) -> None:
        """Nothing happens yet.

        Args:
            checkpointer: where to; how often something goes to storage is its own decision.
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
        """Those that save and restore together."""
        return self._checkpointer.collectives

    def restore(self, parts: Parts) -> int | None:
        """Bring the newest whole step back, in a new group; None if there is none, and nothing has changed.

        Raises:
            RuntimeError: the group broke.
            StateMismatch: what was saved is not of this training.
            NotWritable: storage will never take a step, on some rank; on all of them.
        """
        self._saved = self._checkpointer.restore(parts, will_store=True)  # the last step, if no other
        if self._saved is not None and (told := _lost()) is not None:
            told.unlink(missing_ok=True)
        return self._saved

    def gives_up(self, trained: bool) -> bool:
        """There is nothing to restore: whether that means that training is lost, and not that it is about to begin.

        Agents start other processes for those that give up, and these have taken no step: a file beside the agent's
        socket tells them. It goes with the agent.

        Args:
            trained: one of the members has taken steps.

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
        """The group is a new one, and nothing was restored in it.

        Raises:
            RuntimeError: the group broke.
        """
        self._checkpointer.regroup()
        self._checkpointer.reserve(parts)
        self._saved = None

    def taken(self, step: int, parts: Parts) -> None:
        """A step was taken.

        Raises:
            RuntimeError: the group broke; of a sharded state, which its ranks agree on.
        """
        if step % self._every == 0:
            self.save(step, parts)

    def save(self, step: int, parts: Parts, store: bool | None = None) -> None:
        """Save now; what the next update changes is copied until then."""
        if self._checkpointer.save(step, parts, store=store, overlap=True):
            self._saved = step

    def before_update(self) -> None:
        """The state is about to change: return when a save that is under way has it as it was. Needs no peer."""
        self._checkpointer.before_update()

    def finish(self, step: int, parts: Parts) -> None:
        """The last step was taken: save it, unless every rank has it.

        If storage or a copy is behind, so that ranks leave it out, it is tried again for as long as storage would be
        waited for: no later save makes up for it. All ranks do so together, and notice if one of them is lost.

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
        """Return when the last step is in storage, or in the agent's memory, which goes to storage. Needs no peer."""
        try:
            self._checkpointer.wait()
        except OSError as error:  # a TimeoutError, too. The training itself is complete.
            log.error("the last checkpoint is not in storage: %s", error)


def _lost() -> Path | None:
    """What says on this node that nobody has the state of the training any more; None: there is no agent."""
    socket = os.environ.get(AGENT_SOCKET)
    return Path(socket).with_name("lost-for-good") if socket else None
