"""The reconciler of plans of one kind: refuses plans that no master will execute."""

from __future__ import annotations

import time
from collections.abc import Callable

from resile.api.ids import Seconds
from resile.api.kinds.base import PlanKind, PlanPhase
from resile.kube.client import Client
from resile.kube.errors import CONFLICT, NOT_FOUND, KubeError
from resile.kube.events import emit
from resile.kube.informer import Informer, Key
from resile.kube.kinds import of
from resile.operator.plans.decisions import Refuse, Wait, decide_plan
from resile.operator.workqueue import TryAgain


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
        """Refuse a plan if no master will execute it. Returns in how many seconds to reconcile it again, or None."""
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
