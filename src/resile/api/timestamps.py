"""Converts timestamps of Kubernetes to seconds since 1970, and back."""

from __future__ import annotations

import datetime


def stamp(at: float) -> str:
    """Seconds since 1970 as a timestamp of Kubernetes; a fraction of a second is lost."""
    return datetime.datetime.fromtimestamp(at, datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def moment(text: str | None) -> float | None:
    """A timestamp of Kubernetes as seconds since 1970; None if `text` is no timestamp."""
    try:
        return datetime.datetime.fromisoformat(text).timestamp() if text else None
    except ValueError:
        return None
