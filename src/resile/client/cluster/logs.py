"""Reading the logs of jobs of a cluster: of one pod or of all nodes, pods that appear later included."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable

from resile.api.kinds.registry import job_kind_of
from resile.api.manifests.pod_template import MAIN
from resile.client.base import LogLine
from resile.client.cluster import job_view
from resile.client.cluster.connection import PATIENCE, Cluster, Watch
from resile.client.cluster.streams import take
from resile.client.errors import CommandError
from resile.kube import kinds as kube
from resile.kube.informer import Watched
from resile.kube.kinds import Object
from resile.operator.jobs.master_pod import MAIN_ANNOTATION

REST_SECONDS = 5.0
"""After which it is checked that every log is still read, although nothing changed."""
LAST_SECONDS = 60.0
"""For the last lines of pods that are ending."""
MARGIN_SECONDS = 5
"""By which the clocks of the machines may differ where a log is read on."""
AGAIN_SECONDS = 0.5
AT_ONCE = 20
"""Pods whose logs are asked for at the same time."""
WAITING_LINES = 1000
"""Lines that wait for the caller while pods write faster; then the pods' logs are read more slowly."""


Lines = asyncio.Queue[LogLine]
"""Where the readers of several pods put what they read."""


async def read(cluster: Cluster, job: Object, pod: str, tail: int | None) -> AsyncGenerator[list[LogLine], None]:
    """What a pod, or every node of a job if `pod` is empty, has written so far.

    Raises:
        CommandError: the pod is gone, or the cluster refuses.
    """
    pods = _chosen(job, await cluster.all(Watched(kube.PODS, cluster.namespace, labels=_labels(job))), pod)
    if pod and not pods:
        raise _gone(job, pod)

    async def fetch(one: Object) -> list[LogLine]:
        if not _begun(one):
            return []
        name = one["metadata"]["name"]
        lines = cluster.log(name, container=main_container(one), tail=tail)
        return [LogLine(name, line.encode(), len(pods) == 1) async for line in lines]

    for start in range(0, len(pods), AT_ONCE):
        for batch in await asyncio.gather(*map(fetch, pods[start : start + AT_ONCE])):
            yield batch


async def follow(cluster: Cluster, job: Object, pod: str, tail: int | None) -> AsyncGenerator[list[LogLine], None]:
    """What a pod, or every node of a job, writes until it has ended; pods that come later are read from their start.

    Raises:
        CommandError: the pod is gone, or a log could not be read for too long.
    """
    lines = Lines(WAITING_LINES)
    reading = asyncio.create_task(_follow(cluster, job, pod, tail, lines))
    try:
        while batch := await take(lines, reading):
            yield batch
    finally:
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)


async def follow_pod(
    cluster: Cluster, pod: Object, watching: Watch, tail: int | None, show: Callable[[str], Awaitable[None]]
) -> None:
    """Show what a pod writes until it ends. Where the connection breaks, go on behind the last line that was shown.

    Raises:
        CommandError: the log of a pod that still runs could not be read for `PATIENCE`.
    """
    name = pod["metadata"]["name"]
    read, heard = Bookmark(), time.monotonic()
    while True:
        again = read.reopen()
        lines = cluster.log(
            name,
            container=main_container(pod),
            tail=None if again else tail,
            since=int(time.monotonic() - heard) + MARGIN_SECONDS if again else None,
            follow=True,
            stamps=True,
        )
        problem: CommandError | None = None
        try:
            async for line in lines:
                heard = time.monotonic()
                if read.passes(line):
                    await show(line.partition(" ")[2])
        except CommandError as error:
            problem = error
        now = [one for one in watching.all(kube.PODS) if one["metadata"]["uid"] == pod["metadata"]["uid"]]
        if all(map(job_view.pod_over, now)) or (problem is None and not all(map(_runs, now))):
            return
        if problem is not None and time.monotonic() - heard > PATIENCE:
            raise problem
        await asyncio.sleep(AGAIN_SECONDS)


class Bookmark:
    """How far a log with time stamps was read, so that reading on from a little before it repeats nothing.

    Stamps alone do not say it: a container's stdout and stderr are stamped independently of each other, so that equal
    and slightly older stamps come later. They only count after `reopen`.
    """

    def __init__(self) -> None:
        self._last = ""
        self._latest = ""
        self._repeating = False

    def reopen(self) -> bool:
        """The log is read again from somewhere before the mark, which is the answer: whether there is one."""
        self._repeating = bool(self._last)
        return self._repeating

    def passes(self, line: str) -> bool:
        """Whether a line lies behind the mark; it is the mark from then on."""
        stamp = sortable(line.partition(" ")[0])
        if self._repeating and stamp <= self._latest:
            self._repeating = line != self._last
            return False
        self._repeating = False
        self._last, self._latest = line, max(self._latest, stamp)
        return True


