"""Structural schemas of the types of resources: by them, a Kubernetes API server checks, defaults and explains fields.

A structural schema can say less than JSON Schema: every value has one type, there are no references, and fields that no
schema names are dropped when an object is stored. So a type is written out in full wherever it occurs. The complete
check is `api/manifests/validation.py`; a schema refuses only what that refuses, too. The one exception is a quantity
that is a fraction without quotes: clusters know whole numbers and text only, so `0.5` must be in quotes there.

`X | None` in a type means that a field may be absent. It does not become `nullable`: an API server drops a null that is
not allowed (1.20 and later), so the field is absent, and manifests are read in the same way here.
"""

from __future__ import annotations

import enum
from typing import Any

import msgspec
from msgspec import inspect

from resile.api.crd import descriptions
from resile.api.manifests.metadata import Metadata

Schema = dict[str, Any]


def schema_of(kind: type) -> Schema:
    """The schema of the type of a resource or of a field, as plain data. Raises `TypeError` if there can be none."""
    return _schema(inspect.type_info(kind))


def _schema(kind: inspect.Type) -> Schema:
    match kind:
        case inspect.Metadata(type=inner, extra_json_schema=extra):
            return {**_schema(inner), **(extra or {})}
        case inspect.StructType(cls=cls) if cls is Metadata:
            return {"type": "object"}  # the API server checks metadata itself; a CRD may only restrict the name
        case inspect.StructType():
            return _struct(kind)
        case inspect.DictType(value_type=inspect.AnyType()):
            return {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
        case inspect.DictType(value_type=inner):
            return {"type": "object", "additionalProperties": _schema(inner)}
        case inspect.VarTupleType(item_type=inner) | inspect.ListType(item_type=inner):
            return {"type": "array", "items": _schema(inner), "x-kubernetes-list-type": "atomic"}
        case inspect.UnionType(types=types):
            return _union(types)
        case inspect.EnumType(cls=choices):
            return {"description": descriptions.of_type(choices), "type": "string", "enum": [*map(_plain, choices)]}
        case inspect.IntType(ge=lowest, le=highest):
            bounds = {"minimum": lowest, "maximum": highest}
            return {
                "type": "integer",
                "format": "int64",
                **{name: bound for name, bound in bounds.items() if bound is not None},
            }
        case inspect.FloatType():
            return {"type": "number", "format": "double"}
        case inspect.StrType():
            return {"type": "string"}
        case inspect.BoolType():
            return {"type": "boolean"}
    raise TypeError(f"a resource's field has the type {kind}, which structural schemas do not have")


def _struct(kind: inspect.StructType) -> Schema:
    texts = descriptions.of_fields(kind.cls)
    required = [field.encode_name for field in kind.fields if field.required and field.encode_name != "metadata"]
    properties = {field.encode_name: _field(field, texts.get(field.name, "")) for field in kind.fields}
    return {
        "description": descriptions.of_type(kind.cls),
        "type": "object",
        **({"required": required} if required else {}),
        "properties": properties,
    }


def _field(field: inspect.Field, text: str) -> Schema:
    schema = _schema(field.type)
    told = text or schema.get("description")
    rest = {word: value for word, value in schema.items() if word != "description"}
    return {**({"description": told} if told else {}), **rest, **_default(field)}


def _default(field: inspect.Field) -> Schema:
    value = _plain(field.default)
    is_worth = isinstance(value, bool) or (isinstance(value, str | int | float) and bool(value))
    return {"default": value} if is_worth else {}


def _union(types: tuple[inspect.Type, ...]) -> Schema:
    kinds = [one for one in types if not isinstance(one, inspect.NoneType)]
    if len(kinds) == 1:
        return _schema(kinds[0])
    names = {type(one) for one in kinds}
    if names == {inspect.StrType, inspect.IntType, inspect.FloatType}:
        return {"x-kubernetes-int-or-string": True}
    raise TypeError(f"a resource's field may be any of {kinds}, which structural schemas do not have")


def _plain(value: Any) -> Any:
    if isinstance(value, enum.Enum):
        return value.value
    return None if isinstance(value, msgspec.Struct) else value
