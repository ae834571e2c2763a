"""Reads the status of a pod: why the pod cannot start, and how its containers ended.

Kubernetes has several fields for the same fact and leaves most of them empty.
"""

from __future__ import annotations

import enum

import msgspec

from resile.api.manifests.pod_template import MAIN
from resile.api.timestamps import moment
from resile.kube.errors import one_line
from resile.kube.kinds import Object

LONGEST_MESSAGE = 500
UNSCHEDULABLE = "Unschedulable"

_DISRUPTIONS = {
    "PreemptionByScheduler": "Preempted",
    "PreemptionByKubeScheduler": "Preempted",
    "DeletionByTaintManager": "TaintManagerEviction",
    "EvictionByEvictionAPI": "Evicted",
    "TerminationByKubelet": "Terminated",
}
"""Reasons of the condition `DisruptionTarget` (Kubernetes 1.26 and newer), and their names in older versions."""

_ENDED_BY_DELETION = (0, 137, 143)
"""Exit codes with which a container may end after SIGTERM or SIGKILL."""


class Obstacle(enum.Enum):
    SCHEDULING = "scheduling"
    IMAGE = "image"
    CONTAINER = "container"


_OBSTACLES = {
    "ErrImageNeverPull": Obstacle.IMAGE,
    "ErrImagePull": Obstacle.IMAGE,
    "ImageInspectError": Obstacle.IMAGE,
    "ImagePullBackOff": Obstacle.IMAGE,
    "InvalidImageName": Obstacle.IMAGE,
    "RegistryUnavailable": Obstacle.IMAGE,
    "CrashLoopBackOff": Obstacle.CONTAINER,
    "CreateContainerConfigError": Obstacle.CONTAINER,
    "CreateContainerError": Obstacle.CONTAINER,
    "CreatePodSandboxError": Obstacle.CONTAINER,
    "RunContainerError": Obstacle.CONTAINER,
}
"""Reasons for which a container waits and will not start by itself."""


class StartFailure(msgspec.Struct, frozen=True):
    obstacle: Obstacle
    message: str
    """The explanation that Kubernetes gives, on one line."""
    reason: str = ""
    """Why the container waits, or why the pod has no machine (`Unschedulable`, `SchedulingGated`, `SchedulerError`)."""
    container: str = ""
    image: str = ""


def start_failure(pod: Object) -> StartFailure | None:
    """Why a pod that has not started cannot start; None if no obstacle is known."""
    status = pod.get("status") or {}
    for condition in status.get("conditions") or ():
        if condition.get("type") == "PodScheduled" and condition.get("status") == "False":
            reason = condition.get("reason") or ""
            said = short(condition.get("message")) or ("no machine has room for it" if reason == UNSCHEDULABLE else "")
            return StartFailure(Obstacle.SCHEDULING, said, reason)
    for field in ("initContainerStatuses", "containerStatuses"):
        for container in status.get(field) or ():
            waiting = (container.get("state") or {}).get("waiting") or {}
            reason = waiting.get("reason") or ""
            if reason in _OBSTACLES:
                return StartFailure(
                    _OBSTACLES[reason],
                    short(waiting.get("message")),
                    reason,
                    str(container.get("name") or ""),
                    str(container.get("image") or ""),
                )
    return None


def main_container_end(pod: Object, main: str = "") -> Object | None:
    """The `terminated` state of one container of a pod; None if the container has not ended or does not exist.

    `main` is the name of the container. If it is empty, the container is the one named "main", or else the first.
    """
    containers = (pod.get("status") or {}).get("containerStatuses") or [{}]
    otherwise = {} if main else containers[0]
    found = next((container for container in containers if container.get("name") == (main or MAIN)), otherwise)
    return (found.get("state") or {}).get("terminated")


def init_container_end(pod: Object) -> Object | None:
    """The `terminated` state of the init container that made the pod fail; None if no init container did."""
    status = pod.get("status") or {}
    for container in status.get("initContainerStatuses") or ():
        end: Object | None = (container.get("state") or {}).get("terminated")
        if end is not None and end.get("exitCode") and status.get("phase") == "Failed":
            return end
    return None


def is_ended_by_deletion(pod: Object, end: Object) -> bool:
    """True if a container of a deleted pod ended because of the deletion, and not by itself. `end` says how it ended.

    If it ended after the request to delete the pod, the deletion counts as the cause. If it ended in the same second as
    the request, the exit code decides. If it ran out of memory, it ended by itself.
    """
    if end.get("reason") == "OOMKilled":
        return False
    metadata = pod["metadata"]
    deadline, ended = moment(metadata["deletionTimestamp"]), moment(end.get("finishedAt"))
    if deadline is None or ended is None:
        return True
    asked = deadline - (metadata.get("deletionGracePeriodSeconds") or 0)
    return ended > asked or (ended == asked and end.get("exitCode") in _ENDED_BY_DELETION)


def disruption(pod: Object | None) -> str:
    """Why Kubernetes ended a pod (`Preempted`, `Evicted`, …); empty if it did not end the pod."""
    for condition in ((pod or {}).get("status") or {}).get("conditions") or ():
        if condition.get("type") == "DisruptionTarget" and condition.get("status") == "True":
            return _DISRUPTIONS.get(condition.get("reason") or "", "Evicted")
    return ""


def short(message: str | None) -> str:
    return one_line(message or "", LONGEST_MESSAGE)
