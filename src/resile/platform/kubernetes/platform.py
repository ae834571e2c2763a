"""`KubernetesPlatform`: nodes as pods, which the master makes through the API server.

A launch costs one call, and a bounded number of calls run at once, so that five hundred pods take seconds. One watch
reports all pods; nothing is polled. If the API server refuses a launch for good, the node is observed as `FAILED` with
the reason. If the refusal may pass (a quota, no connection), it is observed as `PENDING`, and the launch is retried.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any

from resile.api.ids import NodeKey, Rank, Seconds
from resile.api.job import JobSpec
from resile.api.kinds import registry
from resile.kube.client import Client
from resile.kube.errors import BAD_REQUEST, CONFLICT, INVALID, Failure, KubeError
from resile.kube.informer import Changed, Listed, Watched, list_and_watch
from resile.kube.intervals import BACKOFF
from resile.kube.kinds import PODS, SERVICES, Object
from resile.kube.owner_references import is_owned_by
from resile.kube.retry import until_answered
from resile.platform.base import Launch, Observation
from resile.platform.kubernetes.observation import gone, observation
from resile.platform.kubernetes.placement import NO_ROOM, held_back, released
from resile.platform.kubernetes.pods import master_address, pod_manifest, service_manifest
from resile.protocol.reports import NodeEnd, NodeStatus

log = logging.getLogger("resile.kubernetes")

CALLS_AT_ONCE = 32
"""How many calls to the API server run at once: enough to keep it busy, few enough not to overload it."""
LAST_REPORT = Seconds(5.0)
"""How long to wait at most, before a lost pod is deleted, for a report that it ended. Ended pods are kept, with their
logs. The kubelet of a busy machine tells of an end up to 3 s after the connection to the agent closed."""


class KubernetesPlatform:
    def __init__(
        self,
        spec: JobSpec,
        client: Client,
        *,
        address: str = "",
        tls: bool = True,
        broke: Callable[[BaseException], None] = lambda error: log.critical("the platform broke", exc_info=error),
    ) -> None:
        """Prepare, without a call to the API server. The caller closes `client`.

        The job's Kubernetes object (its uid is in `spec`) owns every pod and Service. Pods reach the master at
        `address` (`host:port`), by default at the master's Service. `broke` is called with an unexpected error of a
        background task. After such an error, pods may no longer be watched or made.
        """
        self._spec = spec
        self._kind = registry.job_kind(spec.kind)
        self._client = client
        self._address = address or master_address(spec)
        self._tls = tls
        self._early: list[Observation] = []
        """Observations from before `start`, which passes them on."""
        self._observe: Callable[[Observation], None] = self._early.append
        self._pods: dict[NodeKey, Object] = {}
        self._observed: dict[NodeKey, Observation] = {}
        self._ended: dict[NodeKey, asyncio.Event] = {}
        self._launching: dict[NodeKey, asyncio.Task[None]] = {}
        self._held_back: dict[NodeKey, str] = {}
        """The uids of pods that were seen to be held back by the rule of `avoid`; `_release` runs for each."""
        self._released: dict[NodeKey, str] = {}
        """The uids of pods that `_release` replaces. The end of such a pod is not the end of its node."""
        self._services: set[tuple[str, Rank]] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._calls = asyncio.Semaphore(CALLS_AT_ONCE)
        self._broke = broke

    async def start(self, observe: Callable[[Observation], None]) -> None:
        labels = self._kind.job_selector(self._spec.name)
        news = list_and_watch(self._client, Watched(PODS, self._spec.namespace, labels))
        first = await anext(news)
        assert isinstance(first, Listed)
        self._observe = observe
        for early in self._early:
            observe(early)
        self._on_list(first)
        self._spawn(self._follow(news))

    async def adopt(self) -> list[Observation]:
        return [observation(node, pod) for node, pod in self._pods.items()]

    def launch(self, launch: Launch) -> None:
        node = launch.node
        if node in self._launching:
            return
        if node in self._pods:
            self._report(observation(node, self._pods[node]), again=True)
            return
        task = self._spawn(self._create(launch))
        self._launching[node] = task
        task.add_done_callback(lambda _: self._launching.pop(node, None))

    def delete(self, node: NodeKey, grace: Seconds) -> None:
        """Delete the node's pod, by force if `grace` is 0. Keep a pod that has ended, so that its logs can be read."""
        launching = self._launching.pop(node, None)
        if launching is not None:
            launching.cancel()
        self._spawn(self._delete(node, grace))

    def hindrance(self, node: NodeKey) -> str:
        """Why a node that is `PENDING` cannot start; empty if not known, or if the node has another status."""
        pod = self._pods.get(node)
        seen = self._observed.get(node) if pod is None else observation(node, pod)
        return seen.end.message if seen is not None and seen.status is NodeStatus.PENDING else ""

    async def close(self) -> None:
        self._observe = lambda _: None
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # making and deleting pods ---------------------------------------------------------------------------------------

    async def _create(self, launch: Launch) -> None:
        node = launch.node
        if node.role not in self._spec.roles:
            self._report(_failed(node, "NoSuchRole", f"the job has no role {node.role}"))
            return
        if self._kind.is_found_by_address(self._spec, node.role):
            await self._ensure_service(node, launch.rank)
        await self._make(node, pod_manifest(self._spec, launch, self._address, tls=self._tls))

    async def _make(self, node: NodeKey, pod: Object) -> None:
        for pause in BACKOFF.pauses():
            try:
                async with self._calls:
                    made = await self._client.create(PODS, pod)
            except KubeError as error:
                if error.code in (INVALID, BAD_REQUEST):
                    self._report(_failed(node, "Invalid", f"its pod was refused: {error}"))
                    return
                self._on_not_made(node, "pod", error)
            else:
                if made is not None:
                    self._on_answer(node, made)
                    return
                if await self._exists(node):
                    return
                name = pod["metadata"]["name"]
                self._on_not_made(node, "pod", KubeError(f"another pod {name} already exists", code=CONFLICT))
            await asyncio.sleep(pause)

    async def _release(self, node: NodeKey, uid: str) -> None:
        """Wait for the pod with this uid to be scheduled. If it is still held back after a time, replace it.

        The new pod has the same name, but no node affinity made by `avoid`. So it may go to any machine.
        """
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
        except asyncio.CancelledError:  # the node is to be deleted, so the pod's end is the node's
            self._released.pop(node, None)
            raise
        finally:
            self._launching.pop(node, None)

    def _on_not_made(self, node: NodeKey, what: str, error: KubeError) -> None:
        log.warning("the %s of %s cannot be made now: %s", what, node, error)
        pod = self._pods.get(node)
        if pod is not None and not self._is_replaced(node, pod):
            return  # the pod was made, and only the answer is missing
        how = "was refused" if error.failure is Failure.REFUSED else "cannot be made"
        self._report(
            Observation(node=node, status=NodeStatus.PENDING, end=NodeEnd(message=f"its {what} {how}: {error}"))
        )

    async def _exists(self, node: NodeKey) -> bool:
        """True if the node's pod exists and belongs to this job, not to an earlier job of the same name.

        If True, the pod's observation is passed on, even if it has not changed. Returns False also if the API server
        cannot be asked, or if `_release` is replacing the pod.
        """
        try:
            name = self._kind.node_name(self._spec.name, node.role, node.id)
            pod = await self._client.get(PODS, self._spec.namespace, name)
        except KubeError:
            return False
        if pod is None or not is_owned_by(pod, self._spec.uid) or self._is_replaced(node, pod):
            return False
        self._on_answer(node, pod)
        if node in self._pods:
            self._report(observation(node, self._pods[node]), again=True)
        return True

    async def _ensure_service(self, node: NodeKey, rank: Rank) -> None:
        if (node.role, rank) in self._services:
            return
        for pause in BACKOFF.pauses():
            try:
                async with self._calls:
                    await self._client.create(SERVICES, service_manifest(self._spec, node.role, rank))
                break
            except KubeError as error:
                self._on_not_made(node, "Service", error)
            await asyncio.sleep(pause)
        self._services.add((node.role, rank))

    async def _delete(self, node: NodeKey, grace: Seconds) -> None:
        if grace <= self._spec.timeouts.kill_grace and await self._ended_by_itself(node):
            return
        if not await self._remove(node, math.ceil(grace)):
            self._report(gone(node, self._pods.pop(node, None)))

    async def _remove(self, node: NodeKey, grace: int) -> bool:
        name = self._kind.node_name(self._spec.name, node.role, node.id)

        async def delete() -> bool:
            async with self._calls:
                return await self._client.delete(PODS, self._spec.namespace, name, grace)

        return await until_answered(f"the pod of {node} cannot be deleted", delete)

    async def _ended_by_itself(self, node: NodeKey) -> bool:
        if node not in self._pods:
            return False
        try:
            async with asyncio.timeout(min(LAST_REPORT, self._spec.timeouts.recovery_budget / 2)):
                await self._ended.setdefault(node, asyncio.Event()).wait()
        except TimeoutError:
            return False
        return True

    # observing pods -------------------------------------------------------------------------------------------------

    async def _follow(self, news: AsyncGenerator[Listed | Changed, None]) -> None:
        async with contextlib.aclosing(news):
            async for one in news:
                if isinstance(one, Listed):
                    self._on_list(one)
                else:
                    self._on_change(one)

    def _on_change(self, change: Changed) -> None:
        node = self._node_of(change.item)
        if node is None or self._is_replaced(node, change.item):
            return
        if change.deleted:
            self._pods.pop(node, None)
            self._report(gone(node, change.item))
        else:
            self._on_pod(node, change.item)

    def _on_list(self, listed: Listed) -> None:
        """Update the known pods from a list of all pods, and report the changes.

        A known pod that is not in the list counts as gone, unless the pod is newer than the list or its node is being
        launched.
        """
        there = {node: pod for pod in listed.items if (node := self._node_of(pod)) is not None}
        missing = {node: pod for node, pod in self._pods.items() if node not in there and node not in self._launching}
        for node, pod in missing.items():
            if not _is_younger(pod, listed.version):
                self._report(gone(node, self._pods.pop(node)))
        for node, pod in there.items():
            if not self._is_replaced(node, pod):
                self._on_pod(node, pod)

    def _is_replaced(self, node: NodeKey, pod: Object) -> bool:
        """True if `_release` is replacing this pod. Then the end of the pod is not the end of its node."""
        return node in self._released and self._released[node] == pod["metadata"].get("uid")

    def _node_of(self, pod: Object) -> NodeKey | None:
        """The node of a pod; None for the master's pod and for pods of an earlier job with the same name."""
        if not is_owned_by(pod, self._spec.uid):
            return None
        return self._kind.node_of(pod["metadata"]["name"], self._spec.name)

    def _on_answer(self, node: NodeKey, pod: Object) -> None:
        """Handle a pod that the API server returned to a call, unless the watch has already reported the pod."""
        last, known = self._observed.get(node), self._pods.get(node)
        unmade = last is None or last.status is NodeStatus.PENDING  # counts only if there is no pod
        if unmade if known is None else self._is_replaced(node, known):
            self._on_pod(node, pod)

    def _on_pod(self, node: NodeKey, pod: Object) -> None:
        self._pods[node] = pod
        self._report(observation(node, pod))
        uid = pod["metadata"].get("uid", "")
        if held_back(pod) and self._held_back.get(node) != uid:
            self._held_back[node] = uid
            self._spawn(self._release(node, uid))

    def _report(self, seen: Observation, *, again: bool = False) -> None:
        """Pass an observation to the master if the node's status or end has changed, or if `again` is set.

        Other observations are not passed on, because they would only fill the journal.
        """
        last = self._observed.get(seen.node)
        same = last is not None and last.status is seen.status and (not seen.status.ended or last.end == seen.end)
        self._observed[seen.node] = seen
        if same and not again:
            return
        ended = self._ended.setdefault(seen.node, asyncio.Event())
        if seen.status.ended:
            ended.set()
        else:
            ended.clear()  # it is set if the pod was deleted before it existed
        self._observe(seen)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._on_done)
        return task

    def _on_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self._broke(error)


def _is_younger(pod: Object, version: str) -> bool:
    try:
        return int(pod["metadata"]["resourceVersion"]) > int(version)
    except (KeyError, ValueError):
        return False


def _failed(node: NodeKey, reason: str, message: str) -> Observation:
    return Observation(node=node, status=NodeStatus.FAILED, end=NodeEnd(reason=reason, message=message))
