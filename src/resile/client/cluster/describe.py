"""Describing a job of a cluster: its conditions, pods and Events, and its journal if the user may read it."""

from __future__ import annotations

import time

from resile.api.job import JobSpec
from resile.api.kinds.registry import job_kind_of
from resile.api.manifests.errors import BadManifest
from resile.api.manifests.reader import read_manifest
from resile.api.timestamps import stamp
from resile.client.base import LAST_EVENTS, LAST_LINES, Description, Failure, NodeFailure, facts_of, first_failure
from resile.client.cluster import job_view
from resile.client.cluster.connection import Cluster
from resile.client.cluster.jobs import find, pods_of
from resile.client.errors import CommandError
from resile.core.state import JobState
from resile.kube import kinds as kube
from resile.kube.informer import Watched
from resile.kube.kinds import Object
from resile.master.job_view import view as view_of_state
from resile.master.journal.configmap import peek


async def describe(cluster: Cluster, name: str) -> Description:
    job = await find(cluster, name)
    pods = await cluster.all(pods_of(job))
    events = [
        event
        for event in job_view.in_order(await cluster.all(Watched(kube.EVENTS, cluster.namespace)))
        if job_view.is_story(event, job) or (event.get("type") == "Warning" and job_view.about(event, job))
    ][-LAST_EVENTS:]
    state = await journal(cluster, job)
    now = time.time()
    status = job.get("status") or {}
    kind = job_kind_of(job)
    conditions = kind.conditions_of(job)
    nodes = sorted((job_view.node_view(kind, pod, name) for pod in pods), key=lambda node: node.name)
    return Description(
        job=job_view.job_view(job, pods, now, view_of_state(state, now) if state else None),
        master=next((node for node in nodes if node.name == kind.master_name(name)), None),
        nodes=nodes,
        facts=_facts(cluster, job),
        failure=await last_failure(cluster, job, state),
        events=[job_view.event_view(event, name) for event in events],
        conditions=conditions,
        data={
            "conditions": conditions,
            "restarts": status.get("restarts") or 0,
            "last_failure": status.get("lastFailure"),
        },
    )


async def spec(cluster: Cluster, name: str) -> JobSpec:
    try:
        return _read(await find(cluster, name))
    except BadManifest as bad:
        raise CommandError(f"job {name} cannot be read: {bad.errors[0]}") from bad


def _read(job: Object) -> JobSpec:
    return job_kind_of(job).to_job_spec(read_manifest(job))


async def journal(cluster: Cluster, job: Object) -> JobState | None:
    """The state in the master's journal. If it cannot be read, returns None, because callers can do without it."""
    try:
        metadata = job["metadata"]
        name = job_kind_of(job).master_name(metadata["name"])
        found = await cluster.get(kube.CONFIG_MAPS, name, metadata["namespace"])
    except CommandError:  # a user may be forbidden to read ConfigMaps
        return None
    state = peek(found) if found is not None else None
    return state if state is not None and state.spec.uid == job["metadata"]["uid"] else None


async def last_failure(cluster: Cluster, job: Object, state: JobState | None) -> Failure | None:
    """The last failure of a job; None if there was none.

    `state` is the state in the journal. If it has a failed process, that process is returned. Otherwise the failure
    comes from the job's status, with the last log lines of the failed node's pod if they can be read.
    """
    if state is not None and (first := first_failure(state)):
        return first
    failure = job_kind_of(job).report_of(job).last_failure
    if failure is None:
        return None
    node, why = failure.node, failure.message or failure.reason
    try:
        said = [line async for line in cluster.log(node, tail=LAST_LINES)] if node else []
    except CommandError:  # the pod is gone, or never started
        said = []
    when = stamp(failure.at) if failure.at else "?"
    return NodeFailure(f"{f'{node}: ' if node else ''}{why}, at {when}", said or None)


def _facts(cluster: Cluster, job: Object) -> dict[str, str]:
    facts = {"Restarts": str(job_kind_of(job).report_of(job).restarts)}
    try:
        spec = _read(job)
    except BadManifest as bad:
        return {**facts, "Error": str(bad.errors[0]), "Cluster": cluster.name}
    facts |= facts_of(spec, {role: declared.replicas for role, declared in spec.roles.items()})
    return {**facts, "Cluster": f"{cluster.name} ({cluster.server})"}
