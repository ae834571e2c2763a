"""What a master says to an agent. An agent that was not connected learns the state when it says Hello again."""

from __future__ import annotations

from resile.api.ids import NodeKey, Rank, Round
from resile.protocol.message import Message
from resile.protocol.reports import RoundAssignment, WorkerFailure
from resile.protocol.shards import ShardAnswer


class Welcome(Message, frozen=True, kw_only=True):
    """The master has admitted this agent."""

    node: NodeKey
    rank: Rank
    heartbeat: float
    heartbeat_timeout: float
    kill_grace: float
    exit_grace: float
    elastic: bool = False
    """The job's processes join rounds without restarts, so this agent starts its own before it joins."""


class Refused(Message, frozen=True, kw_only=True):
    """The master will not serve this peer; `because` is one sentence for its user. The connection ends."""

    because: str


class RoundFormed(Message, frozen=True, kw_only=True):
    """The node is a member of `round`: it starts its processes, or lets its elastic ones regroup."""

    round: Round
    assignment: RoundAssignment


class RoundOver(Message, frozen=True, kw_only=True):
    """The agent stops the processes of `round` and joins again: a member was lost, or a node waits to join.

    An agent sends the same message to its elastic training processes, which leave their collectives and report ready.
    """

    round: Round
    because: str
    elastic: bool = False
    """The job's processes join rounds without restarts, so the agent lets its own live."""
    lost: bool = False
    """A member was lost, or leaves, so checkpoints in memory are to reach storage."""


class StateHeld(Message, frozen=True, kw_only=True):
    """Answer to WorkerStuck, now or later: another node has the state of `round`, so the process may be killed."""

    round: Round


class Leave(Message, frozen=True, kw_only=True):
    """This node is no longer part of the job: the agent stops and exits with `exit_code`."""

    because: str
    exit_code: int


class JobOver(Message, frozen=True, kw_only=True):
    """The job has ended."""

    succeeded: bool
    reason: str
    message: str
    failure: WorkerFailure | None = None
    """The failure that came first, and the node it came from."""
    failed_node: str = ""


MasterMessage = Welcome | Refused | RoundFormed | RoundOver | StateHeld | Leave | JobOver | ShardAnswer
"""Messages of a master to an agent."""
