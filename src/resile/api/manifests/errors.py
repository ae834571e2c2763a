"""The errors of a manifest, each in one sentence that names the field and what is allowed.

Reading does not stop at the first error: `ManifestErrors` collects all of them, so that a user has to correct a file
only once. The price is that one mistake can cause two errors: a misspelt required field is both unknown and missing.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any

import msgspec

MAX_ERRORS = 100
"""How many errors are reported at most, so that a generated file does not cause a message of megabytes."""

MAX_SHOWN = 60
"""How many characters of a wrong value a message shows."""


class ManifestError(msgspec.Struct, frozen=True):
    path: str
    """The field, such as `spec.replicaSpecs.worker.replicas`; empty if the whole document is wrong."""
    problem: str
    """What is allowed in the field, or what is wrong with it."""
    document: str = ""
    """The document with the error in a file of several, such as `document 2`; otherwise empty."""

    def __str__(self) -> str:
        return ": ".join(part for part in (self.document, self.path, self.problem) if part)


class BadManifest(ValueError):
    """Raised if a manifest has errors. `errors` holds at least one; the message has one line for each."""

    def __init__(self, errors: Iterable[ManifestError]) -> None:
        self.errors = tuple(errors)
        super().__init__("\n".join(str(error) for error in self.errors))


class ManifestErrors:
    """Collects the errors of one document."""

    def __init__(self, document: str = "") -> None:
        self._document = document
        self._found: list[ManifestError] = []
        self._paths: set[str] = set()

    def add(self, path: str, problem: str) -> None:
        """Add an error, unless the same field has one already."""
        if not path or path not in self._paths:
            self._paths.add(path)
            self._found.append(ManifestError(path, problem, self._document))

    def __len__(self) -> int:
        """The number of errors so far. Compare it before and after reading a value to see if the value has errors."""
        return len(self._found)

    def found(self) -> list[ManifestError]:
        """The first `MAX_ERRORS` errors, in the order in which the fields were read; a last one counts the others."""
        left_out = len(self._found) - MAX_ERRORS
        if left_out <= 0:
            return self._found
        return [*self._found[:MAX_ERRORS], ManifestError("", f"and {left_out} more errors", self._document)]


def under(path: str, field: str | int) -> str:
    """The path of a field, key or item of the value at `path`."""
    if isinstance(field, int):
        return f"{path}[{field}]"
    shown_key = field if field and len(field) <= MAX_SHOWN and field.isprintable() else shown(field)
    return f"{path}.{shown_key}" if path else shown_key


def shown(value: Any) -> str:
    """A wrong value as a message shows it: short, on one line, with YAML's words for types."""
    match value:
        case None:
            return "nothing"
        case bool():
            return "true" if value else "false"
        case dict():
            return "a mapping"
        case list() | tuple():
            return "a list"
        case str() if len(value) > MAX_SHOWN:
            return repr(value[:MAX_SHOWN] + "…")
        case int() if value.bit_length() > 200:
            return "a number of more than 60 digits"
        case str() | int() | float():
            return repr(value)
    return f"a value of type {type(value).__name__}"


def text_problem(value: Any) -> str:
    hint = "; put it in quotes" if isinstance(value, bool | int | float) else ""
    return f"must be text, not {shown(value)}{hint}"


def listed(choices: Iterable[str]) -> str:
    """Choices as a message lists them: `a`, `a or b`, `a, b or c`."""
    *most, last = choices
    return f"{', '.join(most)} or {last}" if most else last


def unknown_field(name: str, known: Iterable[str]) -> str:
    candidates = sorted(known)
    for candidate in candidates:
        if candidate.lower() == name.lower():
            return f"unknown field; did you mean {candidate}?"
    near = difflib.get_close_matches(name[:MAX_SHOWN], candidates, n=1, cutoff=0.6)
    if near:
        return f"unknown field; did you mean {near[0]}?"
    return f"unknown field; known are {', '.join(candidates)}" if candidates else "unknown field; none is known here"
