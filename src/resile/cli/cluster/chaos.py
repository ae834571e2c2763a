"""`resile chaos` on a cluster: a pod is deleted without grace, and its replacement waited for."""

from __future__ import annotations

import time

import click

from resile.api.kinds.labels import PREFIXED_RANK_INDEX, PREFIXED_REPLICA_TYPE
from resile.api.manifests.names import master_name
from resile.cli.common_options import print_json
from resile.cli.output.follow import clock
from resile.cli.output.tables import took
from resile.client.cluster import view
from resile.client.cluster.connection import Cluster, Manifest, Wanted, on
from resile.client.cluster.find import find
from resile.client.errors import CommandError
from resile.client.local.jobs import meant, pod_name
from resile.client.target import Target
from resile.platform.kubernetes import client as kube

REPLACED_SECONDS = 60.0
"""For a replacement to run: a pod starts within seconds where there is room."""


def kill_there(target: Target, job: str, node: str, output: str, *, wait: bool) -> None:
    """Kill the pod of a node such as worker-1, or the master's if `node` is empty.

    Raises:
        CommandError: there is no such pod, or the cluster refuses.
    """
    on(target, lambda cluster: _kill(cluster, job, node, output, wait=wait and output != "json"))


async def _kill(cluster: Cluster, job: str, node: str, output: str, *, wait: bool) -> None:
    await find(cluster, job)
    name = (pod_name(job, node) or node) if node else master_name(job)
    async with cluster.watch(Wanted(kube.PODS, cluster.namespace, labels=view.pod_labels(job))) as watching:
        there = {pod["metadata"]["name"]: pod for pod in watching.all(kube.PODS) if not view.pod_over(pod)}
        if name not in there:
            raise CommandError(f"job {job} has no pod {name} that runs; {meant(name, sorted(there)) or 'none does'}")
        struck = there[name]
        at, began = time.time(), time.monotonic()
        await cluster.delete(kube.PODS, name, grace=0)
        if output == "json":
            print_json({"what": f"killed {name}", "at": at, "pids": [], "node": node})
            return
        click.echo(f"{clock(at)} killed {name}")
        created = False
        while wait:
            left = REPLACED_SECONDS - (time.monotonic() - began)
            if left <= 0:
                click.echo(f"no replacement runs after {REPLACED_SECONDS:g} s; `resile describe {job}` tells why")
                return
            new = next((pod for pod in watching.all(kube.PODS) if _fills(pod, struck)), None)
            if new is not None and not created:
                created = True
                click.echo(f"{new['metadata']['name']} was created after {took(time.monotonic() - began)}")
            if new is not None and view.pod_word(new) == "Running":
                click.echo(f"{new['metadata']['name']} ran after {took(time.monotonic() - began)}")
                return
            await watching.change(left)


def _fills(pod: Manifest, struck: Manifest) -> bool:
    """Whether a pod has taken the place of another one."""
    mine, its = pod["metadata"].get("labels") or {}, struck["metadata"].get("labels") or {}
    same = all(mine.get(label) == its.get(label) for label in (PREFIXED_REPLICA_TYPE, PREFIXED_RANK_INDEX))
    return same and pod["metadata"]["uid"] != struck["metadata"]["uid"] and not view.pod_over(pod)
