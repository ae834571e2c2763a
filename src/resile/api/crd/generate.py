"""Generates CustomResourceDefinitions from the types of the kinds.

They are valid for `apiextensions.k8s.io/v1` from Kubernetes 1.20 on. Rules in CEL express more than a schema, but are
optional: clusters before 1.23 do not know them, and `kubectl apply` refuses a definition with unknown fields.
"""

from __future__ import annotations

import copy
from typing import Any

from resile.api.crd.openapi import Schema, schema_of
from resile.api.kinds.base import Column, Definition, Rule

Object = dict[str, Any]

CATEGORY = "resile"
"""The category of every kind: `kubectl get resile` lists the objects of all kinds."""


def crd(definition: Definition, *, cel: bool = False) -> Object:
    """The CustomResourceDefinition of a kind as plain data.

    With `cel`, it has the kind's validation rules in CEL, which need Kubernetes 1.25 or later.
    """
    version: Object = {
        "name": definition.version,
        "served": True,
        "storage": True,
        "additionalPrinterColumns": [_column(column) for column in definition.columns],
        "subresources": {"status": {}, **({"scale": dict(definition.scale)} if definition.scale else {})},
        "schema": {"openAPIV3Schema": _root(definition, cel=cel)},
    }
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": definition.name},
        "spec": {
            "group": definition.group,
            "scope": "Namespaced",
            "names": {
                "kind": definition.kind,
                "listKind": f"{definition.kind}List",
                "plural": definition.plural,
                "singular": definition.kind.lower(),
                "shortNames": [definition.short],
                "categories": [CATEGORY],
            },
            "versions": [version],
        },
    }


def cel_patch(definition: Definition) -> list[Object]:
    """The JSON patch (RFC 6902) that adds the validation rules in CEL to `crd(definition, cel=False)`."""
    root = "/spec/versions/0/schema/openAPIV3Schema"
    grouped: dict[tuple[str, ...], list[Object]] = {}
    for rule in definition.rules:
        grouped.setdefault(rule.path, []).append(_written(rule))
    return [
        {
            "op": "add",
            "path": f"{root}{''.join(f'/properties/{field}' for field in path)}/x-kubernetes-validations",
            "value": rules,
        }
        for path, rules in grouped.items()
    ]


def _root(definition: Definition, *, cel: bool) -> Schema:
    schema = copy.deepcopy(schema_of(definition.type))
    version = f"The version of this resource: {definition.api_version}."
    schema["properties"] = {
        "apiVersion": {"description": version, "type": "string"},
        "kind": {"description": f"The kind of this resource: {definition.kind}.", "type": "string"},
        **schema["properties"],
    }
    for rule in definition.rules if cel else ():
        at = schema
        for field in rule.path:
            at = at["properties"][field]
        at.setdefault("x-kubernetes-validations", []).append(_written(rule))
    return schema


def _written(rule: Rule) -> Object:
    return {"rule": rule.expression, "message": rule.message}


def _column(column: Column) -> Object:
    written = {"name": column.name, "type": column.type, "jsonPath": column.path}
    if column.text:
        written["description"] = column.text
    return {**written, **({"priority": 1} if column.wide else {})}
