"""A few lines around an ordinary training loop, so that the loss of a peer costs a moment instead of a restart.

    sampler = ElasticBatchSampler(len(dataset), batch_size=32)
    loader = DataLoader(dataset, batch_sampler=sampler)
    elastic = Elastic(model, optimizer, sampler=sampler)
    for share, (inputs, labels) in elastic.epochs(3, loader):
        with elastic.step():
            loss = criterion(model(inputs), labels)
            (loss * share.weight).backward()

The backward pass averages the gradients over all ranks, as with DDP. The end of `with elastic.step()` takes the
optimizer's step and counts it. When a peer is lost, the step is aborted in whichever collective this process waits, and
nothing of the step is kept. The remaining processes (and later newcomers) form a new group and take the state of the
most advanced process, and the rest of the epoch is divided among them. No process is restarted, no checkpoint is read,
and every sample enters the model exactly once.

With a `checkpointer` the whole state is saved in one commit. The loop goes on from the newest checkpoint when no
process has the state any more, because all were killed at once or the whole job was started again.

A sharded model (`fully_shard`) belongs to one group, and a lost rank takes the only copy of its part along. So every
round builds the model again with a function and loads the newest complete checkpoint, divided among its ranks:

    def build():
        model = Transformer()
        fully_shard(model)
        return model, torch.optim.AdamW(model.parameters())

    elastic = Elastic(build=build, sampler=sampler, checkpointer=Checkpointer("checkpoints", store_every=1000))
    for share, (inputs, labels) in elastic.epochs(3, loader):
        with elastic.step():
            loss = criterion(elastic.model(inputs), labels)  # another model after a loss
            (loss * share.weight).backward()

The whole state of the training must be in `model`, `optimizer`, `sampler`, `scheduler` and `state`, and must change
only at the end of a step (a model's buffers are put back if a step is aborted). Code after the `with` also runs for an
aborted step: ask `elastic.stepped`. The script's own collectives between two steps belong into `with
elastic.together()`. The same script runs under plain torchrun or python, where a loss ends it.
"""

from __future__ import annotations

import atexit
import contextlib
import enum
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from resile.api.ids import Round
from resile.torch._loop.group import default_backend
from resile.torch._loop.loop_checkpoints import LoopCheckpoints
from resile.torch._loop.rendezvous import Rendezvous
from resile.torch._loop.train_state import TrainState
from resile.torch._loop.training import Built, Stateful, built_of, rest_of_state
from resile.torch._support.arguments import check_checkpointer, check_parts, whole
from resile.torch._support.error_file import in_brief
from resile.torch._support.log_setup import show_info_logs
from resile.torch.loader import ElasticLoader, Step, dealt
from resile.torch.progress import report_step
from resile.torch.sampler import ElasticBatchSampler

if TYPE_CHECKING:
    from resile.torch.checkpointer import Checkpointer

__all__ = ["Elastic"]

log = logging.getLogger(__name__)


class _Stage(enum.Enum):
    """How far this process is between meeting its peers and the end of a loop."""

    APART = enum.auto()
    MET = enum.auto()
    """The process is in a round, and a step was begun for every batch that the loop gave."""
    GIVEN = enum.auto()
    """The process is in a round. The loop gave a batch, and its `with elastic.step()` has not begun."""
    DONE = enum.auto()
    """The loop is over on all members, and this process has left the round. Another loop meets the peers again."""


