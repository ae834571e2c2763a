"""The state of a training loop on one rank, on which the members of a round agree: the model and the steps taken.

A step changes the state (`LoopTraining`), checkpoints keep it (`LoopCheckpoints`), and a new round sets it to the state
from which all members go on. `rendezvous` decides which state that is.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping

from resile.torch._loop import state_sync
from resile.torch._loop.loop_checkpoints import LoopCheckpoints
from resile.torch._loop.training import Built, LoopTraining, Stateful
from resile.torch.loader import ElasticLoader
from resile.torch.sampler import ElasticBatchSampler


class TrainState:
    """The state of one training loop on this rank, from the first round to the last."""

    def __init__(
        self,
        made: Built | Callable[[], Built],
        rest: Mapping[str, Stateful],
        *,
        sampler: ElasticBatchSampler | ElasticLoader | None = None,
        checkpoints: LoopCheckpoints | None = None,
        completed: int = 0,
    ) -> None:
        """`made` is a model with its optimizer, or a function that builds them. `resize` calls it in each round.

        `rest` are the objects of the state other than model, optimizer and scheduler, by name. The sampler is one of
        them.
        """
        self.sampler = sampler
        self.checkpoints = checkpoints
        self.completed = completed
        self._rest = rest
        self._build = made if callable(made) else None
        self._training = None if callable(made) else LoopTraining(made, rest)

    @property
    def training(self) -> LoopTraining:
        """The `LoopTraining` of this round's model. Raises RuntimeError before the first round has built a model."""
        if self._training is None:
            raise RuntimeError("the model is built when the peers have met: in `epochs` or `steps`, or by `meet()`")
        return self._training

    @property
    def rebuilt(self) -> bool:
        """True if every round builds a new, sharded model. Then only checkpoints have the whole state."""
        return self._build is not None

    def commit(self, samples: int) -> None:
        """Take a step and advance the sampler by `samples`. No collective, so a peer's loss cannot interrupt it."""
        if self.checkpoints is not None:
            self.checkpoints.before_update()
        self.training.update()
        if self.sampler is not None:
            self.sampler.advance(samples)
        self.completed += 1

    def undo(self) -> None:
        if self._training is not None:
            self._training.undo()

    def resize(self, rank: int, world: int) -> None:
        """Set the sampler's rank and world.

        If every round builds its own model, also replace the old model by a new, untrained one.
        """
        if self.sampler is not None:  # first, because the model's construction may ask it for this rank's share
            self.sampler.resize(rank, world)
        if self._build is None:
            return
        if self._training is not None:
            self._training.close()
            self._training = None
            gc.collect()  # frees the old shards before the new ones are allocated
        self._training = LoopTraining(self._build(), self._rest)

    def digest(self) -> int:
        return 0 if self.rebuilt else self.training.digest()

    def adopt(self, found: state_sync.SyncResult) -> None:
        """Go on from the state `found` on which the members agreed. Load it if this rank received it. No collective."""
        if found.received is not None:
            if self.checkpoints is not None:
                self.checkpoints.before_update()
            self.training.load(found.received)
        elif found.source == state_sync.FROM_CHECKPOINT:
            self.training.loaded()
        self.completed = found.step

    def save_in_memory(self, found: state_sync.SyncResult) -> None:
        """Save the state `found` in memory if some rank has not saved it yet.

        These are ranks that received the state from another rank and, because a new round divides the shards anew, all
        ranks of a sharded model. Does nothing without checkpoints. Raises RuntimeError if the group broke.
        """
        if self.checkpoints is None:
            return
        if found.source != state_sync.FROM_CHECKPOINT:
            self.checkpoints.enter(self.training.parts)
        if self.rebuilt or (found.takers and found.step):
            self.checkpoints.save(found.step, self.training.parts, store=False)

    def close(self) -> None:
        if self._training is not None:
            self._training.close()
