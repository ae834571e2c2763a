"""A cluster's objects as the views that every listing shows: pure functions from plain data.

Interruptions and data sets stand in no object. They come from the master's journal where that can be read, and are
left empty elsewhere; so are the crashes of one node's processes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from resile.api.ids import NodeId, NodeKey
from resile.api.job_event import JobEvent
from resile.api.job_view import JobView, NodeView
from resile.api.kinds.elasticjob import Phase
from resile.api.kinds.labels import JOB_LABELS, PREFIXED_JOB_NAME, PREFIXED_RANK_INDEX, PREFIXED_RELAUNCH_COUNT
from resile.api.manifests.names import master_name, node_of_pod
from resile.client.base import EventView
from resile.client.cluster.connection import Manifest
from resile.kube.timestamps import moment
from resile.platform.kubernetes.pod_status import observation

MASTER = "master"


def over(job: Manifest) -> bool:
    """Whether a job will never run again."""
    return phase(job) in (Phase.SUCCEEDED, Phase.FAILED)


def phase(job: Manifest) -> str:
    """A job's phase; `Created` until the operator has taken it up."""
    return str((job.get("status") or {}).get("phase") or Phase.CREATED)


def job_view(job: Manifest, pods: Iterable[Manifest], now: float, journal: JobView | None = None) -> JobView:
    """A job with its nodes, the master aside.

    Args:
        job: the ElasticJob.
        pods: the job's.
        now: the moment.
        journal: what its master knows, for what the cluster's objects do not tell.
    """
    metadata, status = job["metadata"], job.get("status") or {}
    inner, progress = status.get("status") or {}, status.get("progress") or {}
    step = progress.get("step")
    nodes = [node_view(pod, metadata["name"]) for pod in pods]
    return JobView(
        name=metadata["name"],
        namespace=metadata["namespace"],
        phase=phase(job),
        reason=status.get("reason") or "",
        message=status.get("message") or "",
        created_at=moment(metadata.get("creationTimestamp")) or now,
        started_at=moment(inner.get("startTime")),
        ended_at=(moment(inner.get("completionTime")) or now) if over(job) else None,
        at=now,
        round=progress.get("round") or 0,
        members=progress.get("members") or 0,
        min_nodes=journal.min_nodes if journal else 0,
        max_nodes=journal.max_nodes if journal else 0,
        step=-1 if step is None else step,
        total=progress.get("total") or 0,
        speed=progress.get("speed") or 0.0,
        goodput=status.get("goodput") or 0.0,
        nodes=sorted((node for node in nodes if node.role != MASTER), key=lambda node: (node.role, node.id)),
        outages=journal.outages if journal else [],
        datasets=journal.datasets if journal else [],
    )


def node_view(pod: Manifest, job: str) -> NodeView:
    """One pod of a job as a row; the master's is one, too."""
    metadata, status = pod["metadata"], pod.get("status") or {}
    name, labels = metadata["name"], metadata.get("labels") or {}
    key = node_of_pod(name, job)
    seen = observation(key or NodeKey(MASTER, NodeId(0)), pod)
    containers = status.get("containerStatuses") or []
    ends = [
        at
        for container in containers
        if (at := moment(((container.get("state") or {}).get("terminated") or {}).get("finishedAt")))
    ]
    return NodeView(
        name=name,
        role=key.role if key else MASTER,
        id=key.id if key else 0,
        rank=_number(labels.get(PREFIXED_RANK_INDEX)),
        status=pod_word(pod),
        ready=bool(containers) and all(container.get("ready") for container in containers),
        restarts=sum(container.get("restartCount") or 0 for container in containers),
        crashes=0,
        relaunch_count=_number(labels.get(PREFIXED_RELAUNCH_COUNT)),
        launched_at=moment(metadata.get("creationTimestamp")) or 0.0,
        ended_at=max(ends) if seen.status.ended and ends else None,
        host=seen.host,
        address=seen.address,
        message=seen.end.message,
        containers=len((pod.get("spec") or {}).get("containers") or containers),
        ready_containers=sum(bool(container.get("ready")) for container in containers),
    )


def pod_word(pod: Manifest) -> str:
    """What kubectl shows as a pod's STATUS."""
    status = pod.get("status") or {}
    if pod["metadata"].get("deletionTimestamp"):
        return "Unknown" if status.get("reason") == "NodeLost" else "Terminating"
    word = str(status.get("reason") or status.get("phase") or "Unknown")
    first = _init_word(pod, status)
    if first:
        return first
    running = False
    for container in reversed(status.get("containerStatuses") or []):
        state = container.get("state") or {}
        ended = state.get("terminated")
        if (state.get("waiting") or {}).get("reason"):
            word = state["waiting"]["reason"]
        elif ended is not None:
            signalled = f"Signal:{ended['signal']}" if ended.get("signal") else f"ExitCode:{ended.get('exitCode', 0)}"
            word = ended.get("reason") or signalled
        elif container.get("ready"):
            running = True
    return "Running" if word == "Completed" and running else word


