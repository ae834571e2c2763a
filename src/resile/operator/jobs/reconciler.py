"""The reconciler of ElasticJobs: gathers what exists, asks `decisions`, and does what they say, in order.

Every act can be repeated: a name that is taken, an object that is gone and a version that is old are no errors but
news, and lead to another look.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable

import msgspec

from resile.api.ids import Seconds
from resile.api.kinds.elasticjob import ElasticJob, Phase
from resile.api.kinds.labels import job_selector
from resile.api.manifests.errors import BadManifest
from resile.api.manifests.names import master_name
from resile.operator import settings
from resile.operator.cluster import (
    CONFLICT,
    ELASTIC_JOB,
    NOT_FOUND,
    POD,
    REFUSED,
    Cluster,
    ClusterError,
    Object,
)
from resile.operator.events import tell
from resile.operator.informer import Informer
from resile.operator.jobs import master_objects
from resile.operator.jobs.decisions import (
    Action,
    EmitEvent,
    ObservedJob,
    Provision,
    Reason,
    RemoveMaster,
    RemovePods,
    Row,
    SetStatus,
    StartMaster,
    StopNodes,
    decide,
    phase_of,
)
from resile.operator.jobs.master_pod import master_pod
from resile.operator.jobs.provision import Provisioned, Secrets, outdated, prepare, together
from resile.operator.metrics import Metrics
from resile.operator.pod_status import short
from resile.operator.status import job_patch
from resile.operator.trim import read_job, read_masters_part
from resile.operator.workqueue import Key, TryAgain

log = logging.getLogger("resile.operator")


class _Memory(msgspec.Struct):
    """What is known of one job beyond what the cluster shows; nothing that could not be lost."""

    uid: str
    row: Row = Row()
    prepared: float | None = None
    """When what a master needs was last made or seen to be there."""
    secrets: Secrets = {}
    """As they were then."""
    swept: bool = False
    read_from: object = None
    """What `spec` was read from: reading costs a millisecond, and a job's status changes all the time."""
    spec: ElasticJob | BadManifest | None = None
    usable: ElasticJob | None = None
    """The newest `spec` without a mistake."""


