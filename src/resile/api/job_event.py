"""One line of a job's story: what happened, when, and to which node."""

from __future__ import annotations

import msgspec


class JobEvent(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the story. Numbers grow by one; `node` is empty where the line is about the whole job."""

    number: int
    at: float
    reason: str
    message: str
    node: str = ""
    warning: bool = False
