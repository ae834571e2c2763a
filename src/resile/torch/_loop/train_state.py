"""What a loop trains and how far that is, on one rank: all that the members of a round agree on before they go on.

A step changes it (`LoopTraining`), checkpoints keep it (`LoopCheckpoints`), and a new round brings it to where all
members go on. How the members come to know where that is, is not decided here.
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
    """The state of one loop, from the first round to the last."""

    def __init__(
        self,
        made: Built | Callable[[], Built],
        rest: Mapping[str, Stateful],
        *,
        sampler: ElasticBatchSampler | ElasticLoader | None = None,
        checkpoints: LoopCheckpoints | None = None,
        completed: int = 0,
    ) -> None:
        """Nothing is built yet.

        Args:
            made: a model and what moves it, or a function that builds them anew in the group of each round.
            rest: the rest of the state, by name; the sampler among it.
            sampler: deals the samples to the ranks of a round.
            checkpoints: of this loop; None: it has none.
            completed: steps already taken.
        """
        self.sampler = sampler
        self.checkpoints = checkpoints
        self.completed = completed
        self._rest = rest
        self._build = made if callable(made) else None
        self._training = None if callable(made) else LoopTraining(made, rest)

    @property
    def training(self) -> LoopTraining:
        """The model of this round.

        Raises:
            RuntimeError: it is not built yet.
        """
        if self._training is None:
            raise RuntimeError("the model is built when the peers have met: in `epochs` or `steps`, or by `meet()`")
        return self._training

    @property
    def rebuilt(self) -> bool:
        """Whether every round has another model: no rank has the whole state of one, and only a checkpoint does."""
        return self._build is not None

    def commit(self, samples: int) -> None:
        """Take a step of so many samples: the one moment at which the state changes.

        No collective is in that, so a loss cannot divide it.
        """
        if self.checkpoints is not None:
            self.checkpoints.before_update()
        self.training.update()
        if self.sampler is not None:
            self.sampler.advance(samples)
        self.completed += 1

    def undo(self) -> None:
        """Be as before a step that was broken off."""
        if self._training is not None:
            self._training.undo()

    def resize(self, rank: int, world: int) -> None:
        """Be of a new group of so many ranks. A model that is built in it is a beginning.

        What the last one had is a part of a state whose other parts may be lost.
        """
        if self.sampler is not None:  # first, so that it says what is left for each of these ranks
            self.sampler.resize(rank, world)
        if self._build is None:
            return
        if self._training is not None:
            self._training.close()
            self._training = None
            gc.collect()  # the old shards go before the new ones come
        self._training = LoopTraining(self._build(), self._rest)

    def digest(self) -> int:
        """A number that is the same on ranks with the same state; 0 if they are not to be compared."""
        return 0 if self.rebuilt else self.training.digest()

    def adopt(self, found: state_sync.SyncResult) -> None:
        """Have the state that was agreed on. Nobody is waited for."""
        if found.received is not None:
            if self.checkpoints is not None:
                self.checkpoints.before_update()
            self.training.load(found.received)
        elif found.source == state_sync.FROM_CHECKPOINT:
            self.training.loaded()
        self.completed = found.step

    def save_in_memory(self, found: state_sync.SyncResult) -> None:
        """Have the state in memory wherever it is not yet: who joined has none, and shards are others in this world.

        Raises:
            RuntimeError: the group broke.
        """
        if self.checkpoints is None:
            return
        if found.source != state_sync.FROM_CHECKPOINT:
            self.checkpoints.enter(self.training.parts)
        if self.rebuilt or (found.takers and found.step):
            self.checkpoints.save(found.step, self.training.parts, store=False)

    def close(self) -> None:
        """Let go of the model."""
        if self._training is not None:
            self._training.close()
