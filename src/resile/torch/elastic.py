"""A few lines around an ordinary training loop, and the loss of a peer costs a moment instead of a restart.

    sampler = ElasticBatchSampler(len(dataset), batch_size=32)
    loader = DataLoader(dataset, batch_sampler=sampler)
    elastic = Elastic(model, optimizer, sampler=sampler)
    for share, (inputs, labels) in elastic.epochs(3, loader):
        with elastic.step():
            loss = criterion(model(inputs), labels)
            (loss * share.weight).backward()

The backward pass averages the gradients over all ranks, as with DDP; the end of `with elastic.step()` takes the
optimizer's step and counts it. When a peer is lost, in whatever collective this process is, the step is broken off:
nothing of it is kept. The processes that are left (and, later, those that come) form a new group, take the state of
whoever is most advanced, and the rest of the epoch is dealt anew. The process is not restarted, no checkpoint is read,
every sample enters the model exactly once.

With a `checkpointer` all of it is saved in one commit, and the loop goes on from the newest one when there is nobody
left who has the state: when all processes were killed at once, or the whole job is started again.

A model that is sharded (`fully_shard`) belongs to one group, and a lost rank takes the only copy of its shard along. So
every round builds it anew with a function, and goes on from the newest checkpoint that is whole, dealt to its ranks:

    def build():
        model = Transformer()
        fully_shard(model)
        return model, torch.optim.AdamW(model.parameters())

    elastic = Elastic(build=build, sampler=sampler, checkpointer=Checkpointer("checkpoints", store_every=1000))
    for share, (inputs, labels) in elastic.epochs(3, loader):
        with elastic.step():
            loss = criterion(elastic.model(inputs), labels)  # another model after a loss
            (loss * share.weight).backward()

What it asks: all that makes up the training is in `model`, `optimizer`, `sampler`, `scheduler` and `state`, and changes
at the end of a step alone (a model's buffers are put back if a step is broken off). Code after the `with` runs for a
broken step, too: ask `elastic.stepped`. Collectives of its own between two steps belong into `with elastic.together()`.
Under plain torchrun or python the same script runs; a loss ends it, as ever.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from resile.api.ids import NO_ROUND, Round
from resile.torch import repair
from resile.torch.group import Group, GroupLost, default_backend, time_to_connect
from resile.torch.keeping import Keeping
from resile.torch.loader import ElasticLoader, Step, dealt
from resile.torch.progress import enter_round, report_step
from resile.torch.sampler import ElasticBatchSampler
from resile.torch.training import Built, Stateful, Training, built_of, others_of
from resile.wire.messages import Placed
from resile.wire.rounds import RoundLine

if TYPE_CHECKING:
    from resile.torch.checkpointer import Checkpointer

log = logging.getLogger(__name__)

TIMEOUT = 1800.0
"""Seconds that a collective may take; torch's own default."""
MOST_MEETINGS = 20
"""Meetings in a row that come to nothing before this process gives up: something other than a loss is wrong."""
MOST_IN_VAIN = 5
"""How often the same processes meet again because a connection broke, without a step in between."""
VERDICT = 3.0
"""Seconds for the master to end the round after an error although nobody hung up. It hears of a process's end at once
and of a node's silence after a fifth of the recovery budget (2 s by default)."""


class LostForGood(Exception):
    """Nobody has the whole state any more; the text is one sentence."""


