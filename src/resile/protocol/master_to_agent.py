"""What a master says to an agent. An agent that was not connected learns the state when it says Hello again."""

from __future__ import annotations

from resile.api.ids import NodeKey, Rank, Round
from resile.protocol.message import Message
from resile.protocol.reports import RoundAssignment, WorkerFailure
from resile.protocol.shards import ShardAnswer


class Welcome(Message, frozen=True, kw_only=True):
    """Answer to Hello: the master has admitted this agent as `node`."""

    node: NodeKey
    rank: Rank
    heartbeat: float
    heartbeat_timeout: float
    kill_grace: float
    exit_grace: float
    elastic: bool = False
    """True if the job's processes join rounds without restarts, so this agent starts its processes before it joins."""


class Refused(Message, frozen=True, kw_only=True):
    """The master closes this connection without serving it; `because` says why, in one sentence for the peer's user."""

    because: str


class RoundFormed(Message, frozen=True, kw_only=True):
    """The node is a member of `round`. The agent starts its processes, or lets elastic processes regroup."""

    round: Round
    assignment: RoundAssignment


class RoundOver(Message, frozen=True, kw_only=True):
    """`round` is over because a member was lost or a node waits to join. The agent stops its processes and joins again.

    An agent also sends this message to its elastic training processes. They leave their collectives and report ready.
    """

    round: Round
    because: str
    elastic: bool = False
    """True if the job's processes join rounds without restarts, so the agent does not stop its processes."""
    lost: bool = False
    """True if a member was lost or leaves, so the agent brings the checkpoints in memory to storage."""


class RoundComplete(Message, frozen=True, kw_only=True):
    """Answer to LastStepTaken, sent to all members of `round`: a newcomer no longer ends the round.

    If the round was over before, the answer is RoundOver. An agent passes either answer on to its training processes.
    """

    round: Round


class StateHeld(Message, frozen=True, kw_only=True):
    """Answer to WorkerStuck, perhaps later: another node has the state of `round`. The stuck process may be killed."""

    round: Round


class Leave(Message, frozen=True, kw_only=True):
    """This node is no longer part of the job: the agent stops and exits with `exit_code`."""

    because: str
    exit_code: int


class JobOver(Message, frozen=True, kw_only=True):
    succeeded: bool
    reason: str
    message: str
    failure: WorkerFailure | None = None
    """The failure that came first; `failed_node` is the node that reported it."""
    failed_node: str = ""


MasterMessage = Welcome | Refused | RoundFormed | RoundOver | RoundComplete | StateHeld | Leave | JobOver | ShardAnswer
