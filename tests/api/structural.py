"""What an API server demands of a CRD's schema, and what it does with an object by it, for tests without a cluster."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import jsonschema

Schema = dict[str, Any]

TYPES = {"object", "array", "string", "integer", "number", "boolean"}
JUNCTORS = {"anyOf", "oneOf", "allOf", "not"}
VALUES = {"enum", "format", "maxItems", "maxLength", "maxProperties", "maximum"}
VALUES |= {"minItems", "minLength", "minProperties", "minimum", "pattern", "required"}
SHAPES = {"type", "description", "default", "properties", "additionalProperties", "items", "nullable"}
EXTENSIONS = {"x-kubernetes-int-or-string", "x-kubernetes-preserve-unknown-fields", "x-kubernetes-list-type"}
CEL = "x-kubernetes-validations"


def problems(schema: Schema, path: str = "") -> Iterator[str]:
    """Everything for which an API server of Kubernetes 1.20 would refuse the schema."""
    for word in schema.keys() - VALUES - SHAPES - EXTENSIONS - JUNCTORS:
        yield f"{path}: {word} is not known"
    is_open = schema.get("x-kubernetes-preserve-unknown-fields")
    if schema.get("type") not in TYPES and not is_open and not schema.get("x-kubernetes-int-or-string"):
        yield f"{path}: has no type"
    if "properties" in schema and "additionalProperties" in schema:
        yield f"{path}: has both properties and additionalProperties"
    if isinstance(schema.get("additionalProperties"), bool):
        yield f"{path}: has additionalProperties without a schema"
    if schema.get("type") == "array" and "items" not in schema:
        yield f"{path}: has no items"
    if not set(schema.get("required", [])) <= set(schema.get("properties", {})):
        yield f"{path}: requires what it does not have"
    if "default" in schema and list(jsonschema.Draft202012Validator(checking(schema)).iter_errors(schema["default"])):
        yield f"{path}: has a default that it would refuse"
    for word in JUNCTORS & schema.keys():
        branches = schema[word] if isinstance(schema[word], list) else [schema[word]]
        for branch in branches:
            if branch.keys() - VALUES:
                yield f"{path}: {word} says more than which values are allowed"
    for where, inner in _inner(schema):
        yield from problems(inner, f"{path}{where}")


def fields(schema: Schema, path: str = "") -> Iterator[tuple[str, Schema]]:
    """Every named field, with its path; what is inside a template belongs to Kubernetes and is left out."""
    for where, inner in _inner(schema):
        if where.startswith("."):
            yield f"{path}{where}", inner
        if not inner.get("x-kubernetes-preserve-unknown-fields"):
            yield from fields(inner, f"{path}{where}")


def checking(schema: Schema) -> Schema:
    """The same as JSON Schema, refusing also what an API server would silently drop."""
    written = copy.deepcopy(schema)
    for part in _parts(written):
        if part.pop("x-kubernetes-int-or-string", False):
            part["type"] = ["integer", "string"]
        is_open = part.get("x-kubernetes-preserve-unknown-fields")
        if part.get("type") == "object" and "additionalProperties" not in part and not is_open:
            part["additionalProperties"] = False
    return written


def refusals(crd: dict[str, Any], document: Any) -> list[str]:
    """What is wrong with a resource by its CRD, as `path: problem`."""
    schema = checking(root(crd))
    schema["properties"]["metadata"].pop("additionalProperties")
    schema["required"] = [*schema.get("required", []), "apiVersion", "kind", "metadata"]
    found = jsonschema.Draft202012Validator(schema).iter_errors(document)
    return [f"{'.'.join(map(str, error.absolute_path))}: {error.message}" for error in found]


def root(crd: dict[str, Any]) -> Schema:
    (version,) = crd["spec"]["versions"]
    return version["schema"]["openAPIV3Schema"]


def _parts(schema: Schema) -> Iterator[Schema]:
    yield schema
    for _, inner in _inner(schema):
        yield from _parts(inner)


def _inner(schema: Schema) -> Iterator[tuple[str, Schema]]:
    for name, inner in schema.get("properties", {}).items():
        yield f".{name}", inner
    if isinstance(schema.get("additionalProperties"), dict):
        yield "[key]", schema["additionalProperties"]
    if "items" in schema:
        yield "[]", schema["items"]
