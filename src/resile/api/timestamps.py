"""Times as Kubernetes writes them, and as seconds since 1970."""

from __future__ import annotations

import datetime


def stamp(at: float) -> str:
    """Seconds since 1970 as Kubernetes writes times, to the second."""
    return datetime.datetime.fromtimestamp(at, datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def moment(text: str | None) -> float | None:
    """The inverse of `stamp`; None for what is not a time."""
    try:
        return datetime.datetime.fromisoformat(text).timestamp() if text else None
    except ValueError:
        return None
