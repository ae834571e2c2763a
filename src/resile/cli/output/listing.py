"""How a listing is printed, wherever its rows come from: as a table of kubectl's, as data, or as names."""

from __future__ import annotations

from collections.abc import Sequence

import click
import msgspec

from resile.cli.common_options import print_json
from resile.cli.output import rows
from resile.cli.output.tables import line, table, widths
from resile.client.errors import NotUsableError

KINDS = {
    "jobs": ("jobs", "job", "elasticjobs", "elasticjob", "ej"),
    "nodes": ("nodes", "node", "pods", "pod", "po"),
    "events": ("events", "event", "ev"),
    "plans": ("plans", "plan", "scaleplans", "scaleplan", "sp"),
}
HEADERS = {
    "jobs": (rows.JOB_HEADER, rows.JOB_WIDE_HEADER),
    "nodes": (rows.NODE_HEADER, rows.NODE_WIDE_HEADER),
    "events": (rows.EVENT_HEADER, rows.EVENT_HEADER),
    "plans": (rows.PLAN_HEADER, rows.PLAN_WIDE_HEADER),
}
AGES = ("AGE", "LAST SEEN")
"""Columns whose change is no news."""
FORMATS = ("table", "wide", "json", "yaml", "name")


class Entry(msgspec.Struct):
    """One row, and the same as data."""

    namespace: str
    row: list[str]
    data: object
    key: str
    """What it is the row of: the same in every look."""
    name: str
    """As kubectl names it: `elasticjob/torch-mnist`."""


def kind_of(word: str) -> str:
    """The kind that a word of the user's means.

    Raises:
        NotUsableError: none.
    """
    kind = next((known for known, words in KINDS.items() if word in words), "")
    if not kind:
        raise NotUsableError(f"there is no kind {word!r}; known are jobs, nodes, events and plans")
    return kind


class Listing:
    """Prints the rows of one kind, and later those that changed."""

    def __init__(self, kind: str, output: str, *, spaces: bool) -> None:
        """Nothing is printed yet.

        Args:
            kind: one of `KINDS`.
            output: one of `FORMATS`.
            spaces: whether rows name their namespace.
        """
        self.kind = kind
        self.wide = output == "wide"
        self._output = output
        self._spaces = spaces
        header = HEADERS[kind][self.wide]
        self._header = [*(["NAMESPACE"] if spaces else []), *header]
        self._age = next(at for at, title in enumerate(header) if title in AGES)
        self._columns: list[int] = []
        self._known: dict[str, list[str]] = {}

    @property
    def for_people(self) -> bool:
        """Whether a person reads it."""
        return self._output in ("table", "wide")

    def show(self, entries: Sequence[Entry], *, one: bool = False) -> None:
        """Print all of them; with `one`, data is that of the only entry, not a list."""
        self._known = {entry.key: self._news(entry) for entry in entries}
        data = [entry.data for entry in entries]
        if self._output == "json":
            print_json(data[0] if one and data else data)
        elif self._output == "yaml":
            print_yaml(data[0] if one and data else data)
        elif self._output == "name":
            _print_names(entries)
        else:
            shown = [self._cells(entry) for entry in entries]
            self._columns = widths([self._header, *shown])
            click.echo(table(self._header, shown))

    def show_changed(self, entries: Sequence[Entry]) -> None:
        """Print those that differ from what was printed of them last; an age alone is no difference."""
        fresh = [entry for entry in entries if self._known.get(entry.key) != self._news(entry)]
        self._known.update({entry.key: self._news(entry) for entry in fresh})
        for entry in fresh:
            if self._output == "json":
                click.echo(msgspec.json.encode(entry.data))
            elif self._output == "yaml":
                click.echo("---")
                print_yaml(entry.data)
            elif self._output == "name":
                _print_names([entry])
            else:
                click.echo(line(self._cells(entry), self._columns))

    def _cells(self, entry: Entry) -> list[str]:
        return [entry.namespace, *entry.row] if self._spaces else entry.row

    def _news(self, entry: Entry) -> list[str]:
        return [cell for at, cell in enumerate(entry.row) if at != self._age]


def print_yaml(value: object) -> None:
    """Print data as YAML, structs included."""
    import yaml

    click.echo(yaml.safe_dump(msgspec.to_builtins(value), sort_keys=False, allow_unicode=True).rstrip())


def _print_names(entries: Sequence[Entry]) -> None:
    for entry in entries:
        click.echo(entry.name)