class JobReconciler:
    """Looks at ElasticJobs."""

    def __init__(
        self,
        cluster: Cluster,
        jobs: Informer,
        pods: Informer,
        services: Informer,
        image: str,
        metrics: Metrics,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._cluster = cluster
        self._jobs = jobs
        self._pods = pods
        self._services = services
        self._image = image
        self._metrics = metrics
        self._clock = clock
        self._memories: dict[Key, _Memory] = {}
        self._deletions = asyncio.Semaphore(settings.DELETIONS)

    async def look(self, key: Key) -> Seconds | None:
        """Do what a job needs; tells when to look again."""
        job = self._jobs.get(key)
        if job is None:
            self._memories.pop(key, None)
            return None
        memory = self._memory(key, job)
        spec = self._spec(memory, job)
        name = Key(key.namespace, master_name(key.name))
        seen = ObservedJob(
            job=job,
            pod=self._pods.get(name),
            prepared=self._prepared(memory) and self._services.get(name) is not None,
            row=memory.row,
            swept=memory.swept,
        )
        decision = decide(seen, spec, self._clock())
        usable = memory.usable or read_masters_part(job)
        for action in decision.actions:
            job = await self._act(action, job, usable, memory)
        return decision.again

    def _prepared(self, memory: _Memory) -> bool:
        return memory.prepared is not None and self._clock() - memory.prepared < settings.LOOK_AFTER

    def _memory(self, key: Key, job: Object) -> _Memory:
        memory = self._memories.get(key)
        if memory is None or memory.uid != job["metadata"]["uid"]:
            memory = self._memories[key] = _Memory(job["metadata"]["uid"])
        return memory

    def _spec(self, memory: _Memory, job: Object) -> ElasticJob | BadManifest:
        metadata = job["metadata"]
        source = (metadata.get("generation"), metadata.get("annotations"), metadata.get("labels"))
        if memory.spec is None or memory.read_from != source:
            memory.read_from, memory.spec = source, read_job(job)
            if isinstance(memory.spec, ElasticJob):
                memory.usable = memory.spec
        return memory.spec

    async def _act(self, action: Action, job: Object, spec: ElasticJob, memory: _Memory) -> Object:
        """Do one thing; the job as it is then."""
        match action:
            case SetStatus():
                return await self._set_status(job, action)
            case EmitEvent(reason=reason, message=message, warning=warning):
                await tell(self._cluster, job, reason, message, warning=warning, now=self._clock())
            case Provision():
                prepared = await prepare(self._cluster, spec, memory.secrets)
                memory.secrets = prepared.secrets
                await self._compare_secrets(job, prepared)
                memory.prepared = self._clock()
            case StartMaster():
                await self._start(action, job, spec, memory)
            case RemoveMaster(uid=uid):
                await self._remove_master(job, uid)
            case RemovePods():
                await self._remove_pods(job)
                memory.swept = True
            case StopNodes():
                await self._stop_nodes(job)
        return job

    async def _set_status(self, job: Object, action: SetStatus) -> Object:
        metadata = job["metadata"]
        patch = job_patch(job, action.phase, action.reason, action.message, self._clock())
        try:
            return await self._cluster.patch_status(
                ELASTIC_JOB, metadata["namespace"], metadata["name"], metadata["resourceVersion"], patch
            )
        except ClusterError as error:
            if error.code == CONFLICT:
                raise TryAgain("its status has changed in the meantime") from error
            if error.code == NOT_FOUND:
                raise TryAgain("it is gone") from error
            raise

    async def _compare_secrets(self, job: Object, prepared: Provisioned) -> None:
        """Say which Secrets were gone. One with new content is of no use to a master that holds the old one."""
        for name in prepared.restored:
            sentence = f"the Secret {name} was gone; it was made again as it was"
            await tell(self._cluster, job, Reason.SECRET_RESTORED, sentence, warning=True, now=self._clock())
        metadata = job["metadata"]
        pod = self._pods.get(Key(metadata["namespace"], master_name(metadata["name"])))
        if pod is None or not master_objects.owned_by(pod, metadata["uid"]) or pod["metadata"].get("deletionTimestamp"):
            return
        names = " and ".join(outdated(pod, prepared))
        if not names:
            return
        sentence = f"the Secret {names} was gone; it was made anew, and the master is started again with it"
        await tell(self._cluster, job, Reason.SECRET_REPLACED, sentence, warning=True, now=self._clock())
        await self._remove_master(job, pod["metadata"]["uid"])

    async def _start(self, action: StartMaster, job: Object, spec: ElasticJob, memory: _Memory) -> None:
        namespace = spec.metadata.namespace
        mounted = [master_objects.identity(secret) for secret in memory.secrets.values()]
        pod = master_pod(spec, self._image, action.index, master_objects.owner(spec), mounted)
        try:
            made = await self._cluster.create(POD, pod)
        except ClusterError as error:
            if error.code in REFUSED:
                await self._refused(job, error)
            raise
        if made is None:
            return  # it is there; the mirror will show it
        memory.row = memory.row.after(self._clock()).started(self._clock(), action.index)
        reason = Reason.MASTER_RESTARTED if action.lost else Reason.MASTER_CREATED
        self._metrics.masters.labels("again" if action.lost else "first").inc()
        sentence = f"started the master {pod['metadata']['name']}"
        if action.lost:
            sentence = f"{sentence} again; what became of the one before: {action.lost}"
        log.info("%s/%s: %s", namespace, spec.metadata.name, sentence)
        await tell(self._cluster, job, reason, short(sentence), warning=bool(action.lost), now=self._clock())

    async def _refused(self, job: Object, error: ClusterError) -> None:
        """Say why the API server takes no master's pod: a quota, a policy, a template that makes no sense."""
        message = short(f"the master's pod cannot be created: {error}")
        said = (job.get("status") or {}).get("message")
        if said != message:
            job = await self._set_status(job, SetStatus(_waiting(job), Reason.MASTER_CANNOT_START, message))
            await tell(self._cluster, job, Reason.MASTER_CANNOT_START, message, warning=True, now=self._clock())

    async def _remove_master(self, job: Object, uid: str) -> None:
        namespace, name = job["metadata"]["namespace"], master_name(job["metadata"]["name"])
        there = await self._cluster.get(POD, namespace, name)  # the mirror may be behind, and the name is used again
        if there is not None and there["metadata"]["uid"] == uid:
            await self._cluster.delete(POD, namespace, name, grace=0)

    async def _pods_of(self, job: Object) -> list[Object]:
        label, _, value = job_selector(job["metadata"]["name"]).partition("=")
        pods, _ = await self._cluster.list(POD, job["metadata"]["namespace"], {label: value})
        return [pod for pod in pods if master_objects.owned_by(pod, job["metadata"]["uid"])]

    async def _stop_nodes(self, job: Object) -> None:
        namespace, master = job["metadata"]["namespace"], master_name(job["metadata"]["name"])
        running = [
            pod["metadata"]["name"]
            for pod in await self._pods_of(job)
            if (pod.get("status") or {}).get("phase") not in ("Succeeded", "Failed")
        ]
        await self._delete_pods(namespace, (name for name in running if name != master))

    async def _remove_pods(self, job: Object) -> None:
        namespace = job["metadata"]["namespace"]
        own = await self._pods_of(job)
        await self._delete_pods(namespace, (pod["metadata"]["name"] for pod in own))
        if own:
            sentence = f"removed {len(own)} pods: the job ended longer ago than its time to live"
            await tell(self._cluster, job, Reason.PODS_REMOVED, sentence, warning=False, now=self._clock())

    async def _delete_pods(self, namespace: str, names: Iterable[str]) -> None:
        async def delete(name: str) -> None:
            async with self._deletions:
                await self._cluster.delete(POD, namespace, name)

        await together(*map(delete, names))


def _waiting(job: Object) -> Phase | None:
    """The phase of a job whose master cannot start: pending, unless it was further already."""
    phase = phase_of(job)
    return Phase.PENDING if phase in (None, Phase.CREATED, Phase.PENDING) else None
