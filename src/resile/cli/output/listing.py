"""Printing a listing as a table in kubectl's layout, as JSON or YAML, or as names."""

from __future__ import annotations

from collections.abc import Sequence

import click
import msgspec

from resile.api.kinds import registry
from resile.cli.common_options import print_json
from resile.cli.output import columns
from resile.cli.output.tables import line, table, widths
from resile.client.base import Item, Listable
from resile.client.errors import NotUsableError

WORDS = {
    Listable.JOBS: ("jobs", "job"),
    Listable.NODES: ("nodes", "node", "pods", "pod", "po"),
    Listable.EVENTS: ("events", "event", "ev"),
    Listable.PLANS: ("plans", "plan"),
}
AGES = ("AGE", "LAST SEEN")
"""Columns that change by themselves: a watch does not print a row again because of them."""
FORMATS = ("table", "wide", "json", "yaml", "name")


def kind_of(word: str) -> Listable:
    """What to list for a word such as `jobs`, `po` or the plural of a kind; unknown words raise `NotUsableError`."""
    for kind, words in WORDS.items():
        if word in words:
            return kind
    for kind, registered in ((Listable.JOBS, registry.JOB_KINDS), (Listable.PLANS, registry.PLAN_KINDS)):
        if any(word in one.definition.words for one in registered):
            return kind
    raise NotUsableError(f"there is no kind {word!r}; known are jobs, nodes, events and plans")


class Listing:
    """Prints a listing with `show`, and later the items that have changed with `show_changed`."""

    def __init__(self, kind: Listable, output: str, *, spaces: bool) -> None:
        self._output = output
        self._spaces = spaces
        self._cut = None if output == "wide" else columns.NARROW[kind]
        self._header = [*(["NAMESPACE"] if spaces else []), *columns.HEADERS[kind][: self._cut]]
        self._columns: list[int] = []
        self._known: dict[tuple[str, str], list[str]] = {}

    def show(self, items: Sequence[Item], *, one: bool = False) -> None:
        """Print all items. With `one`, JSON and YAML print the only item itself instead of a list."""
        views = [item.view for item in items]
        data = views[0] if one and views else views
        self._changed(items)
        if self._output == "json":
            print_json(data)
        elif self._output == "yaml":
            print_yaml(data)
        elif self._output == "name":
            for item in items:
                print_name(item)
        else:
            shown = [self._cells(item) for item in items]
            self._columns = widths([self._header, *shown])
            click.echo(table(self._header, shown))

    def show_changed(self, items: Sequence[Item]) -> None:
        """Print the items that have changed since they were last printed. A change of the age does not count."""
        for item in self._changed(items):
            if self._output == "json":
                click.echo(msgspec.json.encode(item.view))
            elif self._output == "yaml":
                click.echo("---")
                print_yaml(item.view)
            elif self._output == "name":
                print_name(item)
            else:
                click.echo(line(self._cells(item), self._columns))

    def _changed(self, items: Sequence[Item]) -> list[Item]:
        changed = []
        for item in items:
            key = (item.namespace, item.name)
            cells = [cell for title, cell in zip(self._header, self._cells(item), strict=True) if title not in AGES]
            if self._known.get(key) != cells:
                self._known[key] = cells
                changed.append(item)
        return changed

    def _cells(self, item: Item) -> list[str]:
        return [*([item.namespace] if self._spaces else []), *columns.row(item)[: self._cut]]


def print_name(item: Item) -> None:
    click.echo(f"{item.noun}/{item.name}")


def print_yaml(value: object) -> None:
    import yaml

    click.echo(yaml.safe_dump(msgspec.to_builtins(value), sort_keys=False, allow_unicode=True).rstrip())
