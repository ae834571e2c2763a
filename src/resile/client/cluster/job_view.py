"""Translating objects of a cluster into the views that listings show: pure functions of plain data.

No object of a cluster holds interruptions and data sets. They come from the master's journal, and are empty if it
cannot be read. The crashes of a node's processes are not known at all.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from resile.api.ids import NodeId, NodeKey
from resile.api.job_phase import JobPhase
from resile.api.job_view import MASTER, JobEvent, JobView, NodeView
from resile.api.kinds.base import JobKind
from resile.api.kinds.registry import job_kind_of
from resile.api.timestamps import moment
from resile.client.base import EventView
from resile.client.pod_names import is_pod_of
from resile.kube.kinds import Object
from resile.platform.kubernetes.observation import observation


def over(job: Object) -> bool:
    return phase(job).ended


def phase(job: Object) -> JobPhase:
    """The phase of a job; `Created` until the operator has written one."""
    return job_kind_of(job).phase_of(job) or JobPhase.CREATED


def job_view(job: Object, pods: Iterable[Object], now: float, journal: JobView | None = None) -> JobView:
    """Make the view of a job from its object and its pods. The master's pod is left out.

    `journal` is a view made from the job's journal. Interruptions, data sets, and the least and largest number of nodes
    come from it. If it is None, they are empty or 0.
    """
    metadata, kind = job["metadata"], job_kind_of(job)
    report = kind.report_of(job)
    nodes = [node_view(kind, pod, metadata["name"]) for pod in pods]
    return JobView(
        name=metadata["name"],
        namespace=metadata["namespace"],
        phase=report.phase,
        reason=report.reason,
        message=report.message,
        created_at=moment(metadata.get("creationTimestamp")) or now,
        started_at=report.started_at,
        ended_at=(report.ended_at or now) if report.phase.ended else None,
        at=now,
        round=report.round,
        members=report.members,
        min_nodes=journal.min_nodes if journal else 0,
        max_nodes=journal.max_nodes if journal else 0,
        step=-1 if report.step is None else report.step,
        total=report.total,
        speed=report.speed,
        goodput=report.goodput,
        nodes=sorted((node for node in nodes if node.role != MASTER), key=lambda node: (node.role, node.id)),
        outages=journal.outages if journal else [],
        datasets=journal.datasets if journal else [],
    )


def node_view(kind: JobKind, pod: Object, job: str) -> NodeView:
    metadata, status = pod["metadata"], pod.get("status") or {}
    name, labels = metadata["name"], metadata.get("labels") or {}
    key = kind.node_of(name, job)
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
        rank=kind.rank_of(labels),
        status=pod_word(pod),
        ready=bool(containers) and all(container.get("ready") for container in containers),
        restarts=sum(container.get("restartCount") or 0 for container in containers),
        crashes=0,
        relaunch_count=kind.relaunch_count_of(labels),
        launched_at=moment(metadata.get("creationTimestamp")) or 0.0,
        ended_at=max(ends) if seen.status.ended and ends else None,
        host=seen.host,
        address=seen.address,
        message=seen.end.message,
        containers=len((pod.get("spec") or {}).get("containers") or containers),
        ready_containers=sum(bool(container.get("ready")) for container in containers),
    )


def pod_word(pod: Object) -> str:
    """The STATUS that kubectl shows for a pod."""
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


def _init_word(pod: Object, status: Object) -> str:
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


def pod_over(pod: Object) -> bool:
    ended = (pod.get("status") or {}).get("phase") in ("Succeeded", "Failed")
    return ended or bool(pod["metadata"].get("deletionTimestamp"))


def pods_by_job(kind: JobKind, pods: Iterable[Object]) -> dict[tuple[str, str], list[Object]]:
    """Those of `pods` that belong to jobs of this kind, by the namespace and name of their job."""
    found: dict[tuple[str, str], list[Object]] = {}
    for pod in pods:
        job = kind.job_of(pod["metadata"].get("labels") or {})
        if job and is_pod_of(kind, pod["metadata"]["name"], job):
            found.setdefault((pod["metadata"]["namespace"], job), []).append(pod)
    return found


def event_time(event: Object) -> float:
    """When an Event happened last, in seconds since 1970; 0 if the Event has no time."""
    times = (event.get("lastTimestamp"), event.get("eventTime"), event["metadata"].get("creationTimestamp"))
    return next((at for text in times if (at := moment(text)) is not None), 0.0)


def in_order(events: Iterable[Object]) -> list[Object]:
    """Sort Events, oldest first; those of the same second in the order in which they were written."""
    return sorted(events, key=lambda one: (event_time(one), _number(one["metadata"].get("resourceVersion"))))


def about(event: Object, job: Object) -> bool:
    """True if an Event is about a job or one of its pods."""
    name, kind = event["involvedObject"].get("name", ""), event["involvedObject"].get("kind")
    if event["metadata"]["namespace"] != job["metadata"]["namespace"]:
        return False
    if kind == "Pod":
        return is_pod_of(job_kind_of(job), name, job["metadata"]["name"])
    return is_story(event, job)


def is_story(event: Object, job: Object) -> bool:
    """True if an Event is about the job's own object, not about a pod or an earlier job of the same name."""
    involved = event["involvedObject"]
    return bool(involved.get("kind") == job["kind"] and involved.get("uid") == job["metadata"]["uid"])


def last_word(event: Object) -> bool:
    """True if an Event says that its job has ended."""
    return event.get("reason") in (JobPhase.SUCCEEDED.reason, JobPhase.FAILED.reason)


def event_view(event: Object, job: str) -> EventView:
    involved = event["involvedObject"]
    about = f"{str(involved.get('kind', '')).lower()}/{involved.get('name', '')}"
    return EventView(**msgspec.structs.asdict(job_event(event, 1)), object=about, job=job)


def job_event(event: Object, number: int) -> JobEvent:
    """Convert an Event of Kubernetes to a job event."""
    return JobEvent(
        number=number,
        at=event_time(event),
        reason=event.get("reason") or "",
        message=event.get("message") or "",
        warning=event.get("type") == "Warning",
    )


def _number(text: str | None) -> int:
    return int(text) if text and text.isdigit() else 0
