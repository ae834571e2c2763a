"""Changes to a running job, as the core decides on them: granted, or refused with one sentence.

Command lines ask for them, and on a cluster so do ScalePlans and edits of the job's manifest.
"""

from __future__ import annotations

import msgspec

from resile.api.ids import NodeKey, Rank
from resile.protocol.message import Message
from resile.protocol.reports import NodeResources


class Scale(Message, frozen=True, kw_only=True):
    """`role` shall have `replicas` nodes."""

    role: str
    replicas: int


class Suspend(Message, frozen=True, kw_only=True):
    """The job shall let go of its nodes (`on`), or take them back."""

    on: bool


class Stop(Message, frozen=True, kw_only=True):
    """The job shall end."""

    because: str = "a person stopped it"


class RoleChange(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a plan changes about a role; what is not given stays as it is."""

    replicas: int | None = None
    resources: NodeResources = NodeResources()
    """Of the nodes that are launched from now on."""


class NewNode(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A node that a plan adds."""

    role: str
    rank: Rank | None = None
    """The lowest free one unless given."""
    resources: NodeResources = NodeResources()


class Migration(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A node that a plan replaces by one with other resources; it leaves when the new one has taken over."""

    node: NodeKey
    resources: NodeResources = NodeResources()


class Plan(Message, frozen=True, kw_only=True):
    """What a ScalePlan says. A plan is known by its uid: asking again is harmless."""

    name: str
    uid: str
    roles: dict[str, RoleChange] = msgspec.field(default_factory=dict)
    create: tuple[NewNode, ...] = ()
    remove: tuple[NodeKey, ...] = ()
    migrate: tuple[Migration, ...] = ()


Change = Scale | Suspend | Stop | Plan
