"""Injecting faults into jobs of a cluster: delete a pod without grace, and wait for its replacement."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator

from resile.api.kinds.registry import job_kind_of
from resile.chaos.faults import Fault, Injected, KillMaster, KillNode
from resile.client.base import Sign
from resile.client.cluster import job_view
from resile.client.cluster.connection import Cluster
from resile.client.cluster.jobs import find, pods_of
from resile.client.errors import CommandError, NotUsableError
from resile.client.pod_names import did_you_mean, pod_name
from resile.kube import kinds as kube
from resile.kube.kinds import Object

REPLACED_SECONDS = 60.0
"""How long to wait until the replacement of a killed pod runs: it takes seconds if a machine has room for it."""


async def inject(cluster: Cluster, job: str, fault: Fault) -> tuple[Injected, AsyncGenerator[list[Sign], None]]:
    """Kill the pod of a node or of the master.

    Returns what was done, and a generator. It yields one sign when the pod's replacement was created, and one when the
    replacement runs or if it does not run in time. Raises `CommandError` if the job is over or has no such running pod,
    and `NotUsableError` if the fault is another one.
    """
    if not isinstance(fault, KillNode | KillMaster):
        raise NotUsableError("on a cluster, only a node or the master can be killed")
    item = await find(cluster, job)
    if job_view.over(item):
        raise CommandError(f"job {job} is over ({job_view.phase(item)}); nothing was killed")
    kind = job_kind_of(item)
    if isinstance(fault, KillNode):
        node = fault.node
        name = pod_name(kind, job, node) or node
    else:
        node, name = "", kind.master_name(job)
    pods = await cluster.all(pods_of(item))
    running = {pod["metadata"]["name"]: pod for pod in pods if not job_view.pod_over(pod)}
    if name not in running:
        hint = did_you_mean(name, sorted(running)) or "none does"
        raise CommandError(f"job {job} has no pod {name} that runs; {hint}")
    injected = Injected(what=f"killed {name}", at=time.time(), pids=[], node=node)
    began = time.monotonic()
    await cluster.delete(kube.PODS, name, grace=0)
    return injected, _replacement(cluster, item, running[name], began)


async def _replacement(cluster: Cluster, job: Object, killed: Object, began: float) -> AsyncGenerator[list[Sign], None]:
    created = False
    async with cluster.watch(pods_of(job)) as watching:
        while (left := REPLACED_SECONDS - (time.monotonic() - began)) > 0:
            new = next((pod for pod in watching.all(kube.PODS) if _replaces(job, pod, killed)), None)
            if new is not None and not created:
                created = True
                yield [Sign(f"{new['metadata']['name']} was created", time.monotonic() - began)]
            if new is not None and job_view.pod_word(new) == "Running":
                yield [Sign(f"{new['metadata']['name']} ran", time.monotonic() - began)]
                return
            await watching.change(left)
    name = job["metadata"]["name"]
    yield [Sign(f"no replacement runs after {REPLACED_SECONDS:g} s; `resile describe {name}` tells why")]


def _replaces(job: Object, pod: Object, killed: Object) -> bool:
    mine, its = (job_view.node_view(job_kind_of(job), one, job["metadata"]["name"]) for one in (pod, killed))
    same = (mine.role, mine.rank) == (its.role, its.rank)
    return same and pod["metadata"]["uid"] != killed["metadata"]["uid"] and not job_view.pod_over(pod)
