"""One process's way from round to round: it meets whoever is there, agrees with them on the state, and goes on.

A round ends when a member is lost or another one comes. Then every member leaves its group, says to its agent that it
can meet, and is given a place in the next round. There the members say how far they are, and all take the state of
whoever is most advanced, or that of the newest checkpoint if none of them has one. Should another one be lost meanwhile
they meet again; nothing has changed then.

Without an agent there is one group, that of torchrun's variables, and no second one.
"""

from __future__ import annotations

import atexit
import gc
import itertools
import logging
import os

import torch.distributed as dist

from resile.api.ids import NO_ROUND, Round
from resile.protocol.worker_to_agent import WorkerAssignment
from resile.torch._loop import state_sync
from resile.torch._loop.collectives import Collectives
from resile.torch._loop.group import Group, GroupLost, time_to_connect
from resile.torch._loop.train_state import TrainState
from resile.torch._support.error_file import in_brief
from resile.torch.progress import enter_round
from resile.wire.rendezvous_client import RendezvousClient

log = logging.getLogger(__name__)

MOST_MEETINGS = 20
"""Meetings of one regrouping that come to nothing in rounds that nobody ended before this process gives up: something
other than a loss is wrong."""
WORD = 0.2
"""Seconds for the word that a round is over to come here after a meeting in vain: a peer may have heard it first."""
LAST_WORDS = 1.0
"""Seconds for peers to take what was said to them before an error."""
MOST_IN_VAIN = 5
"""How often the same processes meet again because a connection broke, without a step in between."""


class StateLost(Exception):
    """Nobody has the whole state any more; the text is one sentence."""


