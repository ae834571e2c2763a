"""The reconciler of plans of one kind: refuses plans that no master will ever execute, with a reason.

All other plans belong to the master of their job.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec

from resile.api.ids import Seconds
from resile.api.kinds.base import PlanKind, PlanPhase, Resource
from resile.api.manifests.errors import BadManifest, listed
from resile.api.timestamps import moment
from resile.kube.client import Client
from resile.kube.errors import CONFLICT, NOT_FOUND, KubeError
from resile.kube.events import emit
from resile.kube.informer import Informer, Key
from resile.kube.kinds import Object, of
from resile.kube.manifests import read_object
from resile.operator import intervals
from resile.operator.jobs.master_status import short
from resile.operator.workqueue import TryAgain


class Refuse(msgspec.Struct, frozen=True):
    reason: str
    message: str


class Wait(msgspec.Struct, frozen=True):
    """Reconcile the plan again after `delay`, because the job that the plan names may exist by then."""

    delay: Seconds


def decide_plan(kind: PlanKind, plan: Object, job: Object | None, now: float) -> Refuse | Wait | None:
    """Decide about a plan for `job` (None if no such job exists). Returns None if the operator need do nothing."""
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
        return Refuse("JobEnded", f"the job is over ({phase})")  # what the master says if it is the first to see it
    return _roles(kind, read, job)


def _no_job(kind: PlanKind, plan: Object, now: float) -> Refuse | Wait:
    metadata = plan["metadata"]
    left = (moment(metadata.get("creationTimestamp")) or 0.0) + intervals.PLAN_WAITS - now
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


class PlanReconciler:
    def __init__(
        self, kind: PlanKind, client: Client, plans: Informer, jobs: Informer, clock: Callable[[], float] = time.time
    ) -> None:
        self._kind = kind
        self._client = client
        self._plans = plans
        self._jobs = jobs
        self._clock = clock

    async def reconcile(self, key: Key) -> Seconds | None:
        """Refuse a plan that no master will execute. Returns the seconds until the next call; None if there is none."""
        plan = self._plans.get(key)
        if plan is None:
            return None
        named = self._kind.job_of(plan)
        job = self._jobs.get(Key(key.namespace, named)) if named else None
        decision = decide_plan(self._kind, plan, job, self._clock())
        if isinstance(decision, Refuse) and named and job is None:
            # The informer of jobs may be behind that of plans, and a refusal is final: ask.
            job = await self._client.get(of(self._kind.job_kind), key.namespace, named)
            decision = decide_plan(self._kind, plan, job, self._clock())
        match decision:
            case Wait(delay=delay):
                return delay
            case Refuse(reason=reason, message=message):
                status = self._kind.write_status(plan, PlanPhase.FAILED, reason, message, self._clock())
                version = plan["metadata"]["resourceVersion"]
                try:
                    await self._client.patch_status(of(self._kind), key.namespace, key.name, version, status)
                except KubeError as error:
                    if error.code in (CONFLICT, NOT_FOUND):
                        raise TryAgain("the plan has changed in the meantime") from error
                    raise
                kind, now = of(self._kind), self._clock()
                await emit(self._client, kind, plan["metadata"], reason, message, warning=True, now=now)
        return None
