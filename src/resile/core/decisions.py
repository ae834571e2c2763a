"""What the core wants done. Decisions are values: the shell executes them, tests compare them.

What an agent is to hear is inside as the message that it will get: a new message to agents needs no decision.
"""

from __future__ import annotations

import msgspec

from resile.api.ids import NodeKey, Rank
from resile.api.plan import NodeResources
from resile.protocol.master_to_agent import JobOver, MasterMessage, Refused, Welcome


class Decision(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """Base of all decisions."""


class LaunchNode(Decision, frozen=True, kw_only=True):
    """Start a node. Repeating it for the same node is harmless."""

    node: NodeKey
    rank: Rank
    replicas: int
    relaunch_count: int = 0
    resources: NodeResources = NodeResources()
    avoid: tuple[str, ...] = ()
    """Machines that fell silent a moment ago; not to be used as long as there is room on others."""


class DeleteNode(Decision, frozen=True, kw_only=True):
    """End a node, after `grace` seconds by force."""

    node: NodeKey
    grace: float
    because: str


class Admit(Decision, frozen=True, kw_only=True):
    """Connection `session` is the agent of the node that the message names."""

    session: int
    message: Welcome


class Refuse(Decision, frozen=True, kw_only=True):
    """Connection `session` gets this message and is closed."""

    session: int
    message: Refused | JobOver


class Send(Decision, frozen=True, kw_only=True):
    """Send a message to the agents of these nodes. One that is not connected hears the state of things when it is."""

    to: tuple[NodeKey, ...]
    message: MasterMessage


class Drop(Decision, frozen=True, kw_only=True):
    """Close the connection of this node's agent without a message; an agent that lives connects again."""

    node: NodeKey


class Finish(Decision, frozen=True, kw_only=True):
    """The job has ended: tell every agent that is connected."""

    message: JobOver


class Reply(Decision, frozen=True, kw_only=True):
    """Answer to a person's wish; `error` is empty or one sentence."""

    request: int
    error: str = ""


class Note(Decision, frozen=True, kw_only=True):
    """One line of the job's story, for people, metrics and pages. `reason` is stable; `message` is a sentence."""

    reason: str
    message: str
    node: NodeKey | None = None
    warning: bool = False


AnyDecision = LaunchNode | DeleteNode | Admit | Refuse | Send | Drop | Finish | Reply | Note