class Rendezvous:
    """The rounds of one process. For one thread; the end of a round is heard by another, and breaks the group off."""

    def __init__(self, state: TrainState, backend: str, timeout: float) -> None:
        """Call the agent, if there is one; the first `form` meets the peers.

        Args:
            state: what the members agree on.
            backend: as for torch's `init_process_group`.
            timeout: seconds that a collective may take.

        Raises:
            RuntimeError: the script has made a process group itself.
        """
        self.rank, self.world = 0, 1
        self.round: Round = NO_ROUND
        self.group: Group | None = None
        """Of this round; None without an agent."""
        self.loops = 0
        """Loops of the script that are over for this process."""
        self._state = state
        self._ranks = Collectives() if state.checkpoints is None else state.checkpoints.ranks
        self._backend = backend
        self._timeout = timeout
        self._agreed_in: Round = NO_ROUND
        self._identity = int.from_bytes(os.urandom(7))
        self._members: frozenset[int] = frozenset()
        self._in_vain = 0
        """Times that this round's members met again since the last step, though none of them was lost."""
        self._furthest = 0
        """Loops that are over for whoever of this round is furthest in the script."""
        self._client = RendezvousClient.from_environment(self._on_over)
        if self._client is not None and dist.is_initialized():
            raise RuntimeError("Elastic makes a process group for each round itself: do not call init_process_group")

    @property
    def lost(self) -> bool:
        """Whether the round is over, so that another one has to be formed."""
        return self.group is not None and self.group.over

    @property
    def has_peers_ahead(self) -> bool:
        """Whether others wait for this process in a later loop of the script."""
        return self.loops < self._furthest

    def form(self) -> None:
        """Be in a round, with the state that its members have agreed on.

        Raises:
            StateLost: there is no such state any more.
            RuntimeError: rounds do not come together, or there is nobody to form one.
        """
        client = self._client
        if client is None:
            self._meet_once()
            return
        self._state.undo()
        in_vain = 0
        for tried in itertools.count():
            if self.group is not None:
                self.group.destroy()
                self.group = None
            assignment = client.ready(self._state.completed, agreed=self._agreed_in)
            group = Group(assignment, self._backend, self._timeout, time_to_connect(tried))
            self.group = self._ranks.group = group
            try:
                if client.over(assignment.round):
                    raise GroupLost(f"round {assignment.round} is over")
                group.form()
                self._enter(assignment, self._agree(self._agreed_in, assignment.rank, assignment.world_size))
            except Exception as error:
                if not isinstance(error, GroupLost) and not (isinstance(error, RuntimeError) and group.broken):
                    self.release_peers()
                    raise
                log.info("met in vain: %s", in_brief(error))
                if client.await_over(assignment.round, WORD):
                    continue  # somebody was lost, or came: however often that is, it is not this process's fault
                in_vain += 1
                if in_vain == MOST_MEETINGS:
                    raise RuntimeError(
                        f"{MOST_MEETINGS} rounds in a row did not come together; the last: {error}"
                    ) from error
                continue
            return

    def await_members(self) -> None:
        """Wait until every member of this round has come here.

        Raises:
            RuntimeError: the group broke.
        """
        self._exchange(self._agreed_in)

    def note_step(self) -> None:
        """A step was taken: nobody has met in vain."""
        self._in_vain = 0

    def is_loss(self, error: Exception) -> bool:
        """Whether an error means that a peer is gone, so that a new round is the answer to it.

        It does if a member has hung up, unless the same processes met again and again and it came back each time; and
        if the master ends the round. Else it is the script's own, whatever it says.
        """
        if self._client is None or self.group is None or not isinstance(error, RuntimeError):
            return False
        if self.group.broken and self._in_vain < MOST_IN_VAIN:
            return True
        return self._client.await_over(self.round, self.group.assignment.verdict)

    def complete(self) -> None:
        """The last step is taken by all: the round is not ended for a newcomer any more."""
        if self._client is not None:
            self._client.complete(self.round)

    def hang_up(self) -> bool:
        """After `complete`: be in no round any more, as far as the agent is concerned; the group stays.

        Whether there is an agent.
        """
        if self._client is None:
            return False
        self._client.close()
        return True

    def release_peers(self) -> None:
        """An error that is no loss is passed on to the script: have no peer wait for what this process does not do.

        Those that pass on the same error still have a moment to hear of it.
        """
        if self.group is not None:
            self.group.abort_in(LAST_WORDS)

    def call_again(self) -> None:
        """After `hang_up`: the next `form` meets the peers anew. What the script did in between stays."""
        self._client = RendezvousClient.from_environment(self._on_over)
        self._state.training.loaded()
        if self.group is not None:
            self.group.destroy(in_peace=True)
            self.group = None

    def close(self, *, in_peace: bool) -> None:
        """Leave the group, and hang up; fine to call twice.

        Args:
            in_peace: nothing is under way. Otherwise the group is broken off first, which frees its other members.
        """
        if self._client is not None:
            self._client.close()
            self._client = None
        if self.group is not None:
            group, self.group, self._ranks.group = self.group, None, None
            group.destroy(in_peace=in_peace)
            self._state.close()
            gc.collect()  # what is left of a gloo group aborts the interpreter if it goes at its exit

    def _on_over(self, round_: Round) -> None:
        """From the listening thread: whatever collective the training is in, end it."""
        group = self.group
        if group is not None and group.round <= round_ and not group.over:
            group.abort()

    def _meet_once(self) -> None:
        """Without an agent: the group that torchrun's variables describe, or none."""
        if self._agreed_in:
            raise RuntimeError("a peer was lost, and nobody is here to form a new round: run this with `resile run`")
        self._agreed_in = Round(1)
        if not dist.is_initialized() and "RANK" in os.environ:
            dist.init_process_group(self._backend)
            atexit.register(_destroy_at_exit)
        if dist.is_initialized():
            self.rank, self.world = dist.get_rank(), dist.get_world_size()
        found = self._agree(NO_ROUND, self.rank, self.world)
        self._state.adopt(found)
        self._state.save_in_memory(found)

    def _agree(self, agreed_in: int, rank: int, world: int) -> state_sync.SyncResult:
        """Come to one state with all members of the group; a living one comes before a checkpoint."""
        state = self._state
        state.resize(rank, world)
        sync = self._exchange(agreed_in)
        self._furthest = sync.loops
        self._in_vain = self._in_vain + 1 if sync.members == self._members else 0
        self._members = sync.members
        if state.checkpoints is not None and (state.rebuilt or not sync.trained):
            restored = state.checkpoints.restore(state.training.parts)
            if restored is not None:
                return state_sync.SyncResult(restored, state_sync.FROM_CHECKPOINT)
        if not state.rebuilt:
            return state_sync.send_newest(sync, state.training.state, self._ranks)
        if state.checkpoints is not None and state.checkpoints.gives_up(sync.trained):
            raise StateLost(
                "no checkpoint is whole any more, and training does not begin anew unless the job is started again"
            )
        return state_sync.SyncResult(0, state_sync.FROM_CHECKPOINT)

    def _exchange(self, agreed_in: int) -> state_sync.StateSync:
        """What everybody says about itself."""
        state = self._state
        standing = state_sync.MemberState(state.completed, agreed_in)
        message = state_sync.SyncMessage(standing, self._identity, self.loops, state.digest() if agreed_in else 0)
        return state_sync.exchange(message, self._ranks)

    def _enter(self, assignment: WorkerAssignment, found: state_sync.SyncResult) -> None:
        """The members have agreed: this process is one of them now."""
        self.rank, self.world, self.round = assignment.rank, assignment.world_size, assignment.round
        _tell_script(assignment)
        enter_round(assignment.round)
        self._state.adopt(found)
        self._agreed_in = assignment.round
        self._state.save_in_memory(found)
        log.info(
            "round %d: rank %d of %d at step %d, state of %s (%d bytes)",
            assignment.round,
            self.rank,
            self.world,
            self._state.completed,
            f"rank {found.source}" if found.source != state_sync.FROM_CHECKPOINT else "a checkpoint",
            found.sent,
        )


def _tell_script(assignment: WorkerAssignment) -> None:
    """The variables that a script may look at, as torchrun would have set them for this round."""
    os.environ.update(
        RANK=str(assignment.rank),
        WORLD_SIZE=str(assignment.world_size),
        LOCAL_RANK=str(assignment.local_rank),
        LOCAL_WORLD_SIZE=str(assignment.local_world_size),
        GROUP_RANK=str(assignment.group_rank),
        GROUP_WORLD_SIZE=str(assignment.group_world_size),
        ROLE_RANK=str(assignment.rank),
        ROLE_WORLD_SIZE=str(assignment.world_size),
        MASTER_ADDR=assignment.master_addr,
        MASTER_PORT=str(assignment.master_port),
        RESILE_ROUND=str(assignment.round),
    )


def _destroy_at_exit() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
