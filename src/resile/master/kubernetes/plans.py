"""Watches plans, passes them to the core in the order of their creation, and writes their status.

A plan is Pending, then Scaling, and then Succeeded or Failed with a reason and a sentence. The journal has the plans
that are not done, so a master that comes back asks the core again for every plan without an end, and the core answers
how it ended. A status is written again and again until it is there or the plan is gone; only other plans wait for that.

A plan names its job by name alone. If this very job exists when the master sees a plan, the plan is for this job. If
not, the plan is left to the next job of that name.
"""

from __future__ import annotations

import asyncio
import logging

from resile.api.ids import Seconds
from resile.api.job import JobSpec
from resile.api.kinds.base import PlanKind, PlanPhase
from resile.api.manifests.errors import BadManifest
from resile.api.manifests.reader import read_manifest
from resile.core.events import PlanDeleted
from resile.core.state import MAX_PLAN_ENDS
from resile.kube.client import Client
from resile.kube.errors import INVALID, KubeError
from resile.kube.informer import Listed, Watched, list_and_watch
from resile.kube.kinds import Object, of
from resile.kube.retry import until_answered
from resile.master.app import Serving

log = logging.getLogger("resile.master")

LAST_SECONDS = Seconds(5.0)
"""How long a master that ends tries to write the status of plans that have ended."""
INVALID_PLAN, NOT_SUPPORTED, REFUSED = "InvalidPlan", "NotSupported", "Refused"


class PlanWatch:
    """Watches the plans of one kind in the job's namespace, and executes those for this job, oldest first."""

    def __init__(self, kind: PlanKind, spec: JobSpec, client: Client, serving: Serving) -> None:
        self._kind = kind
        self._spec = spec
        self._client = client
        self._serving = serving
        self._new: list[Object] = []
        self._met: set[str] = set()
        self._open: dict[str, Object] = {}
        """By uid: plans that the core has granted and whose end is not in their status yet."""
        self._changed = asyncio.Event()
        serving.events.observers.append(self._changed.set)

    async def run(self) -> None:
        """Execute plans until cancelled; then write the status of those that have ended, within `LAST_SECONDS`."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._watch())
                tasks.create_task(self._work())
        finally:
            try:
                async with asyncio.timeout(LAST_SECONDS):
                    await self._tell_ends()
            except TimeoutError:
                log.warning("the ends of some plans could not be told in time")

    # what is seen ---------------------------------------------------------------------------------------------------

    async def _watch(self) -> None:
        async for news in list_and_watch(self._client, Watched(of(self._kind), self._spec.namespace)):
            if isinstance(news, Listed):
                self._on_list(news.items)
            elif news.deleted or news.item["metadata"].get("deletionTimestamp"):
                self._on_deleted(news.item["metadata"]["uid"])
            else:
                self._take([news.item])

    def _on_list(self, plans: list[Object]) -> None:
        there = {plan["metadata"]["uid"] for plan in plans}
        for uid in (self._under_way() | self._open.keys()) - there:
            self._on_deleted(uid)
        self._take(plans)

    def _take(self, plans: list[Object]) -> None:
        for plan in sorted(plans, key=_age):
            uid = plan["metadata"]["uid"]
            if uid not in self._met and self._kind.is_open(plan) and self._kind.job_of(plan) == self._spec.name:
                self._met.add(uid)
                self._new.append(plan)
                self._changed.set()

    def _on_deleted(self, uid: str) -> None:
        self._new = [plan for plan in self._new if plan["metadata"]["uid"] != uid]
        self._open.pop(uid, None)
        if uid in self._under_way():
            self._serving.events.submit(PlanDeleted(uid=uid))

    def _under_way(self) -> set[str]:
        return {change.uid for change in self._serving.events.engine.state.changes if change.uid}

    # what is done ---------------------------------------------------------------------------------------------------

    async def _work(self) -> None:
        while True:
            await self._changed.wait()
            self._changed.clear()
            await self._tell_ends()
            # The core remembers the ends of so many plans. A plan whose end it forgot would be executed again.
            while self._new and len(self._open) < MAX_PLAN_ENDS:
                await self._execute(self._new.pop(0))
                await self._tell_ends()

    async def _execute(self, plan: Object) -> None:
        try:
            read = read_manifest(plan)
        except BadManifest as bad:  # whichever job it is for
            await self._tell(plan, PlanPhase.FAILED, INVALID_PLAN, "; ".join(str(error) for error in bad.errors))
            return
        if not self._kind.is_order(read) or not await self._job_is_there():
            return
        later = self._kind.not_supported(read)
        if later:
            await self._tell(plan, PlanPhase.FAILED, NOT_SUPPORTED, later)
            return
        uid, before = plan["metadata"]["uid"], self._kind.phase_of(plan)
        if before is not PlanPhase.SCALING:  # else a master before this one was as far
            await self._tell(plan, PlanPhase.PENDING, "Taken", "")
        refused = await self._serving.commands.change(self._kind.to_plan(read, uid))
        if refused:
            await self._tell(plan, PlanPhase.FAILED, REFUSED, refused)
            return
        self._open[uid] = plan
        if before is not PlanPhase.SCALING:
            await self._tell(plan, PlanPhase.SCALING, "Scaling", "")

    async def _job_is_there(self) -> bool:
        spec = self._spec
        found = await until_answered(
            "whether the job is still there cannot be asked",
            lambda: self._client.get_same(of(self._kind.job_kind), spec.namespace, spec.name, spec.uid),
        )
        return found is not None

    async def _tell_ends(self) -> None:
        ends = self._serving.events.engine.state.plan_ends
        for uid, plan in list(self._open.items()):
            end = ends.get(uid)
            if end is not None:
                phase = PlanPhase.SUCCEEDED if end.succeeded else PlanPhase.FAILED
                await self._tell(plan, phase, end.reason, end.message)
                self._open.pop(uid, None)

    async def _tell(self, plan: Object, phase: PlanPhase, reason: str, message: str) -> None:
        plan["status"] = status = self._kind.write_status(plan, phase, reason, message, self._serving.events.now)
        name = plan["metadata"]["name"]
        log.info("%s %s: %s%s", self._kind.definition.kind, name, phase.value, f": {message}" if message else "")

        async def write() -> None:
            try:
                await self._client.replace_status(
                    of(self._kind), self._spec.namespace, name, plan["metadata"]["uid"], status
                )
            except KubeError as error:
                if not error.is_absent and error.code != INVALID:  # else it is gone, perhaps for one of its name
                    raise

        await until_answered(f"the status of {self._kind.definition.kind} {name} cannot be written", write)


def _age(plan: Object) -> tuple[str, int]:
    """A sort key: when the plan was created (whole seconds), then its resourceVersion, which grows with every write."""
    metadata = plan["metadata"]
    version = str(metadata.get("resourceVersion") or "")
    return str(metadata.get("creationTimestamp")), int(version) if version.isdecimal() else 0
