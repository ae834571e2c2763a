"""Times as Kubernetes writes them."""

from __future__ import annotations

import datetime


def stamp(now: float) -> str:
    """Seconds since 1970 as Kubernetes writes times: in UTC, to the second."""
    return datetime.datetime.fromtimestamp(now, datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def moment(text: str | None) -> float | None:
    """Seconds since 1970; None for what is not a time."""
    try:
        return datetime.datetime.fromisoformat(text).timestamp() if text else None
    except ValueError:
        return None
