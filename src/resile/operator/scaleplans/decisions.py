"""ScalePlans that no master will ever take up: their status says why. All others belong to the master of their job."""

from __future__ import annotations

import msgspec

from resile.api.ids import Seconds
from resile.api.kinds.elasticjob import ElasticJob
from resile.api.kinds.scaleplan import PlanPhase, ScalePlan, ScaleType
from resile.api.kinds.to_job_spec import to_job_spec
from resile.api.manifests.errors import BadManifest, listed
from resile.api.manifests.reader import read_manifest
from resile.kube.kinds import Object
from resile.kube.timestamps import moment
from resile.operator import settings
from resile.operator.jobs.decisions import phase_of
from resile.operator.jobs.master_status import short
from resile.operator.trim import plain


class Refuse(msgspec.Struct, frozen=True):
    """Fail a plan."""

    reason: str
    message: str


class Wait(msgspec.Struct, frozen=True):
    """Reconcile again: its job may be on the way."""

    delay: Seconds


def decide_plan(plan: Object, job: Object | None, now: float) -> Refuse | Wait | None:
    """What to do about a plan; `job` is the one it names, if that exists. None: it is the master's, or done."""
    if plan["metadata"].get("deletionTimestamp") or not is_open(plan):
        return None
    try:
        read = read_manifest(plain(plan))
    except BadManifest as bad:
        return Refuse("InvalidPlan", short("; ".join(str(error) for error in bad.errors)))
    assert isinstance(read, ScalePlan)
    if read.scale_type is ScaleType.AUTO:
        return None
    if job is None:
        return _no_job(read, plan, now)
    ended = phase_of(job)
    if ended is not None and ended.ended:
        return Refuse("JobEnded", f"the job {read.job} has ended: its phase is {ended}")
    return _roles(read, job)


def is_open(plan: Object) -> bool:
    """Whether something may still become of a plan."""
    return (plan.get("status") or {}).get("phase") not in (PlanPhase.SUCCEEDED, PlanPhase.FAILED)


def job_named_by(plan: Object) -> str:
    """The job that a plan names; empty if it names none or cannot be read."""
    try:
        read = read_manifest(plain(plan))
    except BadManifest:
        return ""
    return read.job if isinstance(read, ScalePlan) else ""


def _no_job(plan: ScalePlan, item: Object, now: float) -> Refuse | Wait:
    born = moment(item["metadata"].get("creationTimestamp", "")) or 0.0
    left = born + settings.PLAN_WAITS - now
    if left > 0:
        return Wait(Seconds(left))
    return Refuse("JobNotFound", f"there is no ElasticJob {plan.job} in the namespace {plan.metadata.namespace}")


def _roles(plan: ScalePlan, job: Object) -> Refuse | None:
    try:
        read = read_manifest(plain(job))
    except BadManifest:
        return None  # the job's own status says so
    assert isinstance(read, ElasticJob)
    known = to_job_spec(read).roles
    missing = sorted(_roles_of(plan) - known.keys())
    if not missing:
        return None
    return Refuse("RoleNotFound", f"the job {plan.job} has no role {listed(missing)}; it has {listed(known)}")


def _roles_of(plan: ScalePlan) -> set[str]:
    spec = plan.spec
    named = {pod.node(plan.job) for pod in (*spec.remove_pods, *spec.migrate_pods)}
    return {
        *spec.replica_resource_specs,
        *(pod.type.value for pod in spec.create_pods if pod.type is not None),
        *(node.role for node in named if node is not None),
    }
