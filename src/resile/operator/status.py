"""The words that the operator writes into the status of jobs and plans, as patches to merge."""

from __future__ import annotations

import datetime
from collections.abc import Iterable

from resile.api.kinds.elasticjob import Phase
from resile.api.kinds.scaleplan import PlanPhase
from resile.operator.cluster import Object


def stamp(now: float) -> str:
    """Seconds since 1970 as Kubernetes writes times."""
    return datetime.datetime.fromtimestamp(now, datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def moment(text: str) -> float | None:
    """The reverse; None for what is not a time."""
    try:
        return datetime.datetime.fromisoformat(text).timestamp()
    except ValueError:
        return None


def entered(conditions: Iterable[Object], phase: Phase, message: str, now: float) -> list[Object]:
    """A job's history once it is in `phase`: that condition is true and every other false."""
    at = stamp(now)
    history: list[Object] = []
    found = False
    for condition in conditions:
        status = "True" if condition.get("type") == phase else "False"
        changed = condition.get("status") != status
        entry = {**condition, "status": status}
        if condition.get("type") == phase:
            found = True
            changed = changed or condition.get("message", "") != message
            entry.update(reason=phase.reason, message=message)
        if condition.get("status") != status:
            entry["lastTransitionTime"] = at
        if changed:
            entry["lastUpdateTime"] = at
        history.append(entry)
    if not found:
        history.append(
            {
                "type": phase.value,
                "status": "True",
                "reason": phase.reason,
                "message": message,
                "lastUpdateTime": at,
                "lastTransitionTime": at,
            }
        )
    return history


def job_patch(job: Object, phase: Phase | None, reason: str, message: str, now: float) -> Object:
    """The patch that puts a job into `phase`, or only changes what is said of it if that is None."""
    before = (job.get("status") or {}).get("status") or {}
    inner: Object = {"lastReconcileTime": stamp(now)}
    patch: Object = {"reason": reason or None, "message": message or None, "status": inner}
    if phase is not None:
        patch["phase"] = phase.value
        patch["observedGeneration"] = job["metadata"].get("generation", 0)
        inner["conditions"] = entered(before.get("conditions") or (), phase, message, now)
        if phase.ended:
            inner["completionTime"] = before.get("completionTime") or stamp(now)
        elif before.get("completionTime"):
            inner["completionTime"] = None
    return patch


def plan_patch(plan: Object, reason: str, message: str, now: float) -> Object:
    """The patch that fails a plan."""
    before = plan.get("status") or {}
    return {
        "phase": PlanPhase.FAILED.value,
        "reason": reason,
        "message": message,
        "createTime": before.get("createTime") or stamp(now),
        "finishTime": stamp(now),
    }
