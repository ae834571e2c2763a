"""What a pod's status says of its node: one function from plain data to an `Observation`.

Kubernetes has several places for the same news and leaves most of them empty; this is where they are weighed. A pod on
a machine without contact says nothing new here: the heartbeat finds out sooner.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

from resile.api.ids import NodeKey
from resile.api.manifests.pod_template import MAIN
from resile.platform.base import Observation
from resile.protocol.reports import NodeEnd, NodeStatus

Manifest = dict[str, Any]

CANNOT_START = frozenset(
    {
        "ImagePullBackOff",
        "ErrImagePull",
        "ErrImageNeverPull",
        "InvalidImageName",
        "ImageInspectError",
        "RegistryUnavailable",
        "CreateContainerConfigError",
        "CreateContainerError",
        "CreatePodSandboxError",
        "RunContainerError",
    }
)
"""Why a container waits, where waiting alone will not help."""

_DISRUPTIONS = {
    "PreemptionByScheduler": "Preempted",
    "PreemptionByKubeScheduler": "Preempted",
    "DeletionByTaintManager": "TaintManagerEviction",
    "EvictionByEvictionAPI": "Evicted",
    "TerminationByKubelet": "Terminated",
}
"""Reasons of the condition `DisruptionTarget` (Kubernetes 1.26 and newer), as older ones name the same."""

_SAYS_NOTHING = ("Error", "Completed")
"""Reasons that repeat what the exit code says."""

_ENDED_BY_DELETION = (0, 137, 143)
"""Exit codes of a container that was told to end."""

LONGEST_MESSAGE = 500


def observation(node: NodeKey, pod: Manifest) -> Observation:
    """How a node is, by its pod as the API server gives it."""
    status = pod.get("status") or {}
    seen, end = _judge(pod, status)
    return Observation(
        node=node,
        status=seen,
        end=end,
        host=(pod.get("spec") or {}).get("nodeName") or "",
        address=status.get("podIP") or "",
    )


def gone(node: NodeKey, pod: Manifest | None) -> Observation:
    """A pod that is not there any more; what it said last counts if it had ended by itself."""
    if pod is not None:
        last = observation(node, pod)
        if last.status.ended:
            return last
    return Observation(node=node, status=NodeStatus.DELETED, end=NodeEnd(reason=_disruption((pod or {}).get("status"))))


def _judge(pod: Manifest, status: Manifest) -> tuple[NodeStatus, NodeEnd]:
    exited = _exited(status)
    if (pod.get("metadata") or {}).get("deletionTimestamp"):
        if exited is not None and not _by_deletion(pod, exited):
            return _ended(status, exited)
        reason = _disruption(status)
        return NodeStatus.DELETED, NodeEnd(reason=reason, message=_short(status.get("message")) if reason else "")
    if exited is not None or status.get("phase") in ("Succeeded", "Failed"):
        return _ended(status, exited)
    if status.get("phase") == "Pending":
        why = _cannot_start(status)
        return (NodeStatus.PENDING, NodeEnd(message=why)) if why else (NodeStatus.STARTING, NodeEnd())
    return (NodeStatus.RUNNING if status.get("phase") else NodeStatus.STARTING), NodeEnd()


def _ended(status: Manifest, exited: Manifest | None) -> tuple[NodeStatus, NodeEnd]:
    exited = exited or {}
    code = exited.get("exitCode")
    if status.get("phase") == "Succeeded" or (code == 0 and status.get("phase") != "Failed"):
        return NodeStatus.SUCCEEDED, NodeEnd(exit_code=code)
    said = exited.get("reason") or ""
    reason = _disruption(status) or status.get("reason") or ("" if said in _SAYS_NOTHING else said)
    if said == "OOMKilled":
        reason = said
    message = exited.get("message") or status.get("message")
    return NodeStatus.FAILED, NodeEnd(exit_code=code, reason=reason, message=_short(message))


def _exited(status: Manifest) -> Manifest | None:
    """The end of the container that trains, or of one that had to succeed before it; None while neither ended."""
    ends = []
    for container in status.get("initContainerStatuses") or []:
        end = (container.get("state") or {}).get("terminated")
        if end is not None and end.get("exitCode") and status.get("phase") == "Failed":
            ends.append(end)
    containers = status.get("containerStatuses") or []
    trainer = next((c for c in containers if c.get("name") == MAIN), containers[0] if containers else {})
    end = (trainer.get("state") or {}).get("terminated")
    return end if end is not None else next(iter(ends), None)


def _by_deletion(pod: Manifest, exited: Manifest) -> bool:
    """Whether a container of a deleted pod ended because of that; timestamps are whole seconds."""
    if exited.get("reason") == "OOMKilled":
        return False
    metadata = pod["metadata"]
    grace = timedelta(seconds=metadata.get("deletionGracePeriodSeconds") or 0)
    asked, ended = _moment(metadata["deletionTimestamp"]), _moment(exited.get("finishedAt"))
    if asked is None or ended is None:
        return True
    asked -= grace
    return ended > asked or (ended == asked and exited.get("exitCode") in _ENDED_BY_DELETION)


def _moment(text: str | None) -> datetime | None:
    try:
        return datetime.strptime(text or "", "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=UTC)
    except ValueError:
        return None


def _cannot_start(status: Manifest) -> str:
    for condition in status.get("conditions") or []:
        if condition.get("type") == "PodScheduled" and condition.get("status") == "False":
            if condition.get("reason") == "Unschedulable":
                return _short(condition.get("message")) or "no machine has room for it"
            return ""
    for field in ("initContainerStatuses", "containerStatuses"):
        for container in status.get(field) or []:
            waiting = (container.get("state") or {}).get("waiting") or {}
            if waiting.get("reason") in CANNOT_START:
                return _short(": ".join(filter(None, (waiting["reason"], waiting.get("message")))))
    return ""


def _disruption(status: Manifest | None) -> str:
    for condition in (status or {}).get("conditions") or []:
        if condition.get("type") == "DisruptionTarget" and condition.get("status") == "True":
            reason = condition.get("reason") or ""
            return _DISRUPTIONS.get(reason, "Evicted")
    return ""


def _short(message: str | None) -> str:
    """One line of bounded length."""
    line = " ".join((message or "").split())
    return line if len(line) <= LONGEST_MESSAGE else f"{line[: LONGEST_MESSAGE - 1]}…"
