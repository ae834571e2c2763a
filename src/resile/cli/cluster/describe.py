"""`resile describe` on a cluster: the job, its conditions, its pods with their places, what failed last, Events."""

from __future__ import annotations

import time

import click
import msgspec

from resile.api.job_view import JobView
from resile.api.kinds.elasticjob import ElasticJob
from resile.api.kinds.to_job_spec import to_job_spec
from resile.api.manifests.errors import BadManifest
from resile.api.manifests.names import master_name
from resile.api.manifests.reader import read_manifest
from resile.cli.cluster.get import event_entry, node_entry
from resile.cli.commands.describe import LAST_EVENTS, LAST_LINES, facts, failure_text, first_failure, section
from resile.cli.common_options import print_json
from resile.cli.output import rows
from resile.cli.output.follow import outage_table
from resile.cli.output.tables import table
from resile.client.cluster import view
from resile.client.cluster.connection import Cluster, Manifest, Wanted, on
from resile.client.cluster.find import find
from resile.client.errors import CommandError
from resile.client.target import Target
from resile.core.state import JobState
from resile.master.journal.configmap import peek
from resile.master.view import view as whole_view
from resile.platform.kubernetes import client as kube


def describe_there(target: Target, name: str, output: str) -> None:
    """Print everything that the cluster tells of a job.

    Raises:
        CommandError: there is no such job, or the cluster refuses.
    """
    on(target, lambda cluster: _describe(cluster, name, output))


async def _describe(cluster: Cluster, name: str, output: str) -> None:
    job = await find(cluster, name)
    space = cluster.namespace
    pods = await cluster.all(Wanted(kube.PODS, space, labels=view.pod_labels(name)))
    events = [
        event
        for event in view.in_order(await cluster.all(Wanted(kube.EVENTS, space)))
        if view.is_story(event, job) or (event.get("type") == "Warning" and view.about(event, job))
    ][-LAST_EVENTS:]
    told = await journal_view(cluster, job)
    seen = view.job_view(job, pods, time.time(), told[1] if told else None)
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
        section("Interruptions", outage_table(seen) if seen.outages else ""),
        section("Last failure", "\n".join(await failure_lines(cluster, job, told[0] if told else None))),
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
        return facts(seen, {**more, "Mistake": str(bad.errors[0]), "Cluster": cluster.name})
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


async def journal_view(cluster: Cluster, job: Manifest) -> tuple[JobState, JobView] | None:
    """What only the master's journal knows; None if it cannot be had, since everything else can be told without it."""
    try:
        journal = await cluster.get(
            kube.CONFIG_MAPS, master_name(job["metadata"]["name"]), job["metadata"]["namespace"]
        )
    except CommandError:  # not everybody may read ConfigMaps
        return None
    state = peek(journal) if journal is not None else None
    if state is None or state.spec.uid != job["metadata"]["uid"]:
        return None
    return state, whole_view(state, time.time())


async def failure_lines(cluster: Cluster, job: Manifest, state: JobState | None) -> list[str]:
    """What failed last, with what its process said of it or, if its pod is still there, the end of its log."""
    first = first_failure(state) if state is not None else None
    if first is not None:
        return [f"first of round {first.round}", *failure_text(first).splitlines()]
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