class Elastic:
    """Makes this process a member of an elastic training: forms rounds, averages gradients, takes and saves steps."""

    def __init__(
        self,
        model: torch.nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        build: Callable[[], Built] | None = None,
        sampler: ElasticBatchSampler | ElasticLoader | None = None,
        scheduler: Any = None,
        state: Mapping[str, Stateful] | None = None,
        before_step: Callable[[], object] | None = None,
        checkpointer: Checkpointer | None = None,
        every: int = 1,
        completed: int = 0,
        backend: str | None = None,
        timeout: float = 1800.0,
    ) -> None:
        """Check the arguments. The first call of `epochs`, `steps`, `step` or `meet` meets the peers.

        Args:
            model: not wrapped in DDP, because gradients are averaged here.
            optimizer: of the model's parameters.
            build: for sharded models, instead of a model and its optimizer: a function that makes both, and optionally
                a scheduler, in the group of each round, the same on every rank. Needs a checkpointer.
            sampler: an `ElasticBatchSampler` or `ElasticLoader`, which divides the samples. `Elastic` sets its rank and
                world, and its position belongs to the state.
            scheduler: takes a step with every step of the optimizer.
            state: anything else that has to be the same on all ranks, by name.
            before_step: called between averaging and the optimizer's step. It may change `state`, but only as its last
                action: if a peer is lost after a change, the step is aborted, and the change would remain.
            checkpointer: saves all of the above, and restores it when no process has it any more.
            every: steps between two checkpoints.
            completed: steps already taken, if the script has loaded the state itself.
            backend: as for torch's `init_process_group`; None: nccl with a GPU, otherwise gloo.
            timeout: seconds that a collective may take; the default is torch's.
        """
        check_checkpointer(checkpointer, every)
        check_parts(sampler, scheduler, state, before_step)
        completed = whole("completed", completed)
        if checkpointer is not None and completed:
            raise ValueError("completed: with a checkpointer, the number of steps comes from its checkpoints")
        if build is not None and checkpointer is None:
            raise ValueError("build: a model that is built for each round needs a checkpointer to be loaded from")
        if build is not None and not (model is optimizer is scheduler is None):
            raise ValueError("build: it makes model, optimizer and scheduler itself; give them or a function")
        show_info_logs()
        self.stepped = False
        """True if the last `with elastic.step()` took its step. False after a loss: the step's samples come again."""
        self._before_step = before_step
        self._state = TrainState(
            built_of(model, optimizer, scheduler) if build is None else build,
            rest_of_state(sampler, state or {}),
            sampler=sampler,
            checkpoints=LoopCheckpoints(checkpointer, every) if checkpointer is not None else None,
            completed=completed,
        )
        self._rendezvous = Rendezvous(self._state, backend or default_backend(), timeout)
        self._stage = _Stage.APART
        self._samples = 0
        self._passes = 1
        self._total = 0
        atexit.register(self.close)

    @property
    def model(self) -> torch.nn.Module:
        """The model; with `build`, the model of this round."""
        return self._state.training.model

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        return self._state.training.optimizer

    @property
    def sampler(self) -> ElasticBatchSampler | ElasticLoader | None:
        """The sampler or loader that divides the samples."""
        return self._state.sampler

    @property
    def completed(self) -> int:
        """Steps taken by the training, whichever processes took them."""
        return self._state.completed

    @property
    def rank(self) -> int:
        return self._rendezvous.rank

    @property
    def world(self) -> int:
        """The number of ranks in the round."""
        return self._rendezvous.world

    @property
    def round(self) -> Round:
        """The round's number; 0 without an agent."""
        return self._rendezvous.round

    def epochs(self, count: int, loader: Iterable[Any]) -> Iterator[Any]:
        """Yield the data of each step of `count` epochs, from the sampler's position on.

        An `ElasticLoader` yields its own steps. Any other loader takes its batches from the sampler, and each batch
        comes with this rank's share of the step: (share, batch). The iteration ends when every member of the round has
        taken the last step.
        """
        count, sampler = whole("count", count), self.sampler
        if sampler is None:
            raise ValueError("epochs() needs a sampler: give one to Elastic, or use steps()")

        def rest() -> Iterator[tuple[int, Any]]:
            while sampler.epoch < count:
                self._total = 0  # unknown if the data are a stream
                if sampler.size is not None:
                    later = (count - sampler.epoch - 1) * sampler.steps_per_epoch
                    self._total = self.completed + len(sampler) + later
                yield from dealt(sampler, loader)
                sampler.set_epoch(sampler.epoch + 1)

        yield from self._loop(rest, f"{count} epochs")

    def steps(self, total: int) -> Iterator[int]:
        """Yield the number of completed steps before each step, until it is `total`. For data without a sampler."""
        total = whole("total", total)

        def rest() -> Iterator[tuple[int, int]]:
            self._total = total
            while self.completed < total:
                yield 0, self.completed

        yield from self._loop(rest, f"{total} steps")

    @contextlib.contextmanager
    def step(self, backwards: int | None = None) -> Iterator[None]:
        """Take one step: compute gradients inside this context. Its end takes the optimizer's step.

        Gradients are averaged during the last backward pass. When that pass returns they are the mean over all ranks,
        as with DDP, so clip them inside the context. A step in which a peer is lost ends quietly and is not taken. Any
        other exception is passed on. A batch of the loop counts as consumed with the first step that is taken on it.

        Args:
            backwards: how many calls of `backward` on this rank add up to its gradients; nothing is sent before the
                last call. Ranks may have different numbers. A rank with 0 adds nothing to the gradients of the others.
                None: one call for each pass of a step from an `ElasticLoader`, one call with any other data.
        """
        self.meet()
        training = self._state.training
        training.begin(self.world, self._passes if backwards is None else backwards, self._rendezvous.group)
        self._stage, self.stepped = _Stage.MET, False
        try:
            yield
            training.share(self.world, self._rendezvous.group)
            if self._before_step is not None:
                self._before_step()
        except Exception as error:
            lost = self._rendezvous.is_loss(error)
            training.break_off(self._rendezvous.group, lost=lost)
            if not lost:
                raise
            log.info("step %d is broken off: %s", self.completed + 1, in_brief(error))
            return
        self._commit()

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Run the script's own collectives between steps, such as for validation.

        A block in which a peer is lost ends quietly and is not run again. This process goes on, and the loop forms a
        new round before its next step. `round_over` is False if the block was completed on this rank. Other ranks may
        have completed it or not, so its result must not change the training.
        """
        self.meet()
        try:
            yield
        except Exception as error:
            if self._rendezvous.group is None or not self._rendezvous.is_loss(error):
                raise
            self._rendezvous.group.abort()
            log.info("what the ranks did together is broken off: %s", in_brief(error))

    @property
    def round_over(self) -> bool:
        """True if the round is over, so that the loop forms a new one before its next step."""
        return self._rendezvous.round_over

    @property
    def lost(self) -> bool:
        """The older name of `round_over`."""
        return self.round_over

    def meet(self) -> None:
        """Meet the peers: form the group and agree on the state. The loop calls this itself. Idempotent."""
        if self._stage in (_Stage.MET, _Stage.GIVEN):
            return
        if self._stage is _Stage.DONE:  # another loop begins
            self._rendezvous.call_again()
        self._stage = _Stage.MET
        self._regroup()

    def close(self) -> None:
        """Leave the group. Called at exit; idempotent."""
        atexit.unregister(self.close)
        self._rendezvous.close(in_peace=self._stage is _Stage.DONE)

    def _loop(self, rest: Callable[[], Iterator[tuple[int, Any]]], what: str) -> Iterator[Any]:
        """Yield the data of each step, until every member of the round has taken the last step.

        `rest` is called in each round. It yields, for each step that is left, how many samples the whole world takes,
        and the data for the script. `what` names the whole loop in a log line.
        """
        self.meet()
        given = False
        while True:
            for samples, data in rest():
                if self.round_over:
                    break
                self._stage, self._samples = _Stage.GIVEN, samples
                self._passes = len(data) if isinstance(data, Step) else 1
                given = True
                yield data
                if not self._taken():
                    break
            else:
                if not self._all_done():
                    continue
                if not given:
                    log.info("nothing left to do: %s are done", what)
                return
            self._regroup()

    def _regroup(self) -> None:
        self.stepped = False
        self._rendezvous.form()

    def _commit(self) -> None:
        state = self._state
        state.commit(self._samples)
        self._samples = 0  # a second step for the same batch is fine
        self._rendezvous.note_step()
        self.stepped = True
        if state.checkpoints is None:
            return
        try:
            state.checkpoints.taken(state.completed, state.training.parts)
        except Exception as error:  # the step is taken, and a new round decides from where all go on
            if not self._rendezvous.is_loss(error):
                self._rendezvous.release_peers()
                raise
            state.training.break_off(self._rendezvous.group, lost=True)
            log.info("step %d is not saved: %s", state.completed, in_brief(error))

    def _taken(self) -> bool:
        if self._stage is _Stage.GIVEN:
            raise RuntimeError("a batch was taken and no `with elastic.step()` followed: its samples would be lost")
        if self.stepped:
            report_step(self.completed, self._total)
        return self.stepped

    def _all_done(self) -> bool:
        """Wait until every member has taken the last step, and return True.

        If a peer is lost, form a new round and return False, because there may be steps left to take.
        """
        rendezvous, checkpoints = self._rendezvous, self._state.checkpoints
        if rendezvous.has_peers_ahead:  # other members have finished this loop and wait in a later one
            rendezvous.loops += 1
            return True
        try:
            if checkpoints is not None:
                checkpoints.finish(self.completed, self._state.training.parts)
            rendezvous.await_members()
            rendezvous.complete()
        except Exception as error:
            if not rendezvous.is_loss(error):
                rendezvous.release_peers()
                raise
            if not rendezvous.is_complete:  # else a peer was lost after all had taken the last step
                self._regroup()
                return False
        self._stage = _Stage.DONE
        rendezvous.loops += 1
        if not rendezvous.hang_up():  # from now on losses and newcomers do not matter
            self._stage = _Stage.MET  # without an agent all loops have the same group
        if checkpoints is not None:
            checkpoints.wait_stored()
        return True
