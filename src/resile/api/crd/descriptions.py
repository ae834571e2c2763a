"""What the source says of a type and of each of its fields, for users of `kubectl explain`.

A field is described by the text below it, as everywhere in this code base. Python does not keep that text, so it is
read from the source file: a few milliseconds, spent only where a schema is made.
"""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap

import msgspec


def of_type(kind: type) -> str:
    """What a type is: the first paragraph of its docstring."""
    return _sentence(kind.__doc__ or "")


def of_fields(kind: type[msgspec.Struct]) -> dict[str, str]:
    """What each field of a struct is for, by the field's name in Python; fields without a text are left out."""
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
    """The first paragraph on one line, without the marks of code that a terminal would show as they are."""
    return " ".join(inspect.cleandoc(text).partition("\n\n")[0].split()).replace("`", "")
