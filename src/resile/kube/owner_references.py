"""Owner references: what Kubernetes removes together with a job, and which job an object belongs to.

`blockOwnerDeletion` makes a deletion in the foreground wait for the object. Clusters that enforce it
(`OwnerReferencesPermissionEnforcement`) ask for the right to update the owner's finalizers: see `api/kinds/rbac.py`.
"""

from __future__ import annotations

from resile.kube.kinds import Kind, Object


def owner_reference(kind: Kind, name: str, uid: str) -> Object:
    return {
        "apiVersion": kind.api_version,
        "kind": kind.name,
        "name": name,
        "uid": uid,
        "controller": True,
        "blockOwnerDeletion": True,
    }


def is_owned_by(item: Object, uid: str) -> bool:
    """True if an object belongs to the owner with this uid, and not to an earlier owner of the same name."""
    return any(reference.get("uid") == uid for reference in _references(item))


def is_controlled(item: Object) -> bool:
    """True if an object has a controlling owner; Kubernetes removes the object when that owner is removed."""
    return any(reference.get("controller") for reference in _references(item))


def _references(item: Object) -> list[Object]:
    return (item.get("metadata") or {}).get("ownerReferences") or []
