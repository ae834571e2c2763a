"""The kinds of objects that resile reads and writes, and where the API server keeps them."""

from __future__ import annotations

from typing import Any
from urllib.parse import quote

import msgspec

from resile.api.kinds import base

Object = dict[str, Any]
"""A Kubernetes object as the API server gives it. A typed model would drop fields that it does not know."""

ALL_NAMESPACES = "*"


class Kind(msgspec.Struct, frozen=True):
    """A kind of namespaced Kubernetes objects, such as pods, and how the API server addresses them."""

    group: str
    version: str
    name: str
    plural: str

    @property
    def api_version(self) -> str:
        return f"{self.group}/{self.version}" if self.group else self.version

    def path(self, namespace: str, name: str = "", subresource: str = "") -> str:
        """The URL path of one object or its subresource; without a `name`, of all objects in the namespace."""
        parts = ["apis" if self.group else "api", self.api_version]
        if namespace != ALL_NAMESPACES:
            parts += ["namespaces", namespace]
        return "/".join([*parts, self.plural, *filter(None, (quote(name, safe=""), subresource))])


PODS = Kind("", "v1", "Pod", "pods")
SERVICES = Kind("", "v1", "Service", "services")
SERVICE_ACCOUNTS = Kind("", "v1", "ServiceAccount", "serviceaccounts")
SECRETS = Kind("", "v1", "Secret", "secrets")
CONFIG_MAPS = Kind("", "v1", "ConfigMap", "configmaps")
EVENTS = Kind("", "v1", "Event", "events")
ROLES = Kind("rbac.authorization.k8s.io", "v1", "Role", "roles")
ROLE_BINDINGS = Kind("rbac.authorization.k8s.io", "v1", "RoleBinding", "rolebindings")
LEASES = Kind("coordination.k8s.io", "v1", "Lease", "leases")


def of(kind: base.ResourceKind) -> Kind:
    definition = kind.definition
    return Kind(definition.group, definition.version, definition.kind, definition.plural)
