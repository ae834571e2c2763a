"""The texts that the source has for a type and its fields. `kubectl explain` and `resile explain` show them.

The text of a field is the string below it, as everywhere in this code base. Python does not keep that string, so it is
read from the source file, which takes a few milliseconds.
"""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap

import msgspec


def of_type(kind: type) -> str:
    """The first paragraph of the docstring of a type."""
    return _sentence(kind.__doc__ or "")


def of_fields(kind: type[msgspec.Struct]) -> dict[str, str]:
    """The text of each field of a struct by the field's name in Python; a field without a text has no entry."""
    found: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        if issubclass(base, msgspec.Struct) and base is not msgspec.Struct:
            found.update(_texts(base))
    return found


@functools.cache
def _texts(kind: type) -> dict[str, str]:
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    assert isinstance(definition, ast.ClassDef)
    found: dict[str, str] = {}
    for field, below in zip(definition.body, definition.body[1:], strict=False):
        match field, below:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                found[name] = _sentence(text)
    return found


def _sentence(text: str) -> str:
    return " ".join(inspect.cleandoc(text).partition("\n\n")[0].split()).replace("`", "")
