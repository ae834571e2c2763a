"""Takes one process from round to round: it joins the other members, agrees with them on the state, and goes on.

A round ends when a member is lost or a newcomer joins. Then every member leaves its group, tells its agent that it is
ready, and is assigned a rank in the next round. There the members exchange how many steps they have taken. All take the
state of the most advanced member, or that of the newest checkpoint if no member has trained. If a member is lost
meanwhile, the others meet again, and nothing has changed.

Without an agent there is only one group, the one that torchrun's variables describe.
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
from resile.torch._loop.group import CONNECT, Group, GroupLost
from resile.torch._loop.train_state import TrainState
from resile.torch._support.error_file import in_brief
from resile.wire.agent_client import AgentClient
from resile.wire.rendezvous_client import RendezvousClient

log = logging.getLogger(__name__)

MOST_MEETINGS = 20
"""How many meetings may fail in one regrouping, in rounds that the master did not end, before this process gives up.
Something other than a loss is wrong then."""
OVER_NEWS = 0.2
"""Seconds to wait after a failed meeting for the agent to say that the round is over, as peers may know it earlier."""
RELEASE_AFTER = 1.0
"""Seconds for peers to receive this process's last messages before an error ends it."""
MOST_IN_VAIN = 5
"""How often the same processes may meet again without a step in between before an error is the script's own."""


class StateLost(Exception):
    """No rank and no checkpoint has the whole state any more; the text is one sentence."""


