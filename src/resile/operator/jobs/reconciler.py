"""The reconciler of jobs of one kind: gathers what exists, asks `decisions`, and executes their actions in order.

Every action can be repeated. A name that is taken, an object that is gone and a version that is old are no errors: they
lead to another reconciliation.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Iterable

import msgspec

from resile.api.ids import Seconds
from resile.api.job import JobSpec
from resile.api.kinds.base import JobKind
from resile.api.manifests.errors import BadManifest
from resile.kube.client import Client
from resile.kube.errors import BAD_REQUEST, CONFLICT, FORBIDDEN, INVALID, NOT_FOUND, KubeError
from resile.kube.events import emit
from resile.kube.informer import Informer, Key
from resile.kube.kinds import PODS, Object, of
from resile.kube.manifests import read_job
from resile.kube.owner_references import is_owned_by
from resile.operator import intervals
from resile.operator.jobs import decisions as de
from resile.operator.jobs import master_objects
from resile.operator.jobs.master_pod import master_pod
from resile.operator.jobs.master_status import short
from resile.operator.jobs.provision import Provisioned, Secrets, outdated, provision, together
from resile.operator.metrics import Metrics
from resile.operator.workqueue import TryAgain

log = logging.getLogger("resile.operator")

REFUSED = (BAD_REQUEST, FORBIDDEN, INVALID)
"""HTTP codes of refusals that stay the same until the job's manifest, a quota or a policy is changed."""


class _Memory(msgspec.Struct):
    """What the reconciler remembers of one job. It is lost when the operator process ends."""

    uid: str
    restarts: de.Restarts = de.Restarts()
    provisioned: float = -math.inf
    """When the objects that a master needs were last made or found."""
    secrets: Secrets = {}
    pods_removed: bool = False
    read_from: object = None
    """Generation, annotations and labels that `spec` was read from. While they stay the same, it is not read again."""
    spec: JobSpec | BadManifest | None = None
    usable: JobSpec | None = None
    """The newest `spec` without an error."""


