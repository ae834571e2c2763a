"""What a master says to an agent. An agent that was not connected is told when it says Hello again."""

from __future__ import annotations

from resile.api.ids import NodeKey, Rank, Round
from resile.protocol.message import Message
from resile.protocol.reports import RoundAssignment, WorkerFailure
from resile.protocol.shards import ShardAnswer


class Welcome(Message, frozen=True, kw_only=True):
    """The master knows this agent."""

    node: NodeKey
    rank: Rank
    heartbeat: float
    heartbeat_timeout: float
    regroup_grace: float
    exit_grace: float
    elastic: bool = False
    """The job's processes meet without restarts: start yours before you join."""


class Refused(Message, frozen=True, kw_only=True):
    """The master will not serve this peer; `because` is one sentence for its user. The connection ends."""

    because: str


class RoundFormed(Message, frozen=True, kw_only=True):
    """The node is a member of `round`: it starts its processes, or lets its elastic ones regroup."""

    round: Round
    assignment: RoundAssignment


class RoundOver(Message, frozen=True, kw_only=True):
    """Stop the processes of `round` and join again: somebody was lost, or somebody waits to come in.

    To an elastic training process its agent says the same words: break off the collectives of `round` and be ready.
    """

    round: Round
    because: str
    elastic: bool = False
    """The job's processes meet without restarts: let yours live, even those that are still starting."""
    lost: bool = False
    """A member was lost, or leaves: what is saved in memory is to reach storage."""


class StateHeld(Message, frozen=True, kw_only=True):
    """Answer to Stuck, now or later: another node has the state of `round`, so who does not leave it may be killed."""

    round: Round


class Leave(Message, frozen=True, kw_only=True):
    """This node is no longer part of the job: stop and exit with `exit_code`."""

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
"""What an agent hears from its master."""
