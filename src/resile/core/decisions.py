"""Decisions: what the core wants the master to do. They are values, so tests can compare them.

A decision holds the message that an agent will get, so a new message to agents needs no new decision.
"""

from __future__ import annotations

import msgspec

from resile.api.ids import NodeKey, Rank
from resile.api.plan import NodeResources
from resile.protocol.master_to_agent import JobOver, MasterMessage, Refused, Welcome


class Decision(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True, gc=False):
    """Base of all decisions."""


class LaunchNode(Decision, frozen=True, kw_only=True):
    """Start a node, unless it was started already. `replicas` is how many nodes its role is to have."""

    node: NodeKey
    rank: Rank
    replicas: int
    relaunch_count: int = 0
    resources: NodeResources = NodeResources()
    avoid: tuple[str, ...] = ()
    """Machines that fell silent or failed a moment ago, to be used only if no other machine has room."""


class DeleteNode(Decision, frozen=True, kw_only=True):
    """Ask a node to end, and end it by force after `grace` seconds."""

    node: NodeKey
    grace: float
    because: str


class Admit(Decision, frozen=True, kw_only=True):
    connection: int
    message: Welcome


class Refuse(Decision, frozen=True, kw_only=True):
    """Send `message` on the connection with number `connection` and close that connection."""

    connection: int
    message: Refused | JobOver


class Send(Decision, frozen=True, kw_only=True):
    """Send a message to the agents of these nodes.

    An agent without a connection does not get the message. When it connects, it is told if its round has changed.
    """

    to: tuple[NodeKey, ...]
    message: MasterMessage


class Drop(Decision, frozen=True, kw_only=True):
    """Close the connection of this node's agent without a message. If the agent lives, it connects again."""

    node: NodeKey


class Finish(Decision, frozen=True, kw_only=True):
    """Tell every connected agent that the job has ended."""

    message: JobOver


class Reply(Decision, frozen=True, kw_only=True):
    """Answer a request for a change. `error` says in one sentence why the change is refused; empty if not."""

    request: int
    error: str = ""


class Note(Decision, frozen=True, kw_only=True):
    """Record a job event. `reason` is one word that programs may compare; `message` is a sentence for people."""

    reason: str
    message: str
    node: NodeKey | None = None
    warning: bool = False


AnyDecision = LaunchNode | DeleteNode | Admit | Refuse | Send | Drop | Finish | Reply | Note
