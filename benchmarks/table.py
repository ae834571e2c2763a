"""The rows of all benchmarks as one table, and the machine they were measured on."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from benchmarks.harness import Row

HEADER = ("measure", "bar", "resile", "torchrun", "ratio", "verdict")


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
        "load": " ".join(f"{each:.1f}" for each in os.getloadavg()),
    }


def figure(value: float | None, unit: str) -> str:
    """A figure as people read it: three digits that matter, no more."""
    if value is None:
        return ""
    digits = 0 if value == int(value) or value >= 100 else 1 if value >= 10 else 2 if value >= 1 else 3
    return f"{value:,.{digits}f} {unit}".strip()


def verdict(row: Row) -> str:
    """Whether the bar is met, in one word; nothing where there is no bar."""
    return {True: "pass", False: "MISSED", None: ""}[row.passed]


def render(rows: Sequence[Row]) -> str:
    """All rows, aligned, and below them what is worth knowing about some."""
    cells = [HEADER, *(_cells(row) for row in rows)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(HEADER))]
    lines = ["  ".join(_aligned(line, widths)).rstrip() for line in cells]
    lines.insert(1, "  ".join("-" * width for width in widths))
    notes = [f"  {row.measure}: {row.note}" for row in rows if row.note]
    return "\n".join([*lines, *(["", *notes] if notes else [])])


def _cells(row: Row) -> tuple[str, ...]:
    bar = "" if row.bar is None else f"<= {figure(row.bar, row.unit)}"
    ratio = "" if row.ratio is None else f"{row.ratio:.1f}x"
    return (row.measure, bar, figure(row.value, row.unit), figure(row.peer, row.unit), ratio, verdict(row))


def _aligned(line: Sequence[str], widths: Sequence[int]) -> list[str]:
    """Words to the left, figures to the right."""
    return [
        cell.ljust(width) if column in (0, len(HEADER) - 1) else cell.rjust(width)
        for column, (cell, width) in enumerate(zip(line, widths, strict=True))
    ]


def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines()


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
