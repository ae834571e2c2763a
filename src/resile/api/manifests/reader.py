"""Reads manifests into typed resources: YAML text, or objects that a cluster returned. Reports all errors at once."""

from __future__ import annotations

from typing import Any

from resile.api.kinds import registry
from resile.api.kinds.base import Resource
from resile.api.manifests.errors import BadManifest, ManifestError, ManifestErrors, listed, shown


def load_manifests(text: str | bytes) -> list[Resource]:
    """Read every document of a YAML text, except empty ones; raises `BadManifest` with the errors of all documents."""
    from resile.api.manifests.documents import load_documents  # PyYAML takes 20 ms to import

    documents = load_documents(text)
    if not documents:
        raise BadManifest([ManifestError("", f"the manifest is empty; it must hold an {listed(_known_kinds())}")])
    resources: list[Resource] = []
    found: list[ManifestError] = []
    for number, document in enumerate(documents, start=1):
        errors = ManifestErrors(f"document {number}" if len(documents) > 1 else "")
        resource = _read(document, errors)
        found.extend(errors.found())
        if resource is not None:
            resources.append(resource)
    if found:
        raise BadManifest(found)
    return resources


def read_manifest(document: Any) -> Resource:
    """Read one object that a cluster returned; raises `BadManifest` with all its errors."""
    errors = ManifestErrors()
    resource = _read(document, errors)
    if resource is None:
        raise BadManifest(errors.found())
    return resource


def _read(document: Any, errors: ManifestErrors) -> Resource | None:
    if not isinstance(document, dict):
        errors.add("", f"a manifest must be a mapping with apiVersion, kind, metadata and spec, not {shown(document)}")
        return None
    version, named = document.get("apiVersion"), document.get("kind")
    kind = registry.kind_of(document)
    if kind is None:
        alike = [one for one in registry.kinds() if one.definition.kind == named]
        versions = dict.fromkeys(one.definition.api_version for one in alike or registry.kinds())
        if version not in versions:
            errors.add("apiVersion", f"must be {listed(versions)}, not {shown(version)}")
        if not alike:
            errors.add("kind", f"must be {listed(_known_kinds())}, not {shown(named)}")
            return None
        kind = alike[0]  # to report the other errors, too
    rest = {field: value for field, value in document.items() if field not in ("apiVersion", "kind")}
    resource = kind.read(rest, errors)
    return None if errors else resource


def _known_kinds() -> list[str]:
    return list(dict.fromkeys(kind.definition.kind for kind in registry.kinds()))
