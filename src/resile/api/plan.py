"""`Plan`: a change to the nodes of a running job. Every kind of plan is translated to it, and the core executes it."""

from __future__ import annotations

import msgspec

from resile.api.ids import Bytes, NodeKey, Rank


class NodeResources(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Resources that a node has instead of those in its role's template. None means the template's amount."""

    memory: Bytes | None = None
    cpu: float | None = None
    gpu: int | None = None

    def over(self, below: NodeResources) -> NodeResources:
        """Copy these resources. If an amount is None, the copy has the amount of `below`."""
        given = {name: amount for name, amount in msgspec.structs.asdict(self).items() if amount is not None}
        return msgspec.structs.replace(below, **given)


class RoleChange(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The changes of a plan to a role. If `replicas` is None, the number of nodes stays as it is."""

    replicas: int | None = None
    resources: NodeResources = NodeResources()
    """The resources of nodes that are launched from now on."""


class NewNode(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    role: str
    rank: Rank | None = None
    """The rank of the new node; None for the lowest free rank."""
    resources: NodeResources = NodeResources()


class Migration(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A node that a plan replaces by a node with `resources`. The old node leaves when the new one has taken over."""

    node: NodeKey
    resources: NodeResources = NodeResources()


class Plan(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True, forbid_unknown_fields=True):
    """One change to the nodes of a running job. A second plan with the same `uid` is not executed."""

    name: str
    uid: str
    roles: dict[str, RoleChange] = msgspec.field(default_factory=dict)
    create: tuple[NewNode, ...] = ()
    remove: tuple[NodeKey, ...] = ()
    migrate: tuple[Migration, ...] = ()
