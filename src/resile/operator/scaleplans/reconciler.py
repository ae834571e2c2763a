"""The reconciler of ScalePlans: refuses those that no master will take up."""

from __future__ import annotations

import time
from collections.abc import Callable

from resile.api.ids import Seconds
from resile.kube.client import Client
from resile.kube.errors import CONFLICT, NOT_FOUND, KubeError
from resile.kube.informer import Informer, Key
from resile.kube.kinds import ELASTIC_JOBS, SCALE_PLANS
from resile.operator.events import emit
from resile.operator.scaleplans.decisions import Refuse, Wait, decide_plan, job_named_by
from resile.operator.status import plan_patch
from resile.operator.workqueue import TryAgain


class ScalePlanReconciler:
    """Reconciles ScalePlans."""

    def __init__(self, client: Client, plans: Informer, jobs: Informer, clock: Callable[[], float] = time.time) -> None:
        self._client = client
        self._plans = plans
        self._jobs = jobs
        self._clock = clock

    async def reconcile(self, key: Key) -> Seconds | None:
        """Refuse a plan that must be refused; returns when to reconcile it again."""
        plan = self._plans.get(key)
        if plan is None:
            return None
        named = job_named_by(plan)
        job = self._jobs.get(Key(key.namespace, named)) if named else None
        decision = decide_plan(plan, job, self._clock())
        if isinstance(decision, Refuse) and named and job is None:
            # The informer of jobs may be behind that of plans, and a refusal is final: ask.
            job = await self._client.get(ELASTIC_JOBS, key.namespace, named)
            decision = decide_plan(plan, job, self._clock())
        match decision:
            case Wait(delay=delay):
                return delay
            case Refuse(reason=reason, message=message):
                patch = plan_patch(plan, reason, message, self._clock())
                version = plan["metadata"]["resourceVersion"]
                try:
                    await self._client.patch_status(SCALE_PLANS, key.namespace, key.name, version, patch)
                except KubeError as error:
                    if error.code in (CONFLICT, NOT_FOUND):
                        raise TryAgain("the plan has changed in the meantime") from error
                    raise
                await emit(self._client, SCALE_PLANS, plan, reason, message, warning=True, now=self._clock())
        return None
