"""Tables and ages as kubectl prints them, for people and scripts that know kubectl."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

GAP = 3

Row = Sequence[str]


def widths(rows: Iterable[Row]) -> list[int]:
    return [max(map(len, column)) for column in zip(*rows, strict=True)]


def line(row: Row, columns: Sequence[int]) -> str:
    """One row as text. `columns` are the widths of the columns. The last cell is not padded."""
    cells = [f"{cell:<{width + GAP}}" for cell, width in zip(row[:-1], columns[:-1], strict=True)]
    return "".join([*cells, row[-1]]).rstrip()


def table(header: Row, rows: Sequence[Row]) -> str:
    columns = widths([header, *rows])
    return "\n".join(line(row, columns) for row in [header, *rows])


def age(seconds: float) -> str:
    """An age as kubectl prints it: 32s, 2m20s, 12m, 3h17m, 19h, 2d3h, 40d."""
    whole = int(seconds)
    if whole < 120:
        return f"{max(whole, 0)}s"
    minutes, hours, days = whole // 60, whole // 3600, whole // 86400
    if minutes < 10:
        return _pair(minutes, "m", whole % 60, "s")
    if minutes < 180:
        return f"{minutes}m"
    if hours < 8:
        return _pair(hours, "h", minutes % 60, "m")
    if hours < 48:
        return f"{hours}h"
    if days < 8:
        return _pair(days, "d", hours % 24, "h")
    if days < 365 * 2:
        return f"{days}d"
    if days < 365 * 8:
        return _pair(days // 365, "y", days % 365, "d")
    return f"{days // 365}y"


def took(seconds: float) -> str:
    """A duration as text: 12 ms, 0.84 s, 12.3 s. From two minutes on, `age` formats it."""
    if seconds < 0.1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 10:
        return f"{seconds:.2f} s"
    return f"{seconds:.1f} s" if seconds < 120 else age(seconds)


def _pair(big: int, unit: str, small: int, small_unit: str) -> str:
    return f"{big}{unit}{small}{small_unit}" if small else f"{big}{unit}"
