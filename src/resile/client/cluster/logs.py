"""Reading the logs of jobs of a cluster: of one pod or of all nodes, pods that appear later included."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable

from resile.api.kinds.registry import job_kind_of
from resile.api.manifests.pod_template import MAIN, MAIN_ANNOTATION
from resile.client.base import LogLine
from resile.client.cluster import job_view
from resile.client.cluster.connection import PATIENCE, Cluster, Watch
from resile.client.cluster.jobs import current, job_itself, pods_of
from resile.client.cluster.streams import end, take
from resile.client.errors import CommandError
from resile.kube import kinds as kube
from resile.kube.kinds import Object

REST_SECONDS = 5.0
"""How often to check that every log is still being read, even if no pod changes."""
LAST_SECONDS = 60.0
"""How long to wait for the last lines of pods that are ending."""
MARGIN_SECONDS = 5
"""How far the clocks of machines may differ: after a broken connection, reading begins this much earlier."""
AGAIN_SECONDS = 0.5
AT_ONCE = 20
"""How many pods' logs are requested at the same time."""
WAITING_LINES = 1000
"""How many lines may wait for the caller; reading pauses while there are more."""

Lines = asyncio.Queue[LogLine]


async def read(cluster: Cluster, job: Object, pod: str, tail: int | None) -> AsyncGenerator[list[LogLine], None]:
    """Yield the lines that a pod has written so far, or those of all nodes of the job if `pod` is empty.

    Begins with the last `tail` lines of each log; if `tail` is None, with the first line.
    """
    pods = _chosen(job, await cluster.all(pods_of(job)), pod)
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
    """Yield what `read` yields, and then new lines, until the pod or the job has ended.

    If `pod` is empty, also yields all lines of pods that start later. `tail` does not apply to these pods.
    """
    lines = Lines(WAITING_LINES)
    reading = asyncio.create_task(_follow(cluster, job, pod, tail, lines))
    try:
        while batch := await take(lines, reading):
            yield batch
    finally:
        await end(reading)


async def follow_pod(
    cluster: Cluster, pod: Object, watching: Watch, tail: int | None, show: Callable[[str], Awaitable[None]]
) -> None:
    """Show the lines of a pod until it ends. After a broken connection, go on after the last line that was shown.

    Raises `CommandError` if the log of a running pod could not be read for `PATIENCE` seconds.
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
    """Remembers which line of a log was read last, so that no line is shown twice if the log is read again.

    The time stamps of the lines are not enough for this. A container's stdout and stderr are stamped independently, so
    a later line may have an equal or slightly older stamp. Stamps are compared only after `reopen`.
    """

    def __init__(self) -> None:
        self._last = ""
        self._latest = ""
        self._repeating = False

    def reopen(self) -> bool:
        """Call this before the log is read again from some point before its last line.

        After this call, `passes` returns False for lines that were read before. Returns False if no line was read yet.
        """
        self._repeating = bool(self._last)
        return self._repeating

    def passes(self, line: str) -> bool:
        """True if this line was not read before. If so, remembers it as the line that was read last."""
        stamp = sortable(line.partition(" ")[0])
        if self._repeating and stamp <= self._latest:
            self._repeating = line != self._last
            return False
        self._repeating = False
        self._last, self._latest = line, max(self._latest, stamp)
        return True


async def _follow(cluster: Cluster, job: Object, only: str, tail: int | None, lines: Lines) -> None:
    reading: dict[str, asyncio.Task[None]] = {}
    alone = True

    def start(pod: Object, tail: int | None) -> asyncio.Task[None]:
        async def show(line: str) -> None:
            await lines.put(LogLine(pod["metadata"]["name"], line.encode(), alone))

        return asyncio.create_task(follow_pod(cluster, pod, watching, tail, show))

    async with cluster.watch(job_itself(job), pods_of(job)) as watching:
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
            await end(*reading.values())


def _gone(job: Object, pod: str) -> CommandError:
    return CommandError(f"there is no pod {pod} any more; `resile get nodes {job['metadata']['name']}` lists them")


def _all_over(watching: Watch, job: Object, pods: list[Object]) -> bool:
    now = current(watching, job)
    return now is None or (job_view.over(now) and all(map(job_view.pod_over, pods)))


def _chosen(job: Object, pods: list[Object], only: str) -> list[Object]:
    kind, name = job_kind_of(job), job["metadata"]["name"]

    def order(pod: Object) -> tuple[str, int]:
        node = job_view.node_view(kind, pod, name)
        return node.role, node.id

    if only:
        return [pod for pod in pods if pod["metadata"]["name"] == only]
    return sorted((pod for pod in pods if pod["metadata"]["name"] != kind.master_name(name)), key=order)


def main_container(pod: Object) -> str:
    """The name of the container that trains or is the master.

    The pod's annotation gives the name. Without an annotation, it is `main`. If the pod has no container of that
    name, its first container is taken.
    """
    names = [container["name"] for container in pod["spec"]["containers"]]
    named = (pod["metadata"].get("annotations") or {}).get(MAIN_ANNOTATION, MAIN)
    return str(named if named in names else names[0])


def sortable(stamp: str) -> str:
    """Pad the nanoseconds of a log's time stamp to nine digits, so that stamps sort by time as text."""
    seconds, _, fraction = stamp.removesuffix("Z").partition(".")
    return f"{seconds}.{fraction:0<9}"


def _begun(pod: Object) -> bool:
    state = _state(pod)
    return "running" in state or "terminated" in state


def _runs(pod: Object) -> bool:
    return "running" in _state(pod)


def _state(pod: Object) -> Object:
    states = (pod.get("status") or {}).get("containerStatuses") or []
    return next((one.get("state") or {} for one in states if one.get("name") == main_container(pod)), {})