class Rendezvous:
    """Takes one process from round to round. Only the training thread calls its public methods.

    A thread of `RendezvousClient` learns from the agent that a round is over, and aborts the round's group.
    """

    def __init__(self, state: TrainState, backend: str, timeout: float) -> None:
        """Connect to the agent, if there is one. The first `form` meets the peers.

        A collective may take `timeout` seconds. Raises RuntimeError if the script has made a process group itself.
        """
        self.rank, self.world = 0, 1
        self.round: Round = NO_ROUND
        self.group: Group | None = None
        """The group of this round; None without an agent."""
        self.loops = 0
        self._state = state
        self._ranks = Collectives() if state.checkpoints is None else state.checkpoints.ranks
        self._backend = backend
        self._timeout = timeout
        self._holds: Round = NO_ROUND
        """The round in which this process last agreed on a state."""
        self._identity = int.from_bytes(os.urandom(7))
        self._members: frozenset[int] = frozenset()
        self._in_vain = 0
        """How often the members of this round met again since the last step although none of them was lost."""
        self._furthest = 0
        """How many loops the member that is furthest in the script has finished."""
        self._client = RendezvousClient.from_environment(self._on_over)
        if self._client is not None and dist.is_initialized():
            raise RuntimeError("Elastic makes a process group for each round itself: do not call init_process_group")

    @property
    def round_over(self) -> bool:
        """True if the round is over. Then call `form` to enter the next round."""
        return self.group is not None and self.group.over

    @property
    def has_peers_ahead(self) -> bool:
        """True if other members have finished this training loop and wait for this process in the script's next one."""
        return self.loops < self._furthest

    def form(self) -> None:
        """Enter the next round, with the state on which its members agree.

        Raises StateLost if no member and no checkpoint has a whole state. Raises RuntimeError if no process group was
        formed in several tries. Without an agent there is only one round, and a second call raises RuntimeError.
        """
        client = self._client
        if client is None:
            self._meet_once()
            return
        self._state.undo()
        in_vain = 0
        for meeting in itertools.count(1):
            if self.group is not None:
                self.group.destroy()
                self.group = None
            assignment = client.ready(self._state.completed, holds=self._holds)
            group = Group(assignment, self._backend, self._timeout, CONNECT.after(meeting))
            self.group = group
            self._ranks.group = group
            try:
                if client.over(assignment.round):
                    raise GroupLost(f"round {assignment.round} is over")
                group.form()
                self._enter(assignment, self._agree(assignment.rank, assignment.world_size))
                return
            except Exception as error:
                if not isinstance(error, GroupLost) and not (isinstance(error, RuntimeError) and group.broken):
                    self.release_peers()
                    raise
                log.info("met in vain: %s", in_brief(error))
                if client.await_over(assignment.round, OVER_NEWS):
                    continue  # a member was lost or came, which is not this process's fault, however often it happens
                in_vain += 1
                if in_vain == MOST_MEETINGS:
                    raise RuntimeError(
                        f"{MOST_MEETINGS} rounds in a row did not come together; the last: {in_brief(error)}"
                    ) from error

    def await_members(self) -> None:
        """Wait until every member of this round has called this method. Raises RuntimeError if the group broke."""
        self._exchange()

    def note_step(self) -> None:
        """Note that a step was taken. For `is_loss`, only the meetings since the last step count."""
        self._in_vain = 0

    def is_loss(self, error: Exception) -> bool:
        """True if an error in a step means that a peer is gone. Then the loop goes on in a new round.

        A peer is gone if a member has disconnected, or if the master ends the round. This method waits a while for the
        master. Any other error is the script's own, and the result is False. If the same processes have met again
        `MOST_IN_VAIN` times without a step in between, only the master's word counts.
        """
        if self._client is None or self.group is None or not isinstance(error, RuntimeError):
            return False
        if self.group.broken and self._in_vain < MOST_IN_VAIN:
            return True
        return self._client.await_over(self.round, self.group.assignment.verdict_within)

    def complete(self) -> None:
        """Report that all members have taken the last step. From now on a node that joins does not end the round.

        Raises GroupLost if the round is over already. The other members learn this too, and all meet in a new round.
        """
        if self._client is None or self.group is None:
            return
        if not self._client.complete(self.round, self.group.assignment.verdict_within):
            raise GroupLost(f"round {self.round} is over")

    @property
    def is_complete(self) -> bool:
        """True if all members are known to have taken the last step of this loop, so none of them is needed."""
        return self._client is not None and self._client.is_complete(self.round)

    def hang_up(self) -> bool:
        """Disconnect from the agent but stay in the group. Call `complete` before. Returns False without an agent."""
        if self._client is None:
            return False
        self._client.close()
        return True

    def release_peers(self) -> None:
        """Abort the group in `RELEASE_AFTER` seconds. Until then, peers can receive the error that this process met."""
        if self.group is not None:
            self.group.abort_in(RELEASE_AFTER)

    def call_again(self) -> None:
        """Leave the group and connect to the agent again. Call this after `hang_up`, if another loop begins.

        Changes that the script has made to the state in the meantime are kept.
        """
        self._client = RendezvousClient.from_environment(self._on_over)
        self._state.training.loaded()
        if self.group is not None:
            self.group.destroy(in_peace=True)
            self.group = None

    def close(self, *, in_peace: bool) -> None:
        """Leave the group and disconnect from the agent. Idempotent. `in_peace` is as for `Group.destroy`."""
        if self._client is not None:
            self._client.close()
            self._client = None
        if self.group is not None:
            group, self.group = self.group, None
            self._ranks.group = None
            group.destroy(in_peace=in_peace)
            self._state.close()
            gc.collect()  # remains of a gloo group would abort the interpreter at its exit

    def _on_over(self, round_: Round) -> None:
        group = self.group
        if group is not None and group.round <= round_ and not group.over:
            group.abort()

    def _meet_once(self) -> None:
        """Enter the only round that there is without an agent. Torchrun's variables, if set, describe its group."""
        if self._holds:
            raise RuntimeError("a peer was lost, and there is no agent to form a new round: run this with `resile run`")
        if not dist.is_initialized() and "RANK" in os.environ:
            dist.init_process_group(self._backend)
            atexit.register(_destroy_at_exit)
        if dist.is_initialized():
            self.rank, self.world = dist.get_rank(), dist.get_world_size()
        found = self._agree(self.rank, self.world)
        self._state.adopt(found)
        self._holds = Round(1)
        self._state.save_in_memory(found)

    def _agree(self, rank: int, world: int) -> state_sync.SyncResult:
        """Agree with all members on the state to go on from. A collective.

        If a member has trained and the model is not sharded, all take the state of the most advanced member. Otherwise
        all restore the newest checkpoint. If there is no checkpoint, a sharded model begins anew, and with any other
        model all take the state of one member. Raises StateLost if the model is sharded and its trained state is lost.
        """
        state = self._state
        state.resize(rank, world)
        sync = self._exchange()
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

    def _exchange(self) -> state_sync.StateSync:
        state = state_sync.MemberState(self._state.completed, self._holds)
        digest = self._state.digest() if self._holds else 0
        return state_sync.exchange(state_sync.SyncMessage(state, self._identity, self.loops, digest), self._ranks)

    def _enter(self, assignment: WorkerAssignment, found: state_sync.SyncResult) -> None:
        self.rank, self.world, self.round = assignment.rank, assignment.world_size, assignment.round
        _tell_script(assignment)
        if (channel := AgentClient.from_environment()) is not None:
            channel.round = assignment.round  # steps are reported as steps of this round from now on
        self._state.adopt(found)
        self._holds = assignment.round
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
