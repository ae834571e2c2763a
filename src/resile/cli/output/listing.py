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
    kind = next((known for known, words in WORDS.items() if word in words), None)
    if kind is None and any(word in one.definition.words for one in registry.job_kinds()):
        kind = Listable.JOBS
    if kind is None and any(word in one.definition.words for one in registry.plan_kinds()):
        kind = Listable.PLANS
    if kind is None:
        raise NotUsableError(f"there is no kind {word!r}; known are jobs, nodes, events and plans")
    return kind


class Listing:
    """Prints a listing with `show`, and later the items that have changed with `show_changed`."""

    def __init__(self, kind: Listable, output: str, *, spaces: bool) -> None:
        self._wide = output == "wide"
        self._output = output
        self._spaces = spaces
        header = (columns.WIDE_HEADERS if self._wide else columns.HEADERS)[kind]
        self._header = [*(["NAMESPACE"] if spaces else []), *header]
        self._age = next(at for at, title in enumerate(header) if title in AGES)
        self._columns: list[int] = []
        self._known: dict[tuple[str, str], list[str]] = {}

    @property
    def for_people(self) -> bool:
        return self._output in ("table", "wide")

    @property
    def needs_nodes(self) -> bool:
        return self._output != "table"

    def show(self, items: Sequence[Item], *, one: bool = False) -> None:
        """Print all items. With `one`, JSON and YAML print the only item itself instead of a list."""
        data = [item.view for item in items]
        self._changed(items)
        if self._output == "json":
            print_json(data[0] if one and data else data)
        elif self._output == "yaml":
            print_yaml(data[0] if one and data else data)
        elif self._output == "name":
            self._print_names(items)
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
                self._print_names([item])
            else:
                click.echo(line(self._cells(item), self._columns))

    def _changed(self, items: Sequence[Item]) -> list[Item]:
        changed = []
        for item in items:
            key = (item.namespace, item.name)
            cells = [cell for at, cell in enumerate(columns.row(item, wide=self._wide)) if at != self._age]
            if self._known.get(key) != cells:
                self._known[key] = cells
                changed.append(item)
        return changed

    def _cells(self, item: Item) -> list[str]:
        cells = columns.row(item, wide=self._wide)
        return [item.namespace, *cells] if self._spaces else cells

    def _print_names(self, items: Sequence[Item]) -> None:
        for item in items:
            click.echo(f"{item.noun}/{item.name}")


def print_yaml(value: object) -> None:
    import yaml

    click.echo(yaml.safe_dump(msgspec.to_builtins(value), sort_keys=False, allow_unicode=True).rstrip())
