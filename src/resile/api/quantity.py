"""Converts Kubernetes quantities (`500m`, `2`, `0.5`, `4Gi`, `8192Mi`, `1e3`) and durations (`1m30s`) to numbers.

Quantities are read as exact fractions and rounded up at the end, as in Kubernetes: a node never gets less than its
manifest requests.
"""

from __future__ import annotations

import math
import re
from fractions import Fraction

from resile.api.ids import Bytes, Seconds

_BINARY = {"Ki": 1, "Mi": 2, "Gi": 3, "Ti": 4, "Pi": 5, "Ei": 6}
_DECIMAL = {"n": -9, "u": -6, "m": -3, "": 0, "k": 3, "M": 6, "G": 9, "T": 12, "P": 15, "E": 18}
QUANTITY = re.compile(
    r"(?P<number>\+?(?:[0-9]{1,30}(?:\.[0-9]{0,30})?|\.[0-9]{1,30}))"
    r"(?:(?P<suffix>[KMGTPE]i|[numkMGTPE])|[eE](?P<exponent>[+-]?[0-9]{1,2}))?",
    re.ASCII,
)

_DURATION = re.compile(r"(?:[0-9]{1,9}(?:\.[0-9]{1,9})?(?:ms|s|m|h))+|[0-9]{1,9}(?:\.[0-9]{1,9})?", re.ASCII)
_DURATION_PART = re.compile(r"([0-9.]+)(ms|s|m|h|)", re.ASCII)
_UNITS = {"ms": 0.001, "s": 1.0, "": 1.0, "m": 60.0, "h": 3600.0}

ALLOWED = "must be a quantity of 0 or more such as 500m, 2, 0.5 or 4Gi"

LARGEST = 2**63 - 1
"""The largest amount that Kubernetes can store."""


class BadQuantity(ValueError):
    """Raised if a text is no quantity; the message says what is allowed."""


def amount(text: str | int | float) -> Fraction:
    """The exact amount of a quantity or number; raises `BadQuantity` if it is below 0 or above `LARGEST`."""
    if isinstance(text, bool) or (isinstance(text, float) and not math.isfinite(text)):
        raise BadQuantity(f"{ALLOWED}, not {text}")
    if isinstance(text, int) and not 0 <= text <= LARGEST:
        raise BadQuantity(f"{ALLOWED}, not a number out of range")
    written = text if isinstance(text, str) else repr(text)
    match = QUANTITY.fullmatch(written)
    if match is None:
        raise BadQuantity(f"{ALLOWED}, not {written[:40]!r}")
    suffix = match["suffix"] or ""
    if suffix in _BINARY:
        unit = Fraction(1024 ** _BINARY[suffix])
    else:
        unit = Fraction(10) ** int(match["exponent"] or _DECIMAL[suffix])
    total = Fraction(match["number"]) * unit
    if total > LARGEST:
        raise BadQuantity(f"{ALLOWED} and of at most 8Ei, not {written[:40]!r}")
    return total


def cores(text: str | int | float) -> float:
    """The CPU cores of a quantity, rounded up to a thousandth; raises `BadQuantity` as `amount` does."""
    return math.ceil(amount(text) * 1000) / 1000


def size(text: str | int | float) -> Bytes:
    """The bytes of a quantity, rounded up; raises `BadQuantity` as `amount` does."""
    return Bytes(math.ceil(amount(text)))


def count(text: str | int | float) -> int:
    """A quantity as a whole number, as for GPUs. Raises `BadQuantity` as `amount` does, and for fractions."""
    total = amount(text)
    if total.denominator != 1:
        raise BadQuantity(f"must be a whole number of 0 or more, not {text!r}")
    return int(total)


def write_cores(value: float) -> str:
    """The quantity for a number of cores, rounded up to a thousandth: `2`, `500m`."""
    thousandths = math.ceil(Fraction(repr(value)) * 1000)
    return f"{thousandths}m" if thousandths % 1000 else str(thousandths // 1000)


def write_size(value: int) -> str:
    """The shortest exact quantity for a number of bytes: `4Gi`, `1536Mi`, `1000`."""
    for suffix, power in reversed(_BINARY.items()):
        whole, rest = divmod(value, 1024**power)
        if whole and not rest:
            return f"{whole}{suffix}"
    return str(value)


def duration(text: str) -> Seconds | None:
    """The seconds of a duration such as `10s`, `1m30s`, `500ms`, `0.5h` or `10`; None if it is no duration."""
    if not _DURATION.fullmatch(text):
        return None
    return Seconds(sum(float(number) * _UNITS[unit] for number, unit in _DURATION_PART.findall(text)))
