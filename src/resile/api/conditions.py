"""The conditions of a job's status: one entry for each phase that the job was in, of which one is true.

Operator and master both write them, each where the other does not, so both go by this one rule.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from resile.api.job_phase import JobPhase
from resile.api.moments import stamp

Condition = dict[str, Any]


def entered(known: Iterable[Any], phase: JobPhase, message: str, now: float) -> list[Condition]:
    """The conditions of a job that is in `phase`: that one is true and all others are false.

    An entry that does not change keeps its times. Entries of phases that this version does not know are left out: a
    schema would refuse the whole status for them.
    """
    at = stamp(now)
    history = [
        _changed(entry, phase, message, at)
        for entry in known
        if isinstance(entry, dict) and entry.get("type") in list(JobPhase)
    ]
    if all(entry["type"] != phase for entry in history):
        times = {"lastUpdateTime": at, "lastTransitionTime": at}
        history.append({"type": phase.value, "status": "True", "reason": phase.reason, "message": message, **times})
    return history


def _changed(entry: Condition, phase: JobPhase, message: str, at: str) -> Condition:
    is_current = entry["type"] == phase
    after = {**entry, "status": "True" if is_current else "False"}
    if is_current:
        after.update(reason=phase.reason, message=message)
    if after != entry:
        after["lastUpdateTime"] = at
    if after["status"] != entry.get("status"):
        after["lastTransitionTime"] = at
    return after