def _init_word(pod: Manifest, status: Manifest) -> str:
    """The word for a pod whose init containers are not done; empty once they are."""
    containers = status.get("initContainerStatuses") or []
    for at, container in enumerate(containers):
        state = container.get("state") or {}
        ended, waiting = state.get("terminated"), (state.get("waiting") or {}).get("reason")
        if ended is not None and not ended.get("exitCode"):
            continue
        if ended is not None:
            return f"Init:{ended.get('reason') or 'ExitCode:' + str(ended.get('exitCode'))}"
        if waiting and waiting != "PodInitializing":
            return f"Init:{waiting}"
        return f"Init:{at}/{len((pod.get('spec') or {}).get('initContainers') or containers)}"
    return ""


def pod_labels(job: str) -> dict[str, str]:
    """What the pods of a job are labelled with."""
    return {PREFIXED_JOB_NAME: job}


def pod_over(pod: Manifest) -> bool:
    """Whether a pod has ended, or is to."""
    ended = (pod.get("status") or {}).get("phase") in ("Succeeded", "Failed")
    return ended or bool(pod["metadata"].get("deletionTimestamp"))


def pods_by_job(pods: Iterable[Manifest]) -> dict[tuple[str, str], list[Manifest]]:
    """Pods by the namespace and name of their job; those of no job are left out."""
    found: dict[tuple[str, str], list[Manifest]] = {}
    for pod in pods:
        job = (pod["metadata"].get("labels") or {}).get(PREFIXED_JOB_NAME)
        if job and (node_of_pod(pod["metadata"]["name"], job) or pod["metadata"]["name"] == master_name(job)):
            found.setdefault((pod["metadata"]["namespace"], job), []).append(pod)
    return found


def job_of_plan(plan: Manifest) -> str:
    """The job that a ScalePlan is for."""
    labels = plan["metadata"].get("labels") or {}
    named = (plan.get("spec") or {}).get("ownerJob") or next((labels[one] for one in JOB_LABELS if one in labels), "")
    return str(named)


def event_time(event: Manifest) -> float:
    """When an Event was last seen."""
    times = (event.get("lastTimestamp"), event.get("eventTime"), event["metadata"].get("creationTimestamp"))
    return next((at for text in times if (at := moment(text)) is not None), 0.0)


def in_order(events: Iterable[Manifest]) -> list[Manifest]:
    """Events, oldest first; those of one second in the order in which they were written."""
    return sorted(events, key=lambda one: (event_time(one), _number(one["metadata"].get("resourceVersion"))))


def about(event: Manifest, job: Manifest) -> bool:
    """Whether an Event is about a job or one of its pods."""
    name, kind = event["involvedObject"].get("name", ""), event["involvedObject"].get("kind")
    if event["metadata"]["namespace"] != job["metadata"]["namespace"]:
        return False
    if kind == "Pod":
        return node_of_pod(name, job["metadata"]["name"]) is not None or name == master_name(job["metadata"]["name"])
    return is_story(event, job)


def is_story(event: Manifest, job: Manifest) -> bool:
    """Whether an Event is about the job itself; one of an earlier job of its name is not."""
    involved = event["involvedObject"]
    same = involved.get("uid") == job["metadata"]["uid"]
    return bool(involved.get("kind") == "ElasticJob" and same)


def last_word(event: Manifest) -> bool:
    """Whether an Event tells that its job is over."""
    return event.get("reason") in (Phase.SUCCEEDED.reason, Phase.FAILED.reason)


def event_view(event: Manifest, job: str) -> EventView:
    """An Event as a line of a listing."""
    involved = event["involvedObject"]
    about = f"{str(involved.get('kind', '')).lower()}/{involved.get('name', '')}"
    return EventView(**msgspec.structs.asdict(story([event])[0]), object=about, job=job)


def story(events: Sequence[Manifest]) -> list[JobEvent]:
    """Events as lines of a job's story."""
    return [
        JobEvent(
            number=number,
            at=event_time(event),
            reason=event.get("reason") or "",
            message=event.get("message") or "",
            warning=event.get("type") == "Warning",
        )
        for number, event in enumerate(events, start=1)
    ]


def _number(text: str | None) -> int:
    return int(text) if text and text.isdigit() else 0
