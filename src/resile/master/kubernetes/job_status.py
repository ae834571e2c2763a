"""The job's state as the status of its ElasticJob: pure functions, so that what `kubectl` shows can be tested."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from typing import Any

import msgspec

from resile.api.ids import NodeKey
from resile.api.job import ROLES, node_name
from resile.api.kinds import elasticjob as ej
from resile.api.kinds.labels import PREFIXED_JOB_NAME, PREFIXED_REPLICA_TYPE
from resile.core.nodes import lifecycle
from resile.core.state import JobState, Node, Phase
from resile.kube.conditions import enter
from resile.kube.kinds import Object
from resile.kube.timestamps import stamp
from resile.master.view import shown_phase, view
from resile.protocol.reports import NodeStatus

MAX_NAMED = 3
"""Nodes that a sentence names."""
MANY_CRASHES = 2
"""Failures before the first step that are worth a word: one may be bad luck."""
_NOT_A_WORD = re.compile(r"[^A-Za-z0-9]+")


def status_of(
    state: JobState,
    now: float,
    before: Object,
    generation: int,
    hindrance: Callable[[NodeKey], str] = lambda _: "",
) -> Object:
    """The whole status.

    Args:
        state: the job.
        now: the moment.
        before: the status as it is in the cluster; its history is carried on.
        generation: of the spec that has been acted upon.
        hindrance: what keeps a pending node from starting.
    """
    seen = view(state, now)
    phase = shown_phase(state)
    message = state.message or _trouble(state, hindrance) or _recovery(state, phase)
    inner = before.get("status") or {}
    status = ej.ElasticJobStatus(
        phase=phase,
        reason=state.reason or phase.reason,
        message=message,
        status=ej.JobProgress(
            conditions=_conditions(
                inner.get("conditions") or [], phase, message or f"the job is {phase.value.lower()}", stamp(now)
            ),
            replica_statuses=_replicas(state),
            start_time=stamp(state.started_at) if state.started_at is not None else "",
            completion_time=stamp(state.ended_at) if state.ended_at is not None else "",
            last_reconcile_time=inner.get("lastReconcileTime") or "",
        ),
        scale_plan=next((change.name for change in state.changes if change.uid), ""),
        progress=ej.StepProgress(
            step=seen.step if seen.step >= 0 else None,
            total=seen.total,
            speed=round(seen.speed, 2),
            round=seen.round,
            members=seen.members,
        ),
        goodput=round(seen.goodput, 3),
        restarts=sum((1 if n.relaunch_count else 0) + n.restarts + len(n.crashes) for n in state.nodes.values()),
        last_failure=_last_failure(state),
        observed_generation=generation,
    )
    return msgspec.json.decode(msgspec.json.encode(status), type=Object)  # lists, as in `before`


def difference(before: Object, after: Object) -> Object:
    """The merge patch that makes `after` of `before`; empty if they are the same."""
    patch: Object = {key: None for key in before if key not in after}
    for key, value in after.items():
        old = before.get(key)
        if isinstance(value, dict) and isinstance(old, dict):
            inner = difference(old, value)
            if inner:
                patch[key] = inner
        elif value != old:
            patch[key] = value
    return patch


def _conditions(before: list[Any], phase: ej.Phase, message: str, at: str) -> tuple[ej.Condition, ...]:
    """The history once the job is in `phase`, without entries that only another version of resile can read."""
    known = []
    for entry in before:
        with contextlib.suppress(msgspec.ValidationError):
            known.append(msgspec.to_builtins(msgspec.convert(entry, ej.Condition, strict=False)))
    return msgspec.convert(enter(known, phase.value, phase.reason, message, at), tuple[ej.Condition, ...])


def _replicas(state: JobState) -> dict[str, ej.ReplicaStatus]:
    counts: dict[str, dict[NodeStatus, int]] = {role: {} for role in ROLES if role in state.spec.roles}
    for key, node in state.nodes.items():
        role = counts.setdefault(key.role, {})
        role[node.status] = role.get(node.status, 0) + 1
    return {
        role: ej.ReplicaStatus(
            initial=count.get(NodeStatus.LAUNCHING, 0),
            pending=count.get(NodeStatus.PENDING, 0) + count.get(NodeStatus.STARTING, 0),
            active=count.get(NodeStatus.RUNNING, 0),
            succeeded=count.get(NodeStatus.SUCCEEDED, 0),
            failed=count.get(NodeStatus.FAILED, 0),
            label_selector=f"{PREFIXED_JOB_NAME}={state.spec.name},{PREFIXED_REPLICA_TYPE}={role}",
        )
        for role, count in counts.items()
    }


def _trouble(state: JobState, hindrance: Callable[[NodeKey], str]) -> str:
    """What keeps a job that is not over from having all its nodes, in one sentence; empty if nothing does."""
    waiting = [n for n in state.nodes.values() if n.status is NodeStatus.PENDING and n.alive]
    if not waiting or state.phase.over or state.phase is Phase.SUSPENDED:
        return ""
    first = min(waiting, key=lambda node: node.key)
    others = f" (and {len(waiting) - 1} more)" if len(waiting) > 1 else ""
    why = hindrance(first.key)
    return f"{first.key}{others} cannot start now" + (f": {why}" if why else "")


def _recovery(state: JobState, phase: ej.Phase) -> str:
    """What a job that does not train as it should is waiting for."""
    if phase is ej.Phase.RESTARTING and state.progress.outages:
        return state.progress.outages[-1].because
    if phase is ej.Phase.RUNNING and state.progress.step < 0:
        return _crashing(state)
    if phase is ej.Phase.SCALING:
        coming = sorted(str(key) for change in state.changes for key in change.coming)
        going = sorted(str(key) for change in state.changes for key in change.going)
        return "; ".join([*_some("to come", coming), *_some("to leave", going)])
    return ""


def _crashing(state: JobState) -> str:
    """That processes end badly again and again before their first step, and how; empty if they do not."""
    times = sum(len(node.crashes) for node in state.nodes.values())
    first = state.training.failures.first
    if times < MANY_CRASHES or first is None:
        return ""
    key, failure = first
    return f"{times} failures and no step so far; the last on {key}: {failure}"


def _some(what: str, names: list[str]) -> list[str]:
    if not names:
        return []
    more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
    return [f"{what}: {', '.join(names[:MAX_NAMED])}{more}"]


def _last_failure(state: JobState) -> ej.LastFailure | None:
    found: list[tuple[float, ej.LastFailure]] = []
    ended = [n for n in state.nodes.values() if _unwanted(n)]
    if ended:
        node = max(ended, key=lambda one: one.ended_at or 0.0)
        found.append((node.ended_at or 0.0, _of_node(state, node)))
    if state.training.failures.first is not None:
        key, failure = state.training.failures.first
        told = ej.LastFailure(
            node=node_name(state.spec, key.role, key.id),
            reason="OOMKilled" if failure.oom else "ProcessFailed",
            message=str(failure),
            time=stamp(failure.at),
            exit_code=128 + failure.signal if failure.signal else failure.exit_code,
        )
        found.append((failure.at, told))
    return max(found, key=lambda pair: pair[0])[1] if found else None


def _unwanted(node: Node) -> bool:
    return node.status in (NodeStatus.FAILED, NodeStatus.DELETED) and not node.leaving


def _of_node(state: JobState, node: Node) -> ej.LastFailure:
    return ej.LastFailure(
        node=node_name(state.spec, node.key.role, node.key.id),
        reason=_NOT_A_WORD.sub("", node.end.reason) or f"Node{node.status}",
        message=f"{node.key} {lifecycle.describe(node.status, node.end)}",
        time=stamp(node.ended_at or 0.0),
        exit_code=node.end.exit_code,
    )
