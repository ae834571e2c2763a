"""What a training process and its own agent say to each other, over a Unix socket."""

from __future__ import annotations

from resile.api.ids import NO_ROUND, Round
from resile.protocol.agent_to_master import LastStepTaken, StepReport
from resile.protocol.master_to_agent import RoundComplete, RoundOver
from resile.protocol.message import Message
from resile.protocol.shards import ShardMessage


class Attach(Message, frozen=True, kw_only=True):
    """The first message of a training process to its agent."""

    worker: str


class WorkerReady(Message, frozen=True, kw_only=True):
    """An elastic training process is in no round and can join one. It opens a separate connection for this message."""

    worker: str
    step: int
    holds: Round = NO_ROUND
    """The newest round in which it agreed on one state with all members. Since then they differ by at most one step."""


class WorkerAssignment(Message, frozen=True, kw_only=True):
    """Answer to WorkerReady, perhaps later: the ranks of the process in a new round, named as torchrun's variables."""

    round: Round
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    group_rank: int
    group_world_size: int
    master_addr: str
    master_port: int
    verdict_within: float = 3.0
    """Seconds that the process waits after an error for the master to end the round, if no peer hung up."""


WorkerMessage = Attach | StepReport | WorkerReady | LastStepTaken | ShardMessage
RendezvousMessage = WorkerAssignment | RoundOver | RoundComplete
"""Messages to an elastic training process, on the connection on which it sent `WorkerReady`."""
