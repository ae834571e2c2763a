"""The metadata of resources."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from resile.api.manifests.name_rules import check_dns_label, check_labels
from resile.api.manifests.validation import rule


class Metadata(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, rename="camel"):
    """The metadata of an object.

    It also has the fields that Kubernetes fills in, because users may apply an object that they got from a cluster.
    """

    name: str
    namespace: Annotated[str, rule(check_dns_label)] = "default"
    labels: Annotated[dict[str, str], rule(check_labels)] = {}
    annotations: dict[str, str] = {}
    uid: str = ""
    resource_version: str = ""
    generation: int = 0
    creation_timestamp: str = ""
    deletion_timestamp: str = ""
    deletion_grace_period_seconds: int = 0
    generate_name: str = ""
    self_link: str = ""
    finalizers: tuple[str, ...] = ()
    owner_references: tuple[dict[str, Any], ...] = ()
    managed_fields: tuple[dict[str, Any], ...] = ()
