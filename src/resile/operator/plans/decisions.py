"""Refuses plans that no master will ever execute, with a reason. All other plans belong to the master of their job."""

from __future__ import annotations

import msgspec

from resile.api.ids import Seconds
from resile.api.kinds.base import PlanKind, Resource
from resile.api.manifests.errors import BadManifest, listed
from resile.api.timestamps import moment
from resile.kube.kinds import Object
from resile.kube.manifests import read_object
from resile.operator import settings
from resile.operator.jobs.master_status import short


class Refuse(msgspec.Struct, frozen=True):
    reason: str
    message: str


class Wait(msgspec.Struct, frozen=True):
    """Reconcile the plan again after `delay`: its job may be made by then."""

    delay: Seconds


def decide_plan(kind: PlanKind, plan: Object, job: Object | None, now: float) -> Refuse | Wait | None:
    """Decide about a plan; `job` is the one that it names, if that exists. None if the plan is left to the master."""
    if plan["metadata"].get("deletionTimestamp") or not kind.is_open(plan):
        return None
    try:
        read = read_object(plan)
    except BadManifest as bad:
        return Refuse("InvalidPlan", short("; ".join(str(error) for error in bad.errors)))
    if not kind.is_order(read):
        return None
    if job is None:
        return _no_job(kind, plan, now)
    phase = kind.job_kind.phase_of(job)
    if phase is not None and phase.ended:
        return Refuse("JobEnded", f"the job {kind.job_of(plan)} has ended: its phase is {phase}")
    return _roles(kind, read, job)


def _no_job(kind: PlanKind, plan: Object, now: float) -> Refuse | Wait:
    metadata = plan["metadata"]
    left = (moment(metadata.get("creationTimestamp")) or 0.0) + settings.PLAN_WAITS - now
    if left > 0:
        return Wait(Seconds(left))
    named = f"{kind.job_kind.definition.kind} {kind.job_of(plan)}"
    return Refuse("JobNotFound", f"there is no {named} in the namespace {metadata.get('namespace', 'default')}")


def _roles(kind: PlanKind, plan: Resource, job: Object) -> Refuse | None:
    try:
        known = kind.job_kind.to_job_spec(read_object(job)).roles
    except BadManifest:
        return None  # the job's own status says so
    missing = sorted(kind.roles_of(plan) - known.keys())
    if not missing:
        return None
    name = job["metadata"]["name"]
    return Refuse("RoleNotFound", f"the job {name} has no role {listed(missing)}; it has {listed(known)}")
