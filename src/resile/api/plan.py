"""`Plan`: a change to the nodes of a running job. Every kind of plan that users write becomes this.

It is to a running job what a `JobSpec` is to a new one. It travels to the master as it is, and the core executes it.
"""

from __future__ import annotations

import msgspec

from resile.api.ids import Bytes, NodeKey, Rank


class NodeResources(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a node shall have where it differs from the template of its role; None changes nothing."""

    memory: Bytes | None = None
    cpu: float | None = None
    gpu: int | None = None

    def over(self, below: NodeResources) -> NodeResources:
        """These amounts, and where one is None that of `below`."""
        return NodeResources(
            memory=below.memory if self.memory is None else self.memory,
            cpu=below.cpu if self.cpu is None else self.cpu,
            gpu=below.gpu if self.gpu is None else self.gpu,
        )


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


class Plan(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True, forbid_unknown_fields=True):
    """One change to the nodes of a running job. A plan is known by its uid: asking for it again is harmless."""

    name: str
    uid: str
    roles: dict[str, RoleChange] = msgspec.field(default_factory=dict)
    create: tuple[NewNode, ...] = ()
    remove: tuple[NodeKey, ...] = ()
    migrate: tuple[Migration, ...] = ()