class Elastic:
    """One process's part in elastic training."""

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
        timeout: float = TIMEOUT,
    ) -> None:
        """Prepare; the first of `epochs`, `steps` or `meet` meets the peers.

        Args:
            model: not wrapped in DDP: gradients are averaged here.
            optimizer: of the model's parameters.
            build: instead of a model and its optimizer, for sharded models: makes both, and maybe a scheduler, in the
                group of each round anew, the same on every rank. Needs a checkpointer.
            sampler: deals the samples, or loads them, too; its rank and world are set here, and its position belongs
                to the state.
            scheduler: takes a step with every step of the optimizer.
            state: whatever else has to be the same everywhere, by name.
            before_step: called between averaging and the optimizer's step: the place to change `state`, as the last
                thing that it does: a loss before that breaks the step off.
            checkpointer: keeps all of the above, and gives it back when no process is left that has it.
            every: steps between two checkpoints.
            completed: steps already taken, if the state comes from elsewhere.
            backend: as for torch's `init_process_group`; None: nccl with a GPU, else gloo.
            timeout: seconds that a collective may take.
        """
        if checkpointer is not None and completed:
            raise ValueError("completed: with a checkpointer, the number of steps comes from its checkpoints")
        if build is not None and checkpointer is None:
            raise ValueError("build: a model that is built for each round needs a checkpointer to be loaded from")
        self.sampler = sampler
        self.completed = completed
        """Steps taken, by whoever took them."""
        self.stepped = False
        """Whether the last `with elastic.step()` was taken; False: a peer was lost, and its samples will come again."""
        self.rank, self.world = 0, 1
        self.round: Round = NO_ROUND
        self._before_step = before_step
        self._backend = backend or default_backend()
        self._timeout = timeout
        self._build = build
        self._others = others_of(sampler, state or {})
        self._training: Training | None = None
        if build is None:
            self._training = Training(built_of(model, optimizer, scheduler), self._others)
        elif not (model is optimizer is scheduler is None):
            raise ValueError("build: it makes model, optimizer and scheduler itself; give them or a function")
        self._keeping = Keeping(checkpointer, every) if checkpointer is not None else None
        self._agreed_in: int = NO_ROUND
        self._identity = int.from_bytes(os.urandom(7))
        self._members: frozenset[int] = frozenset()
        self._in_vain = 0
        """Times that this round's members met again since the last step, though none of them was lost."""
        self._group: Group | None = None
        self._met = False
        self._asked = False
        self._done = False
        """Whether the last loop is over, and nobody is waited for."""
        self._loops = self._furthest = 0
        """Loops that are over for this process, and for whoever of this round is furthest in the script."""
        self._samples = 0
        self._passes = 1
        self._total = 0
        self._line = RoundLine.from_environment(self._round_over)
        if self._line is not None and dist.is_initialized():
            raise RuntimeError("Elastic makes a process group for each round itself: do not call init_process_group")
        atexit.register(self.close)

    @property
    def model(self) -> torch.nn.Module:
        """The model; if it is built for each round, that of this one."""
        return self._running.model

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The model's optimizer."""
        return self._running.optimizer

    # the loop ---------------------------------------------------------------------------------------------------------

    def epochs(self, count: int, loader: Iterable[Any]) -> Iterator[Any]:
        """The steps of `count` epochs, from where the sampler stands.

        Of an `ElasticLoader` they are what it gives. Any other loader asks the sampler for its batches; they come with
        this rank's share of the step: (share, batch). Returns when every member of the round has taken the last step.
        """
        sampler = self.sampler
        if sampler is None:
            raise ValueError("epochs() needs a sampler: give one to Elastic, or use steps()")
        self.meet()
        while True:
            while sampler.epoch < count:
                self._total = self._steps_until(count)
                for samples, batch in dealt(sampler, loader):
                    if self.lost:
                        break
                    self._asked, self._samples = False, samples
                    self._passes = len(batch) if isinstance(batch, Step) else 1
                    yield batch
                    if not self._taken():
                        break
                else:
                    sampler.set_epoch(sampler.epoch + 1)
                    continue
                self._regroup()
            if self._all_done():
                return

    def steps(self, total: int) -> Iterator[int]:
        """The numbers of the steps up to `total`, from where training stands: for data that no sampler deals."""
        self.meet()
        self._total = total
        while True:
            while self.completed < total:
                if not self.lost:
                    self._asked = False
                    yield self.completed
                    if self._taken():
                        continue
                self._regroup()
            if self._all_done():
                return

    @contextlib.contextmanager
    def step(self, backwards: int | None = None) -> Iterator[None]:
        """One step: compute gradients inside. At the end the optimizer's step is taken.

        Gradients are averaged during the last backward pass. When it returns they are the mean over all ranks, as with
        DDP: clip them inside, too. A step in which a peer is lost ends quietly and is not taken; any other exception is
        passed on. A batch that the loop gave counts with the first step that is taken after it.

        Args:
            backwards: how often `backward` is called, on this rank, for gradients to add up: nothing is sent before the
                last time. Ranks may have different numbers; with 0 a rank adds nothing to the gradients of the others.
                None: once for each pass of the step that an `ElasticLoader` gave, and once with any other data.
        """
        self.meet()
        training = self._running
        training.begin(self.world, self._passes if backwards is None else backwards, self._group)
        self._asked, self.stepped = True, False
        try:
            yield
            training.share()
            if self._before_step is not None:
                self._before_step()
        except Exception as error:
            lost = self._is_loss(error)
            self._break_off(lost)
            if not lost:
                raise
            log.info("step %d is broken off: %s", self.completed, str(error).partition("\n")[0])
            return
        self._commit()

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Collectives of the script's own, between steps, to validate a model, say: a loss does not end this process.

        A block in which a peer is lost ends quietly, and is not run again; the loop forms a new round before its next
        step. Ask `lost` whether it came to its end here. On other ranks it may have, so what it gave must not change
        the training.
        """
        self.meet()
        try:
            yield
        except Exception as error:
            if self._group is None or not self._is_loss(error):
                raise
            self._group.abort()
            log.info("what the ranks did together is broken off: %s", str(error).partition("\n")[0])

    @property
    def lost(self) -> bool:
        """Whether the round is over, so that the loop forms a new one before its next step."""
        return self._group is not None and self._group.over

    # rounds -----------------------------------------------------------------------------------------------------------

    def meet(self) -> None:
        """Form the group and agree on the state, if that has not been done; called by the loop itself."""
        if self._met:
            return
        self._met = True
        if self._done:  # with another loop: what the script did in between stays
            self._done = False
            self._line = RoundLine.from_environment(self._round_over)
            self._running.loaded()
            if self._group is not None:
                self._group.destroy(in_peace=True)
                self._group = None
        self._regroup()

    def close(self) -> None:
        """Leave the group. Called at exit; fine to call twice."""
        atexit.unregister(self.close)
        if self._line is not None:
            self._line.close()
            self._line = None
        if self._group is not None:
            group, self._group = self._group, None
            group.destroy(in_peace=self._done)
            if self._training is not None:
                self._training.close()
            gc.collect()  # what is left of a gloo group aborts the interpreter if it goes at its exit

    def _round_over(self, round_: Round) -> None:
        """From the listening thread: whatever collective the training is in, end it."""
        group = self._group
        if group is not None and group.round <= round_ and not group.over:
            group.abort()

    def _regroup(self) -> None:
        self.stepped = False
        if self._line is None:
            self._meet_once()
            return
        if self._training is not None:
            self._training.undo()
        why: Exception | None = None
        for in_vain in range(MOST_MEETINGS):
            if self._group is not None:
                self._group.destroy()
                self._group = None
            placed = self._line.ready(self.completed)
            self._group = group = Group(placed, self._backend, self._timeout, time_to_connect(in_vain))
            try:
                if self._line.over(placed.round):
                    raise GroupLost(f"round {placed.round} is over")
                group.form()
                found = self._agree(self._agreed_in, placed.rank, placed.world_size)
                self._enter(placed, found)
            except RuntimeError as error:
                if not isinstance(error, GroupLost) and not group.broken:
                    raise
                log.info("met in vain: %s", str(error).partition("\n")[0])
                why = error
                continue
            return
        raise RuntimeError(f"{MOST_MEETINGS} rounds in a row did not come together; the last: {why}")

    def _meet_once(self) -> None:
        """Without an agent: the group that torchrun's variables describe, or none."""
        if self._agreed_in:
            raise RuntimeError("a peer was lost, and nobody is here to form a new round: run this with `resile run`")
        self._agreed_in = 1
        if not dist.is_initialized() and "RANK" in os.environ:
            dist.init_process_group(self._backend)
            atexit.register(_destroy_at_exit)
        if dist.is_initialized():
            self.rank, self.world = dist.get_rank(), dist.get_world_size()
        found = self._agree(NO_ROUND, self.rank, self.world)
        self._take_in(found)
        self._keep_from_here(found)

    def _agree(self, agreed_in: int, rank: int, world: int) -> repair.Agreement:
        """Come to one state with all members of the group; a living one comes before a checkpoint."""
        if self.sampler is not None:  # first, so that it says what is left for each of these ranks
            self.sampler.resize(rank, world)
        training = self._rebuilt() if self._build is not None else self._running
        meeting = self._heard(agreed_in, world)
        self._furthest = meeting.loops
        self._in_vain = self._in_vain + 1 if meeting.members == self._members else 0
        self._members = meeting.members
        if self._keeping is not None and (self._build is not None or not meeting.trained):
            restored = self._keeping.restore(training.parts)
            if restored is not None:
                return repair.Agreement(restored, repair.NOBODY)
        if self._build is None:
            return repair.agree(meeting, training.state, rank, training.device, self._group)
        if meeting.trained:
            raise LostForGood(f"no checkpoint is whole any more, so step {self.completed} cannot be gone on from")
        return repair.Agreement(0, repair.NOBODY)

    def _heard(self, agreed_in: int, world: int) -> repair.Meeting:
        """What everybody says about itself."""
        training = self._running
        digest = training.digest() if agreed_in and self._build is None else 0
        word = repair.Word(repair.Standing(self.completed, agreed_in), self._identity, self._loops, digest)
        return repair.meet(word, world, training.device, self._group)

    def _rebuilt(self) -> Training:
        """A model for this group. What the last one had is a part of a state whose other parts may be lost."""
        assert self._build is not None
        if self._training is not None:
            self._training.close()
            self._training = None
            gc.collect()  # the old shards go before the new ones come
        self._training = Training(self._build(), self._others)
        return self._training

    def _enter(self, placed: Placed, found: repair.Agreement) -> None:
        """The members have agreed: this process is one of them now."""
        self.rank, self.world, self.round = placed.rank, placed.world_size, placed.round
        _tell_script(placed)
        enter_round(placed.round)
        self._take_in(found)
        self._agreed_in = placed.round
        self._keep_from_here(found)
        log.info(
            "round %d: rank %d of %d at step %d, state of %s (%d bytes)",
            placed.round,
            self.rank,
            self.world,
            self.completed,
            f"rank {found.source}" if found.source != repair.NOBODY else "a checkpoint",
            found.sent,
        )

    def _take_in(self, found: repair.Agreement) -> None:
        """Have the state that was agreed on. Nobody is waited for."""
        if found.received is not None:
            if self._keeping is not None:
                self._keeping.before_update()
            self._running.load(found.received)
        elif found.source == repair.NOBODY:
            self._running.loaded()
        self.completed = found.step

    def _keep_from_here(self, found: repair.Agreement) -> None:
        """Have the state in memory wherever it is not yet: who joined has none, and shards are others in this world."""
        if self._keeping is None:
            return
        if found.source != repair.NOBODY:
            self._keeping.enter(self._running.parts)
        if self._build is not None or (found.sent and found.step):
            self._keeping.save(found.step, self._running.parts, store=False)

    @property
    def _running(self) -> Training:
        if self._training is None:
            raise RuntimeError("the model is built when the peers have met: in `epochs` or `steps`, or by `meet()`")
        return self._training

    # steps ------------------------------------------------------------------------------------------------------------

    def _commit(self) -> None:
        """The one moment at which the state changes. No collective is in that, so a loss cannot divide it."""
        if self._keeping is not None:
            self._keeping.before_update()
        training = self._running
        training.update()
        if self.sampler is not None:
            self.sampler.advance(self._samples)
            self._samples = 0  # a second step for the same batch is fine
        self.completed += 1
        self._in_vain = 0
        self.stepped = True
        if self._keeping is None:
            return
        try:
            self._keeping.taken(self.completed, training.parts)
        except RuntimeError as error:  # the step is taken; a new round says from where all go on
            if not self._is_loss(error):
                raise
            self._break_off(lost=True)
            log.info("step %d is not saved: %s", self.completed, str(error).partition("\n")[0])

    def _taken(self) -> bool:
        """Whether the step that the loop was given is in the model now; if so it is told."""
        if not self._asked:
            raise RuntimeError("a batch was taken and no `with elastic.step()` followed: its samples would be lost")
        if self.stepped:
            report_step(self.completed, self._total)
        return self.stepped

    def _steps_until(self, epochs: int) -> int:
        """How many steps it will have been in this world at the end of so many epochs; 0: nobody knows."""
        sampler = self.sampler
        if sampler is None or sampler.size is None:
            return 0
        return self.completed + len(sampler) + (epochs - sampler.epoch - 1) * sampler.steps_per_epoch

    def _all_done(self) -> bool:
        """Whether every member has taken the last step, so that nobody is needed any more; if not, a new round."""
        if self._loops < self._furthest:  # it is over for others already, who wait for this process in a later one
            self._loops += 1
            return True
        try:
            if self._keeping is not None:
                self._keeping.finish(self.completed, self._running.parts)
            self._heard(self._agreed_in, self.world)
        except RuntimeError as error:
            if not self._is_loss(error):
                raise
            self._regroup()
            return False
        self._done = True
        self._loops += 1
        if self._keeping is not None:
            self._keeping.settle()
        if self._line is not None:
            self._line.close()
            self._met = False  # another loop meets again
        return True

    def _break_off(self, lost: bool) -> None:
        """Nothing of this step is under way any more. Peers that wait for the rest of it are not left waiting."""
        if self._group is not None and (lost or self._running.under_way):
            self._group.abort()
            self._running.abandon()

    def _is_loss(self, error: Exception) -> bool:
        """Whether an error means that a peer is gone, so that a new round is the answer to it.

        It does if a member has hung up, unless the same processes met again and again and it came back each time; and
        if the master ends the round. Else it is the script's own, whatever it says.
        """
        if self._line is None or self._group is None or not isinstance(error, RuntimeError):
            return False
        if self._group.broken and self._in_vain < MOST_IN_VAIN:
            return True
        return self._line.await_over(self.round, VERDICT)


def _tell_script(placed: Placed) -> None:
    """The variables that a script may look at, as torchrun would have set them for this round."""
    os.environ.update(
        RANK=str(placed.rank),
        WORLD_SIZE=str(placed.world_size),
        LOCAL_RANK=str(placed.local_rank),
        LOCAL_WORLD_SIZE=str(placed.local_world_size),
        GROUP_RANK=str(placed.group_rank),
        GROUP_WORLD_SIZE=str(placed.group_world_size),
        ROLE_RANK=str(placed.rank),
        ROLE_WORLD_SIZE=str(placed.world_size),
        MASTER_ADDR=placed.master_addr,
        MASTER_PORT=str(placed.master_port),
        RESILE_ROUND=str(placed.round),
    )


def _destroy_at_exit() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
