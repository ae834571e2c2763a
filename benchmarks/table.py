"""The rows of all benchmarks as one table, and the machine they were measured on."""

from __future__ import annotations

import os
import platform
import subprocess
import time
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from benchmarks.harness import Row

LEFT = ("measure", "verdict")
"""Columns of words; the others hold figures."""


def machine() -> dict[str, str]:
    """What figures depend on."""
    model = next(
        (line.split(":", 1)[1].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")), ""
    )
    memory = next(
        (int(line.split()[1]) / 1024**2 for line in _lines("/proc/meminfo") if line.startswith("MemTotal")), 0
    )
    return {
        "date": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "cpu": f"{os.cpu_count()} x {model or platform.machine()}",
        "memory": f"{memory:.0f} GB",
        "kernel": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "torch": _version("torch"),
        "resile": _version("resile"),
        "commit": _commit(),
        "load": " ".join(f"{each:.1f}" for each in os.getloadavg()),
    }


def figure(value: float | None, unit: str) -> str:
    """A figure as people read it: three digits that matter, no more."""
    if value is None:
        return ""
    digits = 0 if value == int(value) or value >= 100 else 1 if value >= 10 else 2 if value >= 1 else 3
    return f"{value:,.{digits}f} {unit}".strip()


def peers_figure(row: Row, name: str, value: float | None) -> str:
    """A peer's figure; one that it had not finished by is marked as a lower bound."""
    words = figure(value, row.unit)
    return f"> {words}" if words and name in row.unfinished else words


def verdict(row: Row) -> str:
    """Whether the bar is met, in one word; nothing where there is no bar."""
    return {True: "pass", False: "MISSED", None: ""}[row.passed]


def render(rows: Sequence[Row], peer: str = "torchrun") -> str:
    """All rows, aligned, and below them what is worth knowing about some; a column of medians only if there are any."""
    columns = {
        "measure": [row.measure for row in rows],
        "bar": ["" if row.bar is None else f"<= {figure(row.bar, row.unit)}" for row in rows],
        "resile": [figure(row.value, row.unit) for row in rows],
        "median": [figure(row.median, row.unit) for row in rows],
        peer: [peers_figure(row, peer, row.peer) for row in rows],
        **{name: [peers_figure(row, name, row.others.get(name)) for row in rows] for name in other_peers(rows)},
        "ratio": ["" if row.ratio is None else f"{row.ratio:.1f}x" for row in rows],
        "verdict": [verdict(row) for row in rows],
    }
    if not any(columns["median"]):
        del columns["median"]
    aligned = [_aligned(name, cells, name in LEFT) for name, cells in columns.items()]
    lines = ["  ".join(cells).rstrip() for cells in zip(*aligned, strict=True)]
    notes = [f"  {row.measure}: {row.note}" for row in rows if row.note]
    return "\n".join([*lines, *(["", *notes] if notes else [])])


def other_peers(rows: Sequence[Row]) -> list[str]:
    """The names of further peers, in the order in which they appear."""
    return list(dict.fromkeys(name for row in rows for name in row.others))


def _aligned(name: str, cells: Sequence[str], left: bool) -> list[str]:
    """A column under its name: words to the left, figures to the right."""
    width = max(map(len, (name, *cells)))
    column = [name, "-" * width, *cells]
    return [cell.ljust(width) if left else cell.rjust(width) for cell in column]


def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines()


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _commit() -> str:
    """The commit that is measured, or "unknown" outside of a repository; changes that are not committed are told."""
    asked = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--exclude=*"]
    try:
        return subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
