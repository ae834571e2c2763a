"""What people ask of a running job through the cluster: changes of its ElasticJob, and manual ScalePlans.

Wishes go to the core like those of a command line, and its answer is written back. The number of nodes that an
ElasticJob names is acted upon when it changes, not whenever it is seen: a plan or `resile scale` may have changed the
number since. What was last seen is kept in the journal, so a change made while no master lived is found.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import msgspec
from lightkube import AsyncClient
from lightkube.types import PatchType

from resile.api.elasticjob import ElasticJob
from resile.api.ids import Seconds
from resile.api.job import JobSpec
from resile.api.manifest import read_manifest
from resile.api.mistakes import BadManifest
from resile.api.reports import NodeStatus
from resile.api.scaleplan import PlanPhase, ScalePlan, ScaleType
from resile.api.translate import to_job_spec
from resile.core.state import JobState
from resile.master.app import Serving
from resile.master.job_status import stamp
from resile.master.kubernetes_journal import KubernetesJournal
from resile.platform.kubernetes import client as kube
from resile.wire.messages import Ask

log = logging.getLogger("resile.master")

Manifest = dict[str, Any]

LAST_SEEN = "wanted"
"""Under which the journal keeps what the ElasticJob asked for."""
LOOK_SECONDS = Seconds(0.25)
"""How often a plan under way is compared with the nodes."""


class Wanted(msgspec.Struct, frozen=True):
    """The part of an ElasticJob that may change while it runs."""

    replicas: dict[str, int]
    suspend: bool


def wanted(job: Manifest) -> Wanted:
    """What an ElasticJob asks for.

    Raises:
        BadManifest: it was changed into something that cannot be understood.
    """
    read = read_manifest(job)
    if not isinstance(read, ElasticJob):
        raise TypeError("not an ElasticJob")
    spec = to_job_spec(read)
    return Wanted({role: declared.replicas for role, declared in spec.roles.items()}, spec.suspend)


async def ask(serving: Serving, what: str, **arguments: Any) -> str:
    """Ask the core for something; what it has against it, or nothing."""
    answered: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def answer(error: str, _: Any) -> None:
        if not answered.done():
            answered.set_result(error)

    serving.asks(Ask(request=0, what=what, arguments=arguments), answer)
    return await answered


class JobWatch:
    """Follows the ElasticJob itself."""

    def __init__(
        self,
        spec: JobSpec,
        client: AsyncClient,
        serving: Serving,
        journal: KubernetesJournal,
        seen: Callable[[Manifest, str], None],
    ) -> None:
        """Nothing is asked before `run`.

        Args:
            spec: the job.
            client: speaks to the API server in the job's namespace.
            serving: the master.
            journal: keeps what was last seen.
            seen: given every version of the ElasticJob, once it has been acted upon, or with what is wrong with it.
        """
        self._spec = spec
        self._client = client
        self._serving = serving
        self._journal = journal
        self._seen = seen

    async def run(self, job: Manifest) -> None:
        """Act upon `job`, then on every change; returns when the job was deleted."""
        known = self._journal.recall(LAST_SEEN)
        before = msgspec.json.decode(known, type=Wanted) if known else None
        if before is None and self._serving.fresh:
            before = wanted(job)  # the first nodes come from it anyway
            self._remember(before)
        last = await self._act(job, before)
        fields = {"metadata.name": self._spec.name}
        version = job["metadata"]["resourceVersion"]
        async for change, thing in kube.follow(self._client, kube.JOBS, version, fields=fields):
            if change == "LISTED":
                there = [one for one in thing["items"] if one["metadata"]["uid"] == self._spec.uid]
                thing, change = (there[0], "MODIFIED") if there else (thing, "DELETED")
            if change == "DELETED" or thing["metadata"].get("deletionTimestamp"):
                return
            last = await self._act(thing, last)

    async def _act(self, job: Manifest, before: Wanted | None) -> Wanted | None:
        try:
            now = wanted(job)
        except BadManifest as bad:
            log.warning("the job was changed into something that cannot be run, and goes on as it was: %s", bad)
            self._seen(job, str(bad))
            return before
        if now != before:
            self._remember(now)
            state = self._serving.shell.engine.state
            for role, replicas in now.replicas.items():
                if before is not None and before.replicas.get(role) == replicas:
                    continue
                if state.targets.get(role) != replicas:
                    await self._wish("scale", role=role, replicas=replicas)
            if (before is None or before.suspend != now.suspend) and state.suspended != now.suspend:
                await self._wish("suspend", on=now.suspend)
        self._seen(job, "")
        return now

    def _remember(self, now: Wanted) -> None:
        self._journal.remember(LAST_SEEN, msgspec.json.encode(now).decode())

    async def _wish(self, what: str, **arguments: Any) -> None:
        refused = await ask(self._serving, what, **arguments)
        if refused:
            log.warning("the change of the job is refused: %s", refused)


class PlanWatch:
    """Follows the ScalePlans of the namespace and executes the manual ones of this job, oldest first."""

    def __init__(self, spec: JobSpec, client: AsyncClient, serving: Serving) -> None:
        """Nothing is asked before `run`; see `JobWatch` for the arguments."""
        self._spec = spec
        self._client = client
        self._serving = serving
        self._plans: asyncio.Queue[Manifest] = asyncio.Queue()
        self._met: set[str] = set()

    async def run(self) -> None:
        """Execute plans until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._watch())
            tasks.create_task(self._execute(tasks))

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
        self._take(plans)
        async for change, thing in kube.follow(self._client, kube.PLANS, version):
            if change in ("ADDED", "MODIFIED"):
                self._take([thing])
            elif change == "LISTED":
                self._take(thing["items"])

    def _take(self, plans: list[Manifest]) -> None:
        for plan in sorted(plans, key=lambda one: str(one["metadata"].get("creationTimestamp"))):
            uid = plan["metadata"]["uid"]
            over = (plan.get("status") or {}).get("phase") in (PlanPhase.SUCCEEDED, PlanPhase.FAILED)
            if uid not in self._met and not over and self._ours(plan):
                self._met.add(uid)
                self._plans.put_nowait(plan)

    def _ours(self, plan: Manifest) -> bool:
        labels = plan["metadata"].get("labels") or {}
        names = ((plan.get("spec") or {}).get("ownerJob"), labels.get("elasticjob-name"))
        return self._spec.name in (*names, labels.get("elasticjob.dlrover/name"))

    async def _execute(self, tasks: asyncio.TaskGroup) -> None:
        while True:
            plan = await self._plans.get()
            try:
                read = read_manifest(plan)
            except BadManifest as bad:
                await self._tell(plan, PlanPhase.FAILED, "Invalid", str(bad))
                continue
            if isinstance(read, ScalePlan) and read.job == self._spec.name and read.scale_type is ScaleType.MANUAL:
                replicas = await self._ask(plan, read)
                if replicas is not None:
                    tasks.create_task(self._see_through(plan, replicas))

    async def _ask(self, plan: Manifest, read: ScalePlan) -> dict[str, int] | None:
        """Ask the core for what a plan wants; None if it will not be."""
        later = _not_yet(read)
        if later:
            await self._tell(plan, PlanPhase.FAILED, "NotSupported", later)
            return None
        replicas = {
            role: declared.replicas
            for role, declared in read.spec.replica_resource_specs.items()
            if declared.replicas is not None
        }
        if read.status.phase is not PlanPhase.SCALING:  # else a master before this one has asked the core already
            await self._tell(plan, PlanPhase.PENDING, "Taken", "")
            for role, number in replicas.items():
                refused = await ask(self._serving, "scale", role=role, replicas=number)
                if refused:
                    await self._tell(plan, PlanPhase.FAILED, "Refused", refused)
                    return None
            await self._tell(plan, PlanPhase.SCALING, "Scaling", "")
        return replicas

    async def _see_through(self, plan: Manifest, replicas: dict[str, int]) -> None:
        """Wait for a plan's nodes, as long as nobody wants something else."""
        while True:
            state = self._serving.shell.engine.state
            if any(state.targets.get(role) != number for role, number in replicas.items()):
                await self._tell(plan, PlanPhase.FAILED, "Superseded", "another wish came before it was fulfilled")
                return
            if _fulfilled(state, replicas):
                await self._tell(plan, PlanPhase.SUCCEEDED, "Scaled", "")
                return
            if state.phase.over:
                await self._tell(plan, PlanPhase.FAILED, "JobOver", f"the job is over ({state.phase})")
                return
            await asyncio.sleep(LOOK_SECONDS)

    async def _tell(self, plan: Manifest, phase: PlanPhase, reason: str, message: str) -> None:
        now = stamp(self._serving.shell.now)
        before = plan.get("status") or {}
        status: Manifest = {"phase": phase.value, "reason": reason, "message": message or None}
        status["createTime"] = before.get("createTime") or now
        if phase in (PlanPhase.SUCCEEDED, PlanPhase.FAILED):
            status["finishTime"] = now
        plan["status"] = {**before, **status}
        name = plan["metadata"]["name"]
        log.info("ScalePlan %s: %s%s", name, phase.value, f": {message}" if message else "")
        for attempt in range(1, 8):
            try:
                await self._client.patch(
                    kube.PLANS.Status,
                    name,
                    {"status": status},
                    patch_type=PatchType.MERGE,
                    namespace=self._spec.namespace,
                )
                return
            except kube.CannotReach as error:
                if kube.code_of(error) == kube.NOT_FOUND:
                    return
                log.warning("the status of ScalePlan %s cannot be written: %s", name, kube.sentence(error))
            await asyncio.sleep(kube.pause(attempt))


def _not_yet(plan: ScalePlan) -> str:
    """Why a plan cannot be executed by this version, or nothing."""
    spec = plan.spec
    for field, given in (
        ("migratePods", spec.migrate_pods),
        ("createPods", spec.create_pods),
        ("removePods", spec.remove_pods),
        ("psHosts", spec.ps_hosts),
    ):
        if given:
            return f"spec.{field}: comes in a later version; this one executes replicaResourceSpecs"
    if any(declared.resource for declared in spec.replica_resource_specs.values()):
        return "spec.replicaResourceSpecs: resource comes in a later version; this one executes replicas"
    return ""


def _fulfilled(state: JobState, replicas: dict[str, int]) -> bool:
    """Whether each of these roles has as many running nodes as it should, and no others."""
    for role, number in replicas.items():
        there = [n for n in state.nodes.values() if n.key.role == role and not n.status.ended]
        done = sum(1 for n in state.nodes.values() if n.key.role == role and n.status is NodeStatus.SUCCEEDED)
        if any(n.status is not NodeStatus.RUNNING for n in there) or len(there) + done < number or len(there) > number:
            return False
    return True
