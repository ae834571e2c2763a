"""`resile logs` on a cluster: of one pod or of all pods of a job, those that appear later included."""

from __future__ import annotations

import asyncio
import sys
import time

import msgspec

from resile.api.manifests.names import master_name
from resile.api.manifests.pod_template import MAIN
from resile.client.cluster import view
from resile.client.cluster.connection import PATIENCE, Cluster, Manifest, Wanted, Watch, on
from resile.client.cluster.find import find_pod
from resile.client.errors import CommandError
from resile.client.target import Target
from resile.operator.jobs.master_pod import MAIN_ANNOTATION
from resile.platform.kubernetes import client as kube

REST_SECONDS = 5.0
"""After which it is checked that every log is still read, although nothing changed."""
LAST_SECONDS = 60.0
"""For the last lines of pods that are ending."""
MARGIN_SECONDS = 5
"""By which the clocks of the machines may differ where a log is read on."""
AGAIN_SECONDS = 0.5
AT_ONCE = 20
"""Pods whose logs are asked for at the same time."""


def logs_there(target: Target, name: str, *, follow: bool, tail: int | None, master: bool, as_json: bool) -> None:
    """Print the logs; with `follow`, go on until the job (or the pod) has ended.

    Raises:
        CommandError: there is no such job or pod, or the cluster refuses.
    """

    async def read(cluster: Cluster) -> None:
        job, pod = await find_pod(cluster, name)
        if master:
            pod = master_name(job["metadata"]["name"])
        reader = _Reader(cluster, tail, as_json=as_json)
        await (_follow(cluster, reader, job, pod) if follow else _once(cluster, reader, job, pod))

    on(target, read)


