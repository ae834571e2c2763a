"""The reconciler of ScalePlans: refuses those that no master will take up."""

from __future__ import annotations

import time
from collections.abc import Callable

from resile.api.ids import Seconds
from resile.operator.cluster import CONFLICT, ELASTIC_JOB, NOT_FOUND, SCALE_PLAN, Cluster, ClusterError
from resile.operator.events import tell
from resile.operator.informer import Informer
from resile.operator.scaleplans.decisions import Refuse, Wait, decide_plan, job_named_by
from resile.operator.status import plan_patch
from resile.operator.workqueue import Key, TryAgain


class ScalePlanReconciler:
    """Looks at ScalePlans."""

    def __init__(
        self, cluster: Cluster, plans: Informer, jobs: Informer, clock: Callable[[], float] = time.time
    ) -> None:
        self._cluster = cluster
        self._plans = plans
        self._jobs = jobs
        self._clock = clock

    async def look(self, key: Key) -> Seconds | None:
        """Refuse a plan that must be; tells when to look again."""
        plan = self._plans.get(key)
        if plan is None:
            return None
        named = job_named_by(plan)
        job = self._jobs.get(Key(key.namespace, named)) if named else None
        decision = decide_plan(plan, job, self._clock())
        if isinstance(decision, Refuse) and named and job is None:
            # The mirror of jobs may be behind that of plans, and a refusal is for ever: ask.
            job = await self._cluster.get(ELASTIC_JOB, key.namespace, named)
            decision = decide_plan(plan, job, self._clock())
        match decision:
            case Wait(delay=delay):
                return delay
            case Refuse(reason=reason, message=message):
                patch = plan_patch(plan, reason, message, self._clock())
                version = plan["metadata"]["resourceVersion"]
                try:
                    await self._cluster.patch_status(SCALE_PLAN, key.namespace, key.name, version, patch)
                except ClusterError as error:
                    if error.code in (CONFLICT, NOT_FOUND):
                        raise TryAgain("the plan has changed in the meantime") from error
                    raise
                await tell(self._cluster, plan, reason, message, warning=True, now=self._clock())
        return None
