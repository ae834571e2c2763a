"""Conditions: the history in an object's status, one entry for each type that was ever true."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

Condition = dict[str, Any]


def enter(conditions: Iterable[Condition], type_: str, reason: str, message: str, at: str) -> list[Condition]:
    """The history once the condition `type_` is true and every other one false.

    `lastTransitionTime` changes with the status alone, `lastUpdateTime` with anything; an entry that stays as it was
    keeps both, so that entering a condition again writes nothing new.
    """
    history = [dict(condition) for condition in conditions]
    if all(entry.get("type") != type_ for entry in history):
        history.append({"type": type_})
    for entry in history:
        before = dict(entry)
        if entry.get("type") == type_:
            entry.update(status="True", reason=reason, message=message)
        else:
            entry["status"] = "False"
        if entry["status"] != before.get("status"):
            entry["lastTransitionTime"] = at
        if entry != before:
            entry["lastUpdateTime"] = at
    return history
