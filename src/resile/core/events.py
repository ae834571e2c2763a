"""Events: what can happen to a job. Every event is plain data, so a journal of events is the job's whole history.

`AgentSaid` and `AgentConnected` hold the messages of agents unchanged, so a new message needs no new event.
"""

from __future__ import annotations

import msgspec

from resile.api.ids import NodeKey, Round
from resile.protocol.agent_to_master import AgentMessage, Hello
from resile.protocol.job_changes import Change
from resile.protocol.reports import NodeEnd, NodeStatus


class Event(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True, gc=False):
    """Base of all events. The type's name is the tag in the journal."""


class Started(Event, frozen=True, kw_only=True):
    """The job begins."""


class MasterReturned(Event, frozen=True, kw_only=True):
    """A new master has read the journal. No agent is connected yet; all are expected to connect again."""


class NodeSeen(Event, frozen=True, kw_only=True):
    node: NodeKey
    status: NodeStatus
    end: NodeEnd = NodeEnd()
    host: str = ""


class NodesListed(Event, frozen=True, kw_only=True):
    """The platform has listed all its nodes after a restart of the master. Nodes that are not listed do not exist."""

    seen: tuple[NodeSeen, ...]


class AgentConnected(Event, frozen=True, kw_only=True):
    """An agent sent `hello`, its first message, on connection number `connection`. Newer ones have larger numbers."""

    connection: int
    hello: Hello


class AgentDisconnected(Event, frozen=True, kw_only=True):
    node: NodeKey
    connection: int


class AgentSaid(Event, frozen=True, kw_only=True):
    node: NodeKey
    message: AgentMessage


class ChangeWanted(Event, frozen=True, kw_only=True):
    """A command or a manifest asks for a change. If `request` is above 0, the core answers with a `Reply`."""

    change: Change
    request: int = 0


class PlanDeleted(Event, frozen=True, kw_only=True):
    uid: str


# time-outs, which only `Engine.due` makes -----------------------------------------------------------------------------


class AgentSilent(Event, frozen=True, kw_only=True):
    """The agent's connection is open, but brought no message for `seconds` seconds."""

    node: NodeKey
    seconds: float


class AgentStayedAway(Event, frozen=True, kw_only=True):
    node: NodeKey


class StragglerWaitOver(Event, frozen=True, kw_only=True):
    """The wait for more nodes is over. Now a round that forms may close, or a running one may end to let nodes in."""


class JoinTimeout(Event, frozen=True, kw_only=True):
    """Too few nodes for a round joined within the time-out `join`."""


class LaunchDue(Event, frozen=True, kw_only=True):
    node: NodeKey


class PendingTimeout(Event, frozen=True, kw_only=True):
    node: NodeKey


class StepsNoted(Event, frozen=True, kw_only=True):
    """A summary of step reports. The journal has it instead of the reports. `trained` is the training time so far."""

    trained: float
    step: int
    total: int
    round: Round
    at: float
    """When the newest step was reported."""


AnyEvent = (
    Started
    | MasterReturned
    | NodeSeen
    | NodesListed
    | AgentConnected
    | AgentDisconnected
    | AgentSaid
    | ChangeWanted
    | PlanDeleted
    | AgentSilent
    | AgentStayedAway
    | StragglerWaitOver
    | JoinTimeout
    | LaunchDue
    | PendingTimeout
    | StepsNoted
)
