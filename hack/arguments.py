#!/usr/bin/env python3
"""Writes docs/arguments.md, the arguments of the classes for training scripts, from their docstrings."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parent.parent / "docs" / "arguments.md"
HEAD = """# Arguments

Arguments of the classes for training scripts, with their defaults. This page is generated from their docstrings
(`python hack/arguments.py`); `help(resile.torch.Elastic)` shows the same.
"""


def main() -> None:
    """Write the page."""
    PAGE.write_text(page())


def page() -> str:
    """The page as it should be."""
    from resile.torch import Checkpointer, Elastic, ElasticBatchSampler, ElasticLoader, ElasticSampler

    classes = (Elastic, ElasticLoader, Checkpointer, ElasticBatchSampler, ElasticSampler)
    methods = (Elastic.step, Checkpointer.save, Checkpointer.restore)
    tables = [_table(each.__name__, each.__init__) for each in classes]
    tables += [_table(each.__qualname__, each) for each in methods]
    return "\n".join([HEAD, *tables])


def _table(name: str, function: Any) -> str:
    documented = _arguments(inspect.getdoc(function) or "")
    rows = []
    for parameter in list(inspect.signature(function).parameters.values())[1:]:
        plain = parameter.kind is not inspect.Parameter.VAR_KEYWORD
        default = "" if parameter.default is inspect.Parameter.empty else _shown(parameter.default)
        words = documented.get(parameter.name, "")
        rows.append(f"| `{parameter.name if plain else f'**{parameter.name}'}` | {default} | {words} |")
    summary = (inspect.getdoc(function) or "").partition("\n")[0]
    lines = [f"## {name}", "", *([summary, ""] if name.count(".") else [])]
    return "\n".join([*lines, "| argument | default | meaning |", "|---|---|---|", *rows, ""])


def _shown(value: Any) -> str:
    return f"`{value.__name__}`" if callable(value) else f"`{value!r}`"


def _arguments(docstring: str) -> dict[str, str]:
    """What a docstring in Google's style says of each argument, in one line."""
    found: dict[str, str] = {}
    section = re.search(r"^Args:\n((?:    .*\n?|\n)+)", docstring, re.MULTILINE)
    name = ""
    for line in (section[1] if section else "").splitlines():
        begins = re.match(r" {4}(\w+): (.*)", line)
        if begins:
            name, found[begins[1]] = begins[1], begins[2]
        elif name and line.strip():
            found[name] += f" {line.strip()}"
    return {each: words.replace("|", "\\|") for each, words in found.items()}


if __name__ == "__main__":
    main()