class JobReconciler:
    def __init__(
        self,
        kind: JobKind,
        client: Client,
        jobs: Informer,
        pods: Informer,
        services: Informer,
        image: str,
        metrics: Metrics,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._kind = kind
        self._client = client
        self._jobs = jobs
        self._pods = pods
        self._services = services
        self._image = image
        self._metrics = metrics
        self._clock = clock
        self._memories: dict[Key, _Memory] = {}
        self._deletions = asyncio.Semaphore(intervals.DELETIONS)

    async def reconcile(self, key: Key) -> Seconds | None:
        """Execute the decisions about a job. Returns the seconds until the next call, or None to wait for a change."""
        job = self._jobs.get(key)
        if job is None:
            self._memories.pop(key, None)
            return None
        memory = self._memory(key, job)
        spec = self._spec(memory, job)
        name, now = Key(key.namespace, self._kind.master_name(key.name)), self._clock()
        seen = de.ObservedJob(
            kind=self._kind,
            job=job,
            pod=self._pods.get(name),
            provisioned=now - memory.provisioned < intervals.RECHECK and self._services.get(name) is not None,
            restarts=memory.restarts,
            pods_removed=memory.pods_removed,
        )
        decision = de.decide(seen, spec, now)
        usable = memory.usable or self._kind.masters_part(job)
        for action in decision.actions:
            job = await self._act(action, job, usable, memory)
        return decision.again

    def _memory(self, key: Key, job: Object) -> _Memory:
        memory = self._memories.get(key)
        if memory is None or memory.uid != job["metadata"]["uid"]:
            memory = self._memories[key] = _Memory(job["metadata"]["uid"])
        return memory

    def _spec(self, memory: _Memory, job: Object) -> JobSpec | BadManifest:
        metadata = job["metadata"]
        source = (metadata.get("generation"), metadata.get("annotations"), metadata.get("labels"))
        if memory.spec is None or memory.read_from != source:
            memory.read_from, memory.spec = source, read_job(self._kind, job)
            if isinstance(memory.spec, JobSpec):
                memory.usable = memory.spec
        return memory.spec

    async def _act(self, action: de.Action, job: Object, spec: JobSpec, memory: _Memory) -> Object:
        match action:
            case de.SetStatus():
                return await self._set_status(job, action)
            case de.EmitEvent(reason=reason, message=message, warning=warning):
                await self._emit(job, reason, message, warning=warning)
            case de.Provision():
                provisioned = await provision(self._client, spec, memory.secrets)
                memory.secrets = provisioned.secrets
                await self._compare_secrets(job, provisioned)
                memory.provisioned = self._clock()
            case de.StartMaster():
                await self._start(action, job, spec, memory)
            case de.RemoveMaster(uid=uid):
                await self._remove_master(job, uid)
            case de.RemovePods():
                await self._remove_pods(job)
                memory.pods_removed = True
            case de.StopNodes():
                await self._stop_nodes(job)
        return job

    async def _emit(self, job: Object, reason: de.Reason, message: str, *, warning: bool) -> None:
        kind, now = of(self._kind), self._clock()
        await emit(self._client, kind, job["metadata"], reason, message, warning=warning, now=now)

    async def _set_status(self, job: Object, action: de.SetStatus) -> Object:
        metadata = job["metadata"]
        patch = self._kind.phase_patch(job, action.phase, action.reason, action.message, self._clock())
        try:
            return await self._client.patch_status(
                of(self._kind), metadata["namespace"], metadata["name"], metadata["resourceVersion"], patch
            )
        except KubeError as error:
            if error.code == CONFLICT:
                raise TryAgain("its status has changed in the meantime") from error
            if error.code == NOT_FOUND:
                raise TryAgain("it is gone") from error
            raise

    async def _compare_secrets(self, job: Object, provisioned: Provisioned) -> None:
        """Write Events about Secrets that were deleted and made again. Remove the master if it has outdated content.

        If a Secret was made again with the same content, the master stays. Otherwise the master's pod is removed, so
        that the next master uses the new content.
        """
        for name in provisioned.restored:
            sentence = f"the Secret {name} was gone; it was made again as it was"
            await self._emit(job, de.Reason.SECRET_RESTORED, sentence, warning=True)
        metadata = job["metadata"]
        pod = self._pods.get(Key(metadata["namespace"], self._kind.master_name(metadata["name"])))
        if pod is None or not is_owned_by(pod, metadata["uid"]) or pod["metadata"].get("deletionTimestamp"):
            return
        names = " and ".join(outdated(pod, provisioned))
        if not names:
            return
        sentence = f"the Secret {names} was gone; it was made anew, and the master is started again with it"
        await self._emit(job, de.Reason.SECRET_REPLACED, sentence, warning=True)
        await self._remove_master(job, pod["metadata"]["uid"])

    async def _start(self, action: de.StartMaster, job: Object, spec: JobSpec, memory: _Memory) -> None:
        mounted = [master_objects.identity(secret) for secret in memory.secrets.values()]
        pod = master_pod(spec, self._image, action.index, mounted)
        try:
            made = await self._client.create(PODS, pod)
        except KubeError as error:
            if error.code in REFUSED:
                await self._refused(job, error)
            raise
        if made is None:
            return  # it is there; the informer will show it
        memory.restarts = memory.restarts.after(self._clock()).started(self._clock(), action.index)
        reason = de.Reason.MASTER_RESTARTED if action.lost else de.Reason.MASTER_CREATED
        self._metrics.masters.labels("again" if action.lost else "first").inc()
        sentence = f"started the master {pod['metadata']['name']}"
        if action.lost:
            sentence = f"{sentence} again; how the one before ended: {action.lost}"
        log.info("%s/%s: %s", spec.namespace, spec.name, sentence)
        await self._emit(job, reason, short(sentence), warning=bool(action.lost))

    async def _refused(self, job: Object, error: KubeError) -> None:
        message = short(f"the master's pod cannot be created: {error}")
        if self._kind.report_of(job).message != message:
            phase = de.phase_without_master(self._kind.phase_of(job))
            job = await self._set_status(job, de.SetStatus(phase, de.Reason.MASTER_CANNOT_START, message))
            await self._emit(job, de.Reason.MASTER_CANNOT_START, message, warning=True)

    async def _remove_master(self, job: Object, uid: str) -> None:
        namespace, name = job["metadata"]["namespace"], self._kind.master_name(job["metadata"]["name"])
        # The informer may be behind, and the name is used again.
        if await self._client.get_same(PODS, namespace, name, uid) is not None:
            await self._client.delete(PODS, namespace, name, grace=0)

    async def _pods_of(self, job: Object) -> list[Object]:
        selector = self._kind.job_selector(job["metadata"]["name"])
        pods, _ = await self._client.list(PODS, job["metadata"]["namespace"], labels=selector)
        return [pod for pod in pods if is_owned_by(pod, job["metadata"]["uid"])]

    async def _stop_nodes(self, job: Object) -> None:
        master = self._kind.master_name(job["metadata"]["name"])
        nodes = [pod for pod in await self._pods_of(job) if pod["metadata"]["name"] != master]
        ended = ("Succeeded", "Failed")
        await self._delete(pod for pod in nodes if (pod.get("status") or {}).get("phase") not in ended)

    async def _remove_pods(self, job: Object) -> None:
        own = await self._pods_of(job)
        await self._delete(own)
        if own:
            sentence = f"removed {len(own)} pods: the job ended longer ago than its time to live"
            await self._emit(job, de.Reason.PODS_REMOVED, sentence, warning=False)

    async def _delete(self, pods: Iterable[Object]) -> None:
        async def delete(metadata: Object) -> None:
            async with self._deletions:
                await self._client.delete(PODS, metadata["namespace"], metadata["name"])

        await together(*(delete(pod["metadata"]) for pod in pods))
