"""Turns the status of a node's pod into an `Observation`.

A pod on a machine without a connection shows no change. The master notices by the missing heartbeats. Why a
node ended, and what that costs, is decided in `resile.core.nodes` (`failure_causes`, `restart_budget`).
"""

from __future__ import annotations

from resile.api.ids import NodeKey
from resile.kube.kinds import Object
from resile.kube.pod_status import (
    UNSCHEDULABLE,
    Obstacle,
    disruption,
    init_container_end,
    is_ended_by_deletion,
    main_container_end,
    short,
    start_failure,
)
from resile.platform.base import Observation
from resile.protocol.reports import NodeEnd, NodeStatus

_SAYS_NOTHING = ("Error", "Completed")
"""Reasons for the end of a container that say no more than its exit code."""


def observation(node: NodeKey, pod: Object) -> Observation:
    status, end = _judge(pod)
    return Observation(
        node=node,
        status=status,
        end=end,
        host=(pod.get("spec") or {}).get("nodeName") or "",
        address=(pod.get("status") or {}).get("podIP") or "",
    )


def gone(node: NodeKey, pod: Object | None) -> Observation:
    """The observation of a node whose pod no longer exists. Says how `pod` ended, or `DELETED` if it had not ended."""
    if pod is not None:
        last = observation(node, pod)
        if last.status.ended:
            return last
    return Observation(node=node, status=NodeStatus.DELETED, end=NodeEnd(reason=disruption(pod)))


def _judge(pod: Object) -> tuple[NodeStatus, NodeEnd]:
    status = pod.get("status") or {}
    phase = status.get("phase")
    exited = main_container_end(pod) or init_container_end(pod)
    if (pod.get("metadata") or {}).get("deletionTimestamp"):
        if exited is not None and not is_ended_by_deletion(pod, exited):
            return _ended(pod, exited)
        reason = disruption(pod)
        return NodeStatus.DELETED, NodeEnd(reason=reason, message=short(status.get("message")) if reason else "")
    if exited is not None or phase in ("Succeeded", "Failed"):
        return _ended(pod, exited or {})
    if phase == "Pending":
        failure = start_failure(pod)
        if failure is None:
            return NodeStatus.STARTING, NodeEnd()
        if failure.obstacle is Obstacle.SCHEDULING:
            # A pod that a gate holds back, or that the scheduler will try again, is on its way.
            room = failure.reason != UNSCHEDULABLE
            return (NodeStatus.STARTING, NodeEnd()) if room else (NodeStatus.PENDING, NodeEnd(message=failure.message))
        return NodeStatus.PENDING, NodeEnd(message=": ".join(filter(None, (failure.reason, failure.message))))
    return (NodeStatus.RUNNING if phase else NodeStatus.STARTING), NodeEnd()


def _ended(pod: Object, exited: Object) -> tuple[NodeStatus, NodeEnd]:
    status = pod.get("status") or {}
    code = exited.get("exitCode")
    if status.get("phase") == "Succeeded" or (code == 0 and status.get("phase") != "Failed"):
        return NodeStatus.SUCCEEDED, NodeEnd(exit_code=code)
    said = exited.get("reason") or ""
    reason = disruption(pod) or status.get("reason") or ("" if said in _SAYS_NOTHING else said)
    if said == "OOMKilled":
        reason = said
    return NodeStatus.FAILED, NodeEnd(
        exit_code=code, reason=reason, message=short(exited.get("message") or status.get("message"))
    )
