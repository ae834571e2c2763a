"""The status of an ElasticJob: writing it from a `JobReport`, patching it for the operator, and reading it.

DLRover nests most fields in `status.status`. `resource` declares the fields of the status, `resile.api.job_report`
those of the report, and the master fills in the report (`resile.master.kubernetes.job_status`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any

import msgspec

from resile.api.job_phase import JobPhase
from resile.api.job_report import FailureReport, JobReport, NodeCounts
from resile.api.kinds.base import Manifest
from resile.api.kinds.elasticjob.labels import role_selector
from resile.api.kinds.elasticjob.resource import (
    Condition,
    ElasticJobStatus,
    JobProgress,
    LastFailure,
    ReplicaStatus,
    StepProgress,
)
from resile.api.timestamps import moment, stamp

_COUNTS = {
    "initial": "launching",
    "pending": "pending",
    "active": "running",
    "succeeded": "succeeded",
    "failed": "failed",
}
"""The fields of a `ReplicaStatus`, and those of a `NodeCounts` with the same meaning."""


def phase_of(item: Manifest) -> JobPhase | None:
    try:
        return JobPhase((item.get("status") or {}).get("phase") or "")
    except ValueError:
        return None


def conditions_of(item: Manifest) -> list[Manifest]:
    return list(_inner(item.get("status") or {}).get("conditions") or ())


def report_of(item: Manifest) -> JobReport:
    status = item.get("status") or {}
    inner, progress, failure = _inner(status), status.get("progress") or {}, status.get("lastFailure")
    return JobReport(
        phase=phase_of(item) or JobPhase.CREATED,
        reason=status.get("reason") or "",
        message=status.get("message") or "",
        nodes={
            role: NodeCounts(**{ours: count.get(theirs) or 0 for theirs, ours in _COUNTS.items()})
            for role, count in (inner.get("replicaStatuses") or {}).items()
        },
        started_at=moment(inner.get("startTime")),
        ended_at=moment(inner.get("completionTime")),
        plan=status.get("scalePlan") or "",
        step=progress.get("step"),
        total=progress.get("total") or 0,
        speed=progress.get("speed") or 0.0,
        round=progress.get("round") or 0,
        members=progress.get("members") or 0,
        goodput=status.get("goodput") or 0.0,
        restarts=status.get("restarts") or 0,
        last_failure=_failure(failure) if failure else None,
        generation=status.get("observedGeneration") or 0,
    )


def write_status(report: JobReport, job: str, before: Manifest, now: float) -> Manifest:
    inner = _inner(before)
    phase, sentence = report.phase, report.message or f"the job is {report.phase.value.lower()}"
    history = enter(_known(inner.get("conditions") or ()), phase.value, phase.reason, sentence, stamp(now))
    status = ElasticJobStatus(
        phase=report.phase,
        reason=report.reason or report.phase.reason,
        message=report.message,
        status=JobProgress(
            conditions=msgspec.convert(history, tuple[Condition, ...]),
            replica_statuses={role: _replicas(count, job, role) for role, count in report.nodes.items()},
            start_time=_stamped(report.started_at),
            completion_time=_stamped(report.ended_at),
            last_reconcile_time=inner.get("lastReconcileTime") or "",
        ),
        scale_plan=report.plan,
        progress=StepProgress(
            step=report.step,
            total=report.total,
            speed=round(report.speed, 2),
            round=report.round,
            members=report.members,
        ),
        goodput=round(report.goodput, 3),
        restarts=report.restarts,
        last_failure=_last_failure(report.last_failure) if report.last_failure else None,
        observed_generation=report.generation,
    )
    return msgspec.json.decode(msgspec.json.encode(status), type=Manifest)  # with lists, as from an API server


def phase_patch(item: Manifest, phase: JobPhase | None, reason: str, message: str, now: float) -> Manifest:
    before = _inner(item.get("status") or {})
    inner: Manifest = {"lastReconcileTime": stamp(now)}
    patch: Manifest = {"reason": reason or None, "message": message or None, "status": inner}
    if phase is not None:
        patch["phase"] = phase.value
        patch["observedGeneration"] = item["metadata"].get("generation", 0)
        inner["conditions"] = enter(before.get("conditions") or (), phase.value, phase.reason, message, stamp(now))
        if phase.ended:
            inner["completionTime"] = before.get("completionTime") or stamp(now)
        elif before.get("completionTime"):
            inner["completionTime"] = None
    return patch


def enter(conditions: Iterable[Manifest], type_: str, reason: str, message: str, at: str) -> list[Manifest]:
    """A copy of a job's conditions in which `type_` is true and all others are false, as of time `at`.

    `lastTransitionTime` changes with the status of a condition, `lastUpdateTime` with any field. A condition that does
    not change keeps both, so that entering the same condition again changes nothing.
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


def _inner(status: Manifest) -> Manifest:
    return status.get("status") or {}


def _known(entries: Iterable[Any]) -> list[Manifest]:
    """The conditions among `entries` that this version can read; the others are left out."""
    known = []
    for entry in entries:
        with contextlib.suppress(msgspec.ValidationError):
            known.append(msgspec.to_builtins(msgspec.convert(entry, Condition, strict=False)))
    return known


def _stamped(at: float | None) -> str:
    return "" if at is None else stamp(at)


def _replicas(count: NodeCounts, job: str, role: str) -> ReplicaStatus:
    selector = ",".join(f"{label}={value}" for label, value in role_selector(job, role).items())
    return ReplicaStatus(**{theirs: getattr(count, ours) for theirs, ours in _COUNTS.items()}, label_selector=selector)


def _last_failure(failure: FailureReport) -> LastFailure:
    told = msgspec.structs.asdict(failure)
    return LastFailure(time=stamp(told.pop("at")), **told)


def _failure(told: Manifest) -> FailureReport:
    return FailureReport(
        node=told.get("node") or "",
        reason=told.get("reason") or "",
        message=told.get("message") or "",
        at=moment(told.get("time")) or 0.0,
        exit_code=told.get("exitCode"),
    )
