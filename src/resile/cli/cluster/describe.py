"""`resile describe` on a cluster: the job, its conditions, its pods with their places, what failed last, Events."""

from __future__ import annotations

import time

import click
import msgspec

from resile.api.elasticjob import ElasticJob
from resile.api.manifest import read_manifest
from resile.api.mistakes import BadManifest
from resile.api.names import master_name
from resile.api.translate import to_job_spec
from resile.cli import rows
from resile.cli.cluster import view
from resile.cli.cluster.connection import Cluster, Manifest, Wanted, on
from resile.cli.cluster.find import find
from resile.cli.cluster.get import event_entry, node_entry
from resile.cli.describe import LAST_EVENTS, LAST_LINES, facts, section
from resile.cli.errors import CommandError
from resile.cli.options import print_json
from resile.cli.place import Place
from resile.cli.tables import table
from resile.master.view import JobView
from resile.platform.kubernetes import client as kube


def describe_there(place: Place, name: str, output: str) -> None:
    """Print everything that the cluster tells of a job.

    Raises:
        CommandError: there is no such job, or the cluster refuses.
    """
    on(place, lambda cluster: _describe(cluster, name, output))


async def _describe(cluster: Cluster, name: str, output: str) -> None:
    job = await find(cluster, name)
    space = cluster.namespace
    pods = await cluster.all(Wanted(kube.PODS, space, labels=view.pod_labels(name)))
    events = [
        event
        for event in view.in_order(await cluster.all(Wanted(kube.EVENTS, space)))
        if view.is_story(event, job) or (event.get("type") == "Warning" and view.about(event, job))
    ][-LAST_EVENTS:]
    seen = view.job_view(job, pods, time.time())
    status = job.get("status") or {}
    nodes = sorted((node_entry(pod, name, wide=True) for pod in pods), key=lambda entry: entry.key)
    if output == "json":
        data = msgspec.to_builtins(seen)
        data["master"] = next((entry.data for entry in nodes if entry.key.endswith(master_name(name))), None)
        data["conditions"] = (status.get("status") or {}).get("conditions") or []
        data["restarts"] = status.get("restarts") or 0
        data["last_failure"] = status.get("lastFailure")
        data["events"] = [event_entry(event, name).data for event in events]
        print_json(data)
        return
    parts = [
        _facts(cluster, job, seen),
        section("Conditions", _conditions(status)),
        section("Nodes", table(rows.NODE_WIDE_HEADER, [entry.row for entry in nodes]) if nodes else ""),
        section("Last failure", "\n".join(await failure_lines(cluster, job))),
        section(
            "Events", table(rows.EVENT_HEADER, [event_entry(event, name).row for event in events]) if events else ""
        ),
    ]
    click.echo("\n".join(parts))


def _facts(cluster: Cluster, job: Manifest, seen: JobView) -> str:
    more = {"Restarts": str((job.get("status") or {}).get("restarts") or 0)}
    try:
        read = read_manifest(job)
        spec = to_job_spec(read) if isinstance(read, ElasticJob) else None
    except BadManifest as bad:
        return facts(seen, {**more, "Mistake": str(bad.mistakes[0]), "Cluster": cluster.name})
    if spec is not None:
        more |= {
            "Strategy": spec.strategy.value,
            "Replicas": ", ".join(f"{role}={declared.replicas}" for role, declared in spec.roles.items()),
            "Recovery budget": f"{spec.timeouts.recovery_budget:g} s",
        }
    return facts(seen, {**more, "Cluster": f"{cluster.name} ({cluster.server})"})


def _conditions(status: Manifest) -> str:
    lines = [
        [one.get("type", ""), one.get("status", ""), one.get("lastTransitionTime", ""), one.get("message") or rows.NONE]
        for one in (status.get("status") or {}).get("conditions") or []
    ]
    return table(("TYPE", "STATUS", "SINCE", "MESSAGE"), lines) if lines else ""


async def failure_lines(cluster: Cluster, job: Manifest) -> list[str]:
    """What failed last and, if its pod is still there, the last lines that it wrote; empty if nothing failed."""
    failure = (job.get("status") or {}).get("lastFailure")
    if not failure:
        return []
    node = failure.get("node") or ""
    why = failure.get("message") or failure.get("reason")
    lines = [f"{f'{node}: ' if node else ''}{why}, at {failure.get('time') or '?'}"]
    try:
        said = [line async for line in cluster.log(node, tail=LAST_LINES)] if node else []
    except CommandError:  # the pod is gone, or never started
        said = []
    return [*lines, "the last lines of its log:", *said] if said else lines
