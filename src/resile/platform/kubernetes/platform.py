"""`KubernetesPlatform`: nodes as pods, made by the master itself through the API.

A launch costs one call; many are under way at once, within a bound, so that five hundred pods take seconds. What the
pods do is learnt from one watch; nothing is ever polled. A launch that the API server refuses for good is observed as
`FAILED` with its sentence, one that may pass (a quota, no contact) as `PENDING`, and is tried again.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Coroutine
from typing import Any

from lightkube import AsyncClient

from resile.api.ids import NodeKey, Rank, Seconds
from resile.api.job import JobSpec, node_name
from resile.api.kinds.labels import PREFIXED_JOB_NAME
from resile.api.manifests.names import node_of_pod
from resile.platform.base import Launch, Observation
from resile.platform.kubernetes import client as kube
from resile.platform.kubernetes.placement import NO_ROOM, held_back, released
from resile.platform.kubernetes.pod_status import gone, observation
from resile.platform.kubernetes.pods import (
    Manifest,
    master_address,
    needs_services,
    owned,
    pod_manifest,
    service_manifest,
)
from resile.protocol.reports import NodeEnd, NodeStatus

log = logging.getLogger("resile.kubernetes")

AT_ONCE = 32
"""Calls under way at a time: enough to keep an API server busy, few enough not to drown it."""
LAST_WORDS = Seconds(2.0)
"""How long a lost pod is left for its kubelet to say how it ended; a pod that has ended is kept, logs and all."""


class KubernetesPlatform:
    """The pods of one job. See `port.Platform` for what each method promises."""

    def __init__(self, spec: JobSpec, client: AsyncClient, *, address: str = "", tls: bool = True) -> None:
        """Prepare; nothing is read or made before `start` or `launch`.

        Args:
            spec: the job; its uid must be that of the ElasticJob, which owns all that is made here.
            client: speaks to the API server in the job's namespace; closed by whoever made it.
            address: `host:port` where pods reach the master, if it is not the master's Service.
            tls: whether the master speaks TLS.
        """
        self._spec = spec
        self._client = client
        self._address = address or master_address(spec)
        self._tls = tls
        self._early: list[Observation] = []
        """What was to be told before anybody listened."""
        self._observe: Callable[[Observation], None] = self._early.append
        self._pods: dict[NodeKey, Manifest] = {}
        self._told: dict[NodeKey, Observation] = {}
        self._ended: dict[NodeKey, asyncio.Event] = {}
        self._launching: dict[NodeKey, asyncio.Task[None]] = {}
        self._held_back: dict[NodeKey, str] = {}
        """The pods that avoid machines and have none yet, by uid."""
        self._released: dict[NodeKey, str] = {}
        """Pods, by uid, whose end is not that of their node."""
        self._services: set[tuple[str, Rank]] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._turns = asyncio.Semaphore(AT_ONCE)
        self.broke: Callable[[BaseException], None] = lambda error: log.critical("the platform broke", exc_info=error)
        """Told of an error that nobody foresaw: from then on something may not be seen or done any more."""

    async def start(self, observe: Callable[[Observation], None]) -> None:
        """Read every pod of the job, then watch. Waits until the API server answers."""
        attempt = 0
        while True:
            try:
                pods, version = await kube.list_all(self._client, kube.PODS, labels=self._labels)
                break
            except kube.CannotReach as error:
                attempt += 1
                log.warning("the job's pods cannot be listed: %s", kube.sentence(error))
                await asyncio.sleep(kube.pause(attempt))
        self._observe = observe
        for seen in self._early:
            observe(seen)
        self._listed(pods, version)
        self._spawn(self._watch(version))

    async def adopt(self) -> list[Observation]:
        """Every pod of the job as it is now, those that ended included. Call it after `start`."""
        return [observation(node, pod) for node, pod in self._pods.items()]

    def launch(self, launch: Launch) -> None:
        """Make the node's pod; one that is there already is left alone."""
        node = launch.node
        if node in self._launching:
            return
        if node in self._pods:
            self._tell(observation(node, self._pods[node]), again=True)
            return
        task = self._spawn(self._create(launch))
        self._launching[node] = task
        task.add_done_callback(lambda _: self._launching.pop(node, None))

    def delete(self, node: NodeKey, grace: Seconds) -> None:
        """Delete the node's pod; 0 forces it. A pod that has ended is kept, so that its logs can be read."""
        launching = self._launching.pop(node, None)
        if launching is not None:
            launching.cancel()
        self._spawn(self._delete(node, grace))

    def hindrance(self, node: NodeKey) -> str:
        """What keeps a pending node from starting, in the newest words; empty if nothing is known."""
        pod = self._pods.get(node)
        seen = self._told.get(node) if pod is None else observation(node, pod)
        return seen.end.message if seen is not None and seen.status is NodeStatus.PENDING else ""

    async def close(self) -> None:
        """Stop watching. Pods keep running; what was being sent is not waited for."""
        self._observe = lambda _: None
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # what is done ---------------------------------------------------------------------------------------------------

    async def _create(self, launch: Launch) -> None:
        node = launch.node
        if node.role not in self._spec.roles:
            self._tell(_failed(node, "NoSuchRole", f"the job has no role {node.role}"))
            return
        if needs_services(self._spec):
            await self._ensure_service(node, launch.rank)
        await self._make(node, pod_manifest(self._spec, launch, self._address, tls=self._tls))

    async def _make(self, node: NodeKey, pod: Manifest) -> None:
        attempt = 0
        while True:
            attempt += 1
            try:
                async with self._turns:
                    made = await self._client.create(kube.PODS.from_dict(pod))
            except kube.CannotReach as error:
                code = kube.code_of(error)
                if code == kube.CONFLICT and await self._exists(node):
                    return
                if code == kube.INVALID or code == 400:
                    self._tell(_failed(node, "Invalid", f"its pod was refused: {kube.sentence(error)}"))
                    return
                self._cannot(node, "pod", error)
            else:
                self._answered(node, made)
                return
            await asyncio.sleep(kube.pause(attempt))

    async def _release(self, node: NodeKey, uid: str) -> None:
        """Let a pod that finds no room elsewhere have the machines that it avoids: it is made again under its name."""
        await asyncio.sleep(min(NO_ROOM, self._spec.timeouts.pend / 2))  # it must have the time to start then
        pod = self._pods.get(node)
        if pod is None or pod["metadata"]["uid"] != uid or not held_back(pod) or node in self._launching:
            return
        log.info("there is no room for %s elsewhere: it may go to any machine now", node)
        task = asyncio.current_task()
        assert task is not None
        self._launching[node] = task
        self._released[node] = uid
        try:
            await self._remove(node, 0)
            await self._make(node, released(pod))
        except asyncio.CancelledError:  # the node is to go, and what is seen of it is its end
            self._released.pop(node, None)
            raise
        finally:
            self._launching.pop(node, None)

    def _cannot(self, node: NodeKey, what: str, error: BaseException) -> None:
        """Something that a node needs is not made now; it is tried again, but not for ever: the job's time runs."""
        log.warning("the %s of %s cannot be made now: %s", what, node, kube.sentence(error))
        pod = self._pods.get(node)
        if pod is not None and not self._replaced(node, pod):
            return  # it was made: only the answer is missing
        why = f"its {what} {'was refused' if kube.code_of(error) else 'cannot be made'}: {kube.sentence(error)}"
        self._tell(Observation(node=node, status=NodeStatus.PENDING, end=NodeEnd(message=why)))

    async def _exists(self, node: NodeKey) -> bool:
        """Whether the pod is there and this job's; one that an earlier job of this name left behind is on its way."""
        try:
            pod = await self._client.get(kube.PODS, node_name(self._spec, node.role, node.id))
        except kube.CannotReach:
            return False
        if not owned(self._spec, pod) or self._replaced(node, pod):
            return False
        self._answered(node, pod)
        if node in self._pods:
            self._tell(observation(node, self._pods[node]), again=True)
        return True

    async def _ensure_service(self, node: NodeKey, rank: Rank) -> None:
        role = node.role
        if (role, rank) in self._services:
            return
        service = service_manifest(self._spec, role, rank)
        attempt = 0
        while True:
            attempt += 1
            try:
                async with self._turns:
                    await self._client.create(kube.SERVICES.from_dict(service))
                break
            except kube.CannotReach as error:
                if kube.code_of(error) == kube.CONFLICT:
                    break
                self._cannot(node, "Service", error)
            await asyncio.sleep(kube.pause(attempt))
        self._services.add((role, rank))

    async def _delete(self, node: NodeKey, grace: Seconds) -> None:
        if grace <= self._spec.timeouts.regroup_grace and await self._last_words(node):
            return
        if not await self._remove(node, math.ceil(grace)):
            self._tell(gone(node, self._pods.pop(node, None)))

    async def _remove(self, node: NodeKey, grace: int) -> bool:
        """Delete a node's pod; False if there is none."""
        name = node_name(self._spec, node.role, node.id)
        attempt = 0
        while True:
            attempt += 1
            try:
                async with self._turns:
                    await self._client.delete(kube.PODS, name, grace_period=grace)
                return True
            except kube.CannotReach as error:
                if kube.absent(error):
                    return False
                log.warning("the pod of %s cannot be deleted now: %s", node, kube.sentence(error))
            await asyncio.sleep(kube.pause(attempt))

    async def _last_words(self, node: NodeKey) -> bool:
        """Whether the pod of a lost node turns out to have ended by itself."""
        if node not in self._pods:
            return False
        try:
            async with asyncio.timeout(LAST_WORDS):
                await self._ended.setdefault(node, asyncio.Event()).wait()
        except TimeoutError:
            return False
        return True

    # what is seen ---------------------------------------------------------------------------------------------------

    @property
    def _labels(self) -> dict[str, str]:
        return {PREFIXED_JOB_NAME: self._spec.name}

    async def _watch(self, version: str) -> None:
        async for change, thing in kube.follow(self._client, kube.PODS, version, labels=self._labels):
            if change == "LISTED":
                self._listed(thing["items"], thing["version"])
                continue
            node = self._node_of(thing)
            if node is None:
                continue
            if self._replaced(node, thing):
                continue
            if change == "DELETED":
                self._pods.pop(node, None)
                self._tell(gone(node, thing))
            else:
                self._see(node, thing)

    def _listed(self, pods: list[Manifest], version: str) -> None:
        """Everything there was at a version; of a pod that is younger than that, the list says nothing."""
        there = {node: pod for pod in pods if (node := self._node_of(pod)) is not None}
        missing = {node: pod for node, pod in self._pods.items() if node not in there and node not in self._launching}
        for node, pod in missing.items():
            if not _younger(pod, version):
                self._tell(gone(node, self._pods.pop(node)))
        for node, pod in there.items():
            if not self._replaced(node, pod):
                self._see(node, pod)

    def _replaced(self, node: NodeKey, pod: Manifest) -> bool:
        """Whether a pod is let go of and the next of its name is on its way: what becomes of it says nothing."""
        return node in self._released and self._released[node] == pod["metadata"].get("uid")

    def _node_of(self, pod: Manifest) -> NodeKey | None:
        """Which node a pod is; None for the master's own and for those of an earlier job of this name."""
        return node_of_pod(pod["metadata"]["name"], self._spec.name) if owned(self._spec, pod) else None

    def _answered(self, node: NodeKey, pod: Manifest) -> None:
        """A pod as the answer to a call shows it: older than what the watch has shown in the meantime, if anything."""
        last, known = self._told.get(node), self._pods.get(node)
        unmade = last is None or last.status is NodeStatus.PENDING  # if there is no pod: not made so far
        if unmade if known is None else self._replaced(node, known):
            self._see(node, pod)

    def _see(self, node: NodeKey, pod: Manifest) -> None:
        self._pods[node] = pod
        self._tell(observation(node, pod))
        uid = pod["metadata"].get("uid", "")
        if held_back(pod) and self._held_back.get(node) != uid:
            self._held_back[node] = uid
            self._spawn(self._release(node, uid))

    def _tell(self, seen: Observation, *, again: bool = False) -> None:
        """Pass on what is new: each word ends in the journal, and a status that only changes its wording is not."""
        last = self._told.get(seen.node)
        same = last is not None and last.status is seen.status and (not seen.status.ended or last.end == seen.end)
        self._told[seen.node] = seen
        if same and not again:
            return
        ended = self._ended.setdefault(seen.node, asyncio.Event())
        if seen.status.ended:
            ended.set()
        else:
            ended.clear()  # if it was set: the pod was deleted before it was there
        self._observe(seen)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._finished)
        return task

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self.broke(error)


def _younger(pod: Manifest, version: str) -> bool:
    """Whether a pod was seen in a state that came after a version."""
    try:
        return int(pod["metadata"]["resourceVersion"]) > int(version)
    except (KeyError, ValueError):
        return False


def _failed(node: NodeKey, reason: str, message: str) -> Observation:
    return Observation(node=node, status=NodeStatus.FAILED, end=NodeEnd(reason=reason, message=message))