async def _follow(cluster: Cluster, job: Object, only: str, tail: int | None, lines: Lines) -> None:
    name = job["metadata"]["name"]
    wanted = (
        Watched(kube.of(job_kind_of(job)), cluster.namespace, fields={"metadata.name": name}),
        Watched(kube.PODS, cluster.namespace, labels=_labels(job)),
    )
    reading: dict[str, asyncio.Task[None]] = {}
    alone = True

    def start(pod: Object, tail: int | None) -> asyncio.Task[None]:
        async def show(line: str) -> None:
            await lines.put(LogLine(pod["metadata"]["name"], line.encode(), alone))

        return asyncio.create_task(follow_pod(cluster, pod, watching, tail, show))

    async with cluster.watch(*wanted) as watching:
        is_first = True
        try:
            while True:
                pods = _chosen(job, watching.all(kube.PODS), only)
                if only and not pods:
                    if is_first:
                        raise _gone(job, only)
                    break
                alone = alone and len(pods) <= 1
                for pod in pods:
                    if pod["metadata"]["uid"] not in reading and _begun(pod):
                        reading[pod["metadata"]["uid"]] = start(pod, tail if is_first else None)
                is_first = False
                if (only and all(map(job_view.pod_over, pods))) or _all_over(watching, job, pods):
                    break
                await watching.change(REST_SECONDS)
                for task in reading.values():
                    if task.done():
                        task.result()  # raises if a log cannot be read any more
            async with asyncio.timeout(LAST_SECONDS):
                await asyncio.gather(*reading.values())
        except TimeoutError:
            raise CommandError(f"the job is over, but logs did not end within {LAST_SECONDS:g} s") from None
        finally:
            for task in reading.values():
                task.cancel()
            await asyncio.gather(*reading.values(), return_exceptions=True)


def _gone(job: Object, pod: str) -> CommandError:
    return CommandError(f"there is no pod {pod} any more; `resile get nodes {job['metadata']['name']}` lists them")


def _all_over(watching: Watch, job: Object, pods: list[Object]) -> bool:
    there = watching.all(kube.of(job_kind_of(job)))
    now = next((one for one in there if one["metadata"]["uid"] == job["metadata"]["uid"]), None)
    return now is None or (job_view.over(now) and all(map(job_view.pod_over, pods)))


def _labels(job: Object) -> dict[str, str]:
    return job_view.pod_labels(job)


def _chosen(job: Object, pods: list[Object], only: str) -> list[Object]:
    """The pod that is asked for, or the nodes of the job, oldest first; the master's log must be asked for."""
    master = job_kind_of(job).master_name(job["metadata"]["name"])
    chosen = [pod for pod in pods if (pod["metadata"]["name"] == only if only else pod["metadata"]["name"] != master)]
    nodes = {
        pod["metadata"]["name"]: job_view.node_view(job_kind_of(job), pod, job["metadata"]["name"]) for pod in chosen
    }
    return sorted(chosen, key=lambda pod: (nodes[pod["metadata"]["name"]].role, nodes[pod["metadata"]["name"]].id))


def main_container(pod: Object) -> str:
    """The container that trains (or is the master); the only one where no name says which."""
    names = [container["name"] for container in pod["spec"]["containers"]]
    named = (pod["metadata"].get("annotations") or {}).get(MAIN_ANNOTATION, MAIN)
    return str(named if named in names else names[0])


def sortable(stamp: str) -> str:
    """A log's time stamp such that later ones are greater: nanoseconds come without their last zeros."""
    seconds, _, fraction = stamp.removesuffix("Z").partition(".")
    return f"{seconds}.{fraction:0<9}"


def _begun(pod: Object) -> bool:
    """Whether the container that trains has been started once."""
    state = _state(pod)
    return "running" in state or "terminated" in state


def _runs(pod: Object) -> bool:
    return "running" in _state(pod)


def _state(pod: Object) -> Object:
    """Of the container that trains."""
    states = (pod.get("status") or {}).get("containerStatuses") or []
    return next((one.get("state") or {} for one in states if one.get("name") == main_container(pod)), {})