class _Reader:
    """Prints lines of pods, with the pods' names where there are several."""

    def __init__(self, cluster: Cluster, tail: int | None, *, as_json: bool) -> None:
        self.prefix = False
        self._cluster = cluster
        self._tail = tail
        self._as_json = as_json

    async def fetch(self, pod: Manifest) -> list[str]:
        """What a pod has written so far; nothing if it has not begun."""
        if not _begun(pod):
            return []
        name = pod["metadata"]["name"]
        return [line async for line in self._cluster.log(name, container=main_container(pod), tail=self._tail)]

    async def follow(self, pod: Manifest, watching: Watch, *, whole: bool) -> None:
        """Print what a pod writes until it ends; `whole` from its start, else from where `--tail` says.

        Where the connection breaks, it goes on behind the last line that was printed.

        Raises:
            CommandError: the log of a pod that still runs could not be read for `PATIENCE`.
        """
        name, tail = pod["metadata"]["name"], None if whole else self._tail
        read, heard = Bookmark(), time.monotonic()
        while True:
            again = read.reopen()
            lines = self._cluster.log(
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
                        self.show(name, line.partition(" ")[2])
                        sys.stdout.flush()
            except CommandError as error:
                problem = error
            now = [one for one in watching.all(kube.PODS) if one["metadata"]["uid"] == pod["metadata"]["uid"]]
            if all(map(view.pod_over, now)) or (problem is None and not all(map(_runs, now))):
                return
            if problem is not None and time.monotonic() - heard > PATIENCE:
                raise problem
            await asyncio.sleep(AGAIN_SECONDS)

    def show(self, pod: str, line: str) -> None:
        """Print one line."""
        if self._as_json:
            line = msgspec.json.encode({"pod": pod, "line": line}).decode()
        elif self.prefix:
            line = f"[{pod}] {line}"
        sys.stdout.write(line + "\n")


class Bookmark:
    """How far a log with time stamps was read, so that reading on from a little before it repeats nothing.

    Stamps alone do not say: what a container writes to stdout and what it writes to stderr are stamped by two who do
    not wait for each other, so that equal and slightly older stamps come later. They only count after `reopen`.
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


async def _once(cluster: Cluster, reader: _Reader, job: Manifest, only: str) -> None:
    pods = _chosen(job, await cluster.all(Wanted(kube.PODS, cluster.namespace, labels=_labels(job))), only)
    if only and not pods:
        raise CommandError(f"there is no pod {only} any more; `resile get nodes {job['metadata']['name']}` lists them")
    reader.prefix = len(pods) > 1
    for start in range(0, len(pods), AT_ONCE):
        some = pods[start : start + AT_ONCE]
        for pod, lines in zip(some, await asyncio.gather(*map(reader.fetch, some)), strict=True):
            for line in lines:
                reader.show(pod["metadata"]["name"], line)
    sys.stdout.flush()


async def _follow(cluster: Cluster, reader: _Reader, job: Manifest, only: str) -> None:
    name, uid = job["metadata"]["name"], job["metadata"]["uid"]
    wanted = (
        Wanted(kube.JOBS, cluster.namespace, fields={"metadata.name": name}),
        Wanted(kube.PODS, cluster.namespace, labels=_labels(job)),
    )
    reading: dict[str, asyncio.Task[None]] = {}
    async with cluster.watch(*wanted) as watching:
        first = True
        try:
            while True:
                pods = _chosen(job, watching.all(kube.PODS), only)
                if only and not pods:
                    if first:
                        raise CommandError(f"there is no pod {only} any more; `resile get nodes {name}` lists them")
                    break
                reader.prefix = reader.prefix or len(pods) > 1
                for pod in pods:
                    if pod["metadata"]["uid"] not in reading and _begun(pod):
                        reading[pod["metadata"]["uid"]] = asyncio.create_task(
                            reader.follow(pod, watching, whole=not first)
                        )
                first = False
                if (only and all(map(view.pod_over, pods))) or _all_over(watching, uid, pods):
                    break
                await watching.change(REST_SECONDS)
                for task in reading.values():
                    if task.done():
                        task.result()  # a log that cannot be read any more, or a reader that went away
            async with asyncio.timeout(LAST_SECONDS):
                await asyncio.gather(*reading.values())
        except TimeoutError:
            raise CommandError(f"the job is over, but logs did not end within {LAST_SECONDS:g} s") from None
        finally:
            for task in reading.values():
                task.cancel()
            await asyncio.gather(*reading.values(), return_exceptions=True)


def _all_over(watching: Watch, uid: str, pods: list[Manifest]) -> bool:
    job = next((one for one in watching.all(kube.JOBS) if one["metadata"]["uid"] == uid), None)
    return job is None or (view.over(job) and all(map(view.pod_over, pods)))


def _labels(job: Manifest) -> dict[str, str]:
    return view.pod_labels(job["metadata"]["name"])


def _chosen(job: Manifest, pods: list[Manifest], only: str) -> list[Manifest]:
    """The pod that is asked for, or the nodes of the job, oldest first; the master's log must be asked for."""
    master = master_name(job["metadata"]["name"])
    chosen = [pod for pod in pods if (pod["metadata"]["name"] == only if only else pod["metadata"]["name"] != master)]
    nodes = {pod["metadata"]["name"]: view.node_view(pod, job["metadata"]["name"]) for pod in chosen}
    return sorted(chosen, key=lambda pod: (nodes[pod["metadata"]["name"]].role, nodes[pod["metadata"]["name"]].id))


def main_container(pod: Manifest) -> str:
    """The container that trains (or is the master); the only one where no name says which."""
    names = [container["name"] for container in pod["spec"]["containers"]]
    named = (pod["metadata"].get("annotations") or {}).get(MAIN_ANNOTATION, MAIN)
    return str(named if named in names else names[0])


def sortable(stamp: str) -> str:
    """A log's time stamp such that later ones are greater: nanoseconds come without their last zeros."""
    seconds, _, fraction = stamp.removesuffix("Z").partition(".")
    return f"{seconds}.{fraction:0<9}"


def _begun(pod: Manifest) -> bool:
    """Whether the container that trains has been started once."""
    state = _state(pod)
    return "running" in state or "terminated" in state


def _runs(pod: Manifest) -> bool:
    return "running" in _state(pod)


def _state(pod: Manifest) -> Manifest:
    """Of the container that trains."""
    states = (pod.get("status") or {}).get("containerStatuses") or []
    return next((one.get("state") or {} for one in states if one.get("name") == main_container(pod)), {})
