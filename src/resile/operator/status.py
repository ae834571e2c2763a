"""What the operator writes into the status of jobs and plans, as patches to merge."""

from __future__ import annotations

from resile.api.kinds.elasticjob import Phase
from resile.api.kinds.scaleplan import PlanPhase
from resile.kube.conditions import enter
from resile.kube.kinds import Object
from resile.kube.timestamps import stamp


def job_patch(job: Object, phase: Phase | None, reason: str, message: str, now: float) -> Object:
    """The patch that puts a job into `phase`; without one, the patch that changes reason and message alone."""
    before = (job.get("status") or {}).get("status") or {}
    inner: Object = {"lastReconcileTime": stamp(now)}
    patch: Object = {"reason": reason or None, "message": message or None, "status": inner}
    if phase is not None:
        patch["phase"] = phase.value
        patch["observedGeneration"] = job["metadata"].get("generation", 0)
        inner["conditions"] = enter(before.get("conditions") or (), phase.value, phase.reason, message, stamp(now))
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
