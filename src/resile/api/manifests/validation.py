"""Checks plain data against the type of a resource, and collects all errors.

`msgspec.convert` stops at the first error and its messages name Python types; users need all errors, in the terms of
their manifest. So this module checks data against the same type annotations first, and converts only data without
errors. The additional pass takes about a millisecond for a usual manifest.

A field can have a further check in its type: `Annotated[str, rule(check)]`. `check(value, path, errors)` is called for
a scalar only if its type is right, but for every mapping, whose fields may have any type. The part of the check that an
API server can do is given as keywords of a JSON schema: `rule(check, pattern=matching(regex))`.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Hashable
from typing import Any, TypeVar, cast

import msgspec
from msgspec import inspect

from resile.api.manifests.errors import ManifestErrors, listed, shown, text_problem, under, unknown_field

T = TypeVar("T")

Check = Callable[[Any, str, ManifestErrors], None]
_RULE = "check"


def rule(check: Check, **schema: Any) -> msgspec.Meta:
    """Make an argument for `Annotated` in a field's type. It adds `check` to the check of the type.

    `schema` are keywords for the field's JSON schema in the CRD. They must accept every value that `check` accepts.
    """
    return msgspec.Meta(extra={_RULE: check}, extra_json_schema=schema or None)


def matching(regex: re.Pattern[str]) -> str:
    """Make a `pattern` for a JSON schema from `regex`. It accepts a text only if `regex` matches the whole text."""
    return f"^({re.sub(r'[?]P<[a-z]+>', '?:', regex.pattern)})$"


def read(kind: type[T], document: Any, errors: ManifestErrors, path: str = "") -> T | None:
    """Check `document` and convert a copy of it to the type `kind`. A field that is `null` counts as absent.

    If there are errors, adds them to `errors` and returns None. The paths in these errors begin with `path`.
    """
    before = len(errors)
    cleaned = _walk(_shape(cast(Hashable, kind)), document, path, errors)
    return msgspec.convert(cleaned, kind) if len(errors) == before else None


@functools.cache
def _shape(kind: Hashable) -> inspect.Type:
    return inspect.type_info(kind)


def _walk(kind: inspect.Type, value: Any, path: str, errors: ManifestErrors) -> Any:
    match kind:
        case inspect.Metadata(type=inner, extra=extra):
            before = len(errors)
            cleaned = _walk(inner, value, path, errors)
            # A mapping is checked even if its fields have errors; a scalar only if its type is right.
            if extra and (len(errors) == before or isinstance(value, dict)):
                extra[_RULE](cleaned, path, errors)
            return cleaned
        case inspect.UnionType(types=types):
            return _walk_union(types, value, path, errors)
        case inspect.StructType() | inspect.DictType() if not isinstance(value, dict):
            errors.add(path, f"must be a mapping, not {shown(value)}")
            return {}
        case inspect.StructType():
            return _walk_struct(kind, value, path, errors)
        case inspect.DictType(value_type=inner):
            return _walk_mapping(inner, value, path, errors)
        case inspect.VarTupleType(item_type=inner) | inspect.ListType(item_type=inner):
            if not isinstance(value, list | tuple):
                errors.add(path, f"must be a list, not {shown(value)}")
                return []
            return [_walk(inner, item, under(path, at), errors) for at, item in enumerate(value)]
        case inspect.AnyType():
            return _walk_anything(value, path, errors)
    problem = _scalar_problem(kind, value)
    if problem:
        errors.add(path, problem)
    return value


def _walk_union(types: tuple[inspect.Type, ...], value: Any, path: str, errors: ManifestErrors) -> Any:
    kinds = [one for one in types if not isinstance(one, inspect.NoneType)]
    if len(kinds) == 1:
        return _walk(kinds[0], value, path, errors)
    if all(_scalar_problem(one, value) for one in kinds):
        errors.add(path, f"must be text or a number, not {shown(value)}")
    return value


def _walk_struct(kind: inspect.StructType, value: dict[Any, Any], path: str, errors: ManifestErrors) -> dict[str, Any]:
    fields = {field.encode_name: field for field in kind.fields}
    known = fields if path else ("apiVersion", "kind", *fields)  # the reader has taken these two off a resource
    cleaned: dict[str, Any] = {}
    for name, item in value.items():
        if not isinstance(name, str):
            errors.add(path, f"every field's name must be text, not {shown(name)}")
        elif name not in fields:
            errors.add(under(path, name), unknown_field(name, known))
        elif item is not None:
            cleaned[name] = _walk(fields[name].type, item, under(path, name), errors)
    for name, field in fields.items():
        if field.required and value.get(name) is None:
            errors.add(under(path, name), "must be given")
    return cleaned


def _walk_mapping(inner: inspect.Type, value: dict[Any, Any], path: str, errors: ManifestErrors) -> dict[str, Any]:
    cleaned: dict[str, Any] = {}
    for name, item in value.items():
        if not isinstance(name, str):
            errors.add(path, f"every key must be text, not {shown(name)}")
        elif item is not None or isinstance(inner, inspect.AnyType):
            cleaned[name] = _walk(inner, item, under(path, name), errors)
    return cleaned


def _walk_anything(value: Any, path: str, errors: ManifestErrors) -> Any:
    """Copy data that may have any fields. Add an error for each value that JSON cannot express, such as infinity."""
    if isinstance(value, dict):
        return _walk_mapping(inspect.AnyType(), value, path, errors)
    if isinstance(value, list | tuple):
        return [_walk_anything(item, under(path, at), errors) for at, item in enumerate(value)]
    if not isinstance(value, str | int | float | None) or (isinstance(value, float) and not math.isfinite(value)):
        errors.add(path, f"must be plain text, a number, true or false, not {shown(value)}")
    return value


def _scalar_problem(kind: inspect.Type, value: Any) -> str:
    match kind:
        case inspect.StrType():
            return "" if isinstance(value, str) else text_problem(value)
        case inspect.BoolType():
            return "" if isinstance(value, bool) else f"must be true or false, not {shown(value)}"
        case inspect.IntType(ge=lowest, le=highest):
            if isinstance(value, bool) or not isinstance(value, int) or (lowest is not None and value < lowest):
                return f"must be a whole number{'' if lowest is None else f' of {lowest} or more'}, not {shown(value)}"
            return "" if highest is None or value <= highest else f"must be at most {highest}, not {shown(value)}"
        case inspect.FloatType():
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            return "" if is_number and math.isfinite(value) else f"must be a number, not {shown(value)}"
        case inspect.EnumType(cls=choices):
            try:
                choices(value)
            except ValueError:
                return f"must be {listed(str(choice.value) for choice in choices)}, not {shown(value)}"
            return ""
    raise TypeError(f"a resource's field has the type {kind}, which manifests do not have")
