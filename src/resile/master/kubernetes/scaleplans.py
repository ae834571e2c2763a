"""Manual ScalePlans: found by a watch, executed by the core in the order of their creation, and told how they end.

A plan goes Pending, Scaling, and then Succeeded or Failed with a reason and a sentence. The core decides about both and
keeps the plans under way in the journal, so a master that comes back asks for every plan again that has no end yet and
is told what became of it. Writing a status is tried as long as the plan is there; the wait is bounded, and nothing
but plans waits for it.

A plan names its job by name alone. One that is seen while this very job is there was made in its time and is the
master's; one that is seen after the job is gone is left to the next job of that name.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from lightkube import AsyncClient
from lightkube.types import PatchType

from resile.api.ids import Seconds
from resile.api.job import JobSpec
from resile.api.kinds.labels import JOB_LABELS
from resile.api.kinds.scaleplan import PlanPhase, ScalePlan, ScaleType
from resile.api.kinds.scaleplan.kind import SCALE_PLAN
from resile.api.manifests.errors import BadManifest
from resile.api.manifests.reader import read_manifest
from resile.core.events import PlanDeleted
from resile.core.state import MAX_PLAN_ENDS
from resile.master.app import Serving
from resile.master.kubernetes.job_status import stamp
from resile.platform.kubernetes import client as kube

log = logging.getLogger("resile.master")

Manifest = dict[str, Any]

LAST_SECONDS = Seconds(5.0)
"""For the ends of plans that a master has to tell when it ends itself."""
OVER = (PlanPhase.SUCCEEDED, PlanPhase.FAILED)
INVALID, NOT_SUPPORTED, REFUSED = "InvalidPlan", "NotSupported", "Refused"


class ScalePlanWatch:
    """Follows the ScalePlans of the namespace and executes the manual ones of this job, oldest first."""

    def __init__(self, spec: JobSpec, client: AsyncClient, serving: Serving) -> None:
        """Nothing is asked before `run`.

        Args:
            spec: the job.
            client: speaks to the API server in the job's namespace.
            serving: the master.
        """
        self._spec = spec
        self._client = client
        self._serving = serving
        self._new: list[Manifest] = []
        self._met: set[str] = set()
        self._open: dict[str, Manifest] = {}
        """Plans that the core has taken and whose end has not been told."""
        self._changed = asyncio.Event()
        also = serving.shell.after_turn

        def turned() -> None:
            also()
            self._changed.set()

        serving.shell.after_turn = turned

    async def run(self) -> None:
        """Execute plans until cancelled; then tell the ends that have come, within `LAST_SECONDS`."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._watch())
                tasks.create_task(self._work())
        finally:
            try:
                async with asyncio.timeout(LAST_SECONDS):
                    await self._tell_ends()
            except TimeoutError:
                log.warning("the ends of some ScalePlans could not be told in time")

    # what is seen ---------------------------------------------------------------------------------------------------

    async def _watch(self) -> None:
        attempt = 0
        while True:
            try:
                plans, version = await kube.list_all(self._client, kube.PLANS)
                break
            except kube.CannotReach as error:
                attempt += 1
                log.warning("the job's ScalePlans cannot be listed: %s", kube.sentence(error))
                await asyncio.sleep(kube.pause(attempt))
        self._listed(plans)
        async for change, thing in kube.follow(self._client, kube.PLANS, version):
            if change == "LISTED":
                self._listed(thing["items"])
            elif change == "DELETED" or thing["metadata"].get("deletionTimestamp"):
                self._deleted(thing["metadata"]["uid"])
            else:
                self._take([thing])

    def _listed(self, plans: list[Manifest]) -> None:
        there = {plan["metadata"]["uid"] for plan in plans}
        for uid in (self._under_way() | self._open.keys()) - there:
            self._deleted(uid)
        self._take(plans)

    def _take(self, plans: list[Manifest]) -> None:
        for plan in sorted(plans, key=_age):
            uid = plan["metadata"]["uid"]
            over = (plan.get("status") or {}).get("phase") in OVER
            if uid not in self._met and not over and self._ours(plan):
                self._met.add(uid)
                self._new.append(plan)
                self._changed.set()

    def _deleted(self, uid: str) -> None:
        self._new = [plan for plan in self._new if plan["metadata"]["uid"] != uid]
        self._open.pop(uid, None)
        if uid in self._under_way():
            self._serving.shell.submit(PlanDeleted(uid=uid))

    def _under_way(self) -> set[str]:
        return {change.uid for change in self._serving.shell.engine.state.changes if change.uid}

    def _ours(self, plan: Manifest) -> bool:
        labels = plan["metadata"].get("labels") or {}
        named = ((plan.get("spec") or {}).get("ownerJob"), *(labels.get(label) for label in JOB_LABELS))
        return self._spec.name in named

    # what is done ---------------------------------------------------------------------------------------------------

    async def _work(self) -> None:
        """Take plans, never more than the core remembers the ends of: one forgotten untold would be executed again."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            await self._tell_ends()
            while self._new and len(self._open) < MAX_PLAN_ENDS:
                await self._execute(self._new.pop(0))
                await self._tell_ends()

    async def _execute(self, plan: Manifest) -> None:
        try:
            read = read_manifest(plan)
        except BadManifest as bad:  # whichever job it is for
            await self._tell(plan, PlanPhase.FAILED, INVALID, "; ".join(str(error) for error in bad.errors))
            return
        if not isinstance(read, ScalePlan) or read.job != self._spec.name or read.scale_type is not ScaleType.MANUAL:
            return
        if not await self._job_is_there():
            return
        later = SCALE_PLAN.not_supported(read)
        if later:
            await self._tell(plan, PlanPhase.FAILED, NOT_SUPPORTED, later)
            return
        uid = plan["metadata"]["uid"]
        if read.status.phase is not PlanPhase.SCALING:  # else a master before this one was as far
            await self._tell(plan, PlanPhase.PENDING, "Taken", "")
        refused = await self._serving.commands.change(SCALE_PLAN.to_plan(read, uid))
        if refused:
            await self._tell(plan, PlanPhase.FAILED, REFUSED, refused)
            return
        self._open[uid] = plan
        if read.status.phase is not PlanPhase.SCALING:
            await self._tell(plan, PlanPhase.SCALING, "Scaling", "")

    async def _job_is_there(self) -> bool:
        attempt = 0
        while True:
            attempt += 1
            try:
                return await kube.same(self._client, kube.JOBS, self._spec.name, self._spec.uid) is not None
            except kube.CannotReach as error:
                log.warning("whether the job is still there cannot be asked now: %s", kube.sentence(error))
            await asyncio.sleep(kube.pause(attempt))

    async def _tell_ends(self) -> None:
        ends = self._serving.shell.engine.state.plan_ends
        for uid, plan in list(self._open.items()):
            end = ends.get(uid)
            if end is not None:
                phase = PlanPhase.SUCCEEDED if end.succeeded else PlanPhase.FAILED
                await self._tell(plan, phase, end.reason, end.message)
                self._open.pop(uid, None)

    async def _tell(self, plan: Manifest, phase: PlanPhase, reason: str, message: str) -> None:
        """Write a plan's status, again and again until it is written or the plan is gone."""
        now = stamp(self._serving.shell.now)
        before = plan.get("status") or {}
        status: Manifest = {"createTime": now, **before, "phase": phase.value, "reason": reason}
        status.pop("message", None)
        if message:
            status["message"] = message
        if phase in OVER:
            status["finishTime"] = now
        plan["status"] = status
        name = plan["metadata"]["name"]
        log.info("ScalePlan %s: %s%s", name, phase.value, f": {message}" if message else "")
        attempt = 0
        while True:
            attempt += 1
            try:
                await self._client.patch(
                    kube.PLANS.Status,
                    name,
                    kube.new_status(plan["metadata"]["uid"], status),
                    patch_type=PatchType.JSON,
                    namespace=self._spec.namespace,
                )
                return
            except kube.CannotReach as error:
                if kube.absent(error) or kube.code_of(error) == kube.INVALID:
                    return  # it is gone, and perhaps another one of its name is there
                log.warning("the status of ScalePlan %s cannot be written: %s", name, kube.sentence(error))
            await asyncio.sleep(kube.pause(attempt))


def _age(plan: Manifest) -> tuple[str, int]:
    """By creation; within a second by the version, which grows with every write."""
    metadata = plan["metadata"]
    version = str(metadata.get("resourceVersion") or "")
    return str(metadata.get("creationTimestamp")), int(version) if version.isdecimal() else 0
