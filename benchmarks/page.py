"""The figures of the last whole run of each suite: kept as JSON, and shown in docs/benchmarks.md and in the README.

`make bench` and `make bench-kube` write both the figures and the pages, so that no figure is copied by hand. A section
stands between two comments that name its suite; the rest of a page is prose, which stays.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from benchmarks import table
from benchmarks.harness import Row
from resile.common.atomic_files import write_atomically

ROOT = Path(__file__).resolve().parents[1]
RESULTS = "benchmarks/results"
PAGE, README = "docs/benchmarks.md", "README.md"
HEADLINES = "headlines"
"""The section of the README."""


class Results(msgspec.Struct, frozen=True):
    """One whole run of a suite."""

    suite: str
    peer: str
    machine: dict[str, str]
    rows: list[Row]


class Headline(msgspec.Struct, frozen=True):
    """A figure of the README, and the row that it is taken from."""

    words: str
    suite: str
    measure: str


HEADLINE_FIGURES = (
    Headline(
        "one of 3 ranks killed: the survivors take the next step (elastic loop, median of 30)",
        "engine",
        "elastic: rank of 3 killed, to the survivors' next step, median",
    ),
    Headline(
        "one of 3 ranks of an unchanged DDP script killed: the next step (median of 3)",
        "engine",
        "killed rank of plain DDP: to the next step, median",
    ),
    Headline(
        "a node frozen: the survivors take the next step (longest of 5)",
        "engine",
        "elastic: node frozen, to the survivors' next step, longest",
    ),
    Headline(
        "10,000 agents join one round: from the last join until all are told",
        "engine",
        "rendezvous of 10,000: last join to all told",
    ),
    Headline(
        "a checkpoint of 1 GiB: how long the first save stops training (1 memcpy: copying 1 GiB in memory once)",
        "engine",
        "checkpoint of 1 GiB: stall of the first save, median",
    ),
    Headline(
        "Kubernetes: a pod deleted, the survivors take the next step (elastic loop, longest of 6)",
        "cluster",
        "elastic: pod deleted, to the survivors' next step",
    ),
)


def keep(results: Results, root: Path = ROOT) -> None:
    """Write the figures of a whole run, and every page that shows them."""
    write_atomically(_path(results.suite, root), _json(results))
    write_pages(root)


def write_pages(root: Path = ROOT) -> None:
    """Write all sections anew from the figures that are kept."""
    suites = {suite: read(suite, root) for suite in sorted({each.suite for each in HEADLINE_FIGURES})}
    page = (root / PAGE).read_text()
    for suite, results in suites.items():
        page = replaced(page, suite, section(results))
    write_atomically(root / PAGE, page.encode())
    readme = replaced((root / README).read_text(), HEADLINES, headlines(suites))
    write_atomically(root / README, readme.encode())


def read(suite: str, root: Path = ROOT) -> Results:
    """The figures of the last whole run of a suite."""
    return msgspec.json.decode(_path(suite, root).read_bytes(), type=Results)


def section(results: Results) -> str:
    """A suite's part of the page: where and when it ran, one table, and the notes."""
    rows, peer = results.rows, results.peer
    others = table.other_peers(rows)
    has_median = any(row.median is not None for row in rows)
    head = ["measure", "bar", "resile", *(["median"] if has_median else []), peer, *others, ""]
    lines = [_line(head), _line(["---"] * len(head))]
    for row in rows:
        figures = [_figure(row, row.median)] if has_median else []
        figures.append(_figure(row, row.peer, peer))
        figures += [_figure(row, row.others.get(name), name) for name in others]
        verdict = {True: "pass", False: "**missed**", None: ""}[row.passed]
        lines.append(_line([row.measure, _figure(row, row.bar), _figure(row, row.value), *figures, verdict]))
    notes = [f"- {row.measure}: {row.note}" for row in rows if row.note]
    return "\n".join([where(results.machine), "", *lines, *(["", *notes] if notes else [])])


def where(machine: Mapping[str, str]) -> str:
    """What figures depend on, in one line."""
    return " · ".join(f"{name}: {value}" for name, value in machine.items())


def headlines(suites: Mapping[str, Results]) -> str:
    """The README's table."""
    lines = [_line(["", "resile", "others, same work"]), _line(["---"] * 3)]
    for each in HEADLINE_FIGURES:
        results = suites[each.suite]
        row = next((row for row in results.rows if row.measure == each.measure), None)
        if row is None:  # it was simulated, say, because the system allows too few open files
            continue
        theirs = [(results.peer, row.peer), *row.others.items()]
        told = ", ".join(f"{name} {_figure(row, value, name)}" for name, value in theirs if value is not None)
        lines.append(_line([each.words, f"**{_figure(row, row.value)}**", told]))
    dates = {suite: results.machine["date"].split()[0] for suite, results in suites.items()}
    machines = sorted({f"{results.machine['cpu']}, {results.machine['memory']}" for results in suites.values()})
    measured = ", ".join(f"{suite} {date}" for suite, date in sorted(dates.items(), reverse=True))
    notes = [
        f"{fact[0].upper()}{fact[1:]}." for fact in (results.machine.get("peer") for results in suites.values()) if fact
    ]
    where_and_when = f"Measured on {' and '.join(machines)} ({measured})."
    return "\n".join([*lines, "", " ".join([where_and_when, *notes])])


def replaced(page: str, name: str, text: str) -> str:
    """The page with another text between the two comments of a section.

    Raises:
        ValueError: the page has no such section, or several.
    """
    begin, end = f"<!-- begin {name} -->", f"<!-- end {name} -->"
    found = re.compile(f"{re.escape(begin)}\n.*?{re.escape(end)}", re.S)
    if len(found.findall(page)) != 1:
        raise ValueError(f"the page needs one section between {begin} and {end}")
    return found.sub(lambda _: f"{begin}\n{text}\n{end}", page)


def _figure(row: Row, value: float | None, peer: str = "") -> str:
    """A figure without the zeros at its end, which would claim more than was measured."""
    return re.sub(r"(\.\d*?[1-9])0+(?= |$)|\.0+(?= |$)", r"\1", table.peers_figure(row, peer, value))


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"


def _path(suite: str, root: Path) -> Path:
    return root / RESULTS / f"{suite}.json"


def _json(results: Results) -> bytes:
    return msgspec.json.format(msgspec.json.encode(results), indent=2) + b"\n"
