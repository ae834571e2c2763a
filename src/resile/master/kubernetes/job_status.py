"""Turns the job's state into the status of its resource, which `kubectl` shows. All functions are pure."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable

from resile.api.ids import NodeKey
from resile.api.job_phase import JobPhase
from resile.api.job_report import FailureReport, JobReport, NodeCounts
from resile.api.kinds import registry
from resile.api.kinds.registry import node_name
from resile.core.state import JobState, Phase
from resile.kube.kinds import Object
from resile.master.job_view import shown_phase, view
from resile.protocol.reports import NodeStatus

MAX_NAMED = 3
MANY_CRASHES = 2
"""After how many failures without a step the status mentions them. One failure may be bad luck."""
_NOT_A_WORD = re.compile(r"[^A-Za-z0-9]+")


def status_of(
    state: JobState,
    now: float,
    before: Object,
    generation: int,
    hindrance: Callable[[NodeKey], str] = lambda _: "",
) -> Object:
    """The new status of the job's resource. Its conditions continue those of the present status `before`.

    `generation` is that of the spec that the master follows. `hindrance` says why a pending node cannot start.
    """
    seen, phase = view(state, now), shown_phase(state)
    report = JobReport(
        phase=phase,
        reason=state.reason or phase.reason,
        message=state.message or _trouble(state, hindrance) or _recovery(state, phase),
        nodes=_counts(state),
        started_at=state.started_at,
        ended_at=state.ended_at,
        plan=next((change.name for change in state.changes if change.uid), ""),
        step=seen.step if seen.step >= 0 else None,
        total=seen.total,
        speed=seen.speed,
        round=seen.round,
        members=seen.members,
        goodput=seen.goodput,
        restarts=sum((1 if n.relaunch_count else 0) + n.restarts + len(n.crashes) for n in state.nodes.values()),
        last_failure=_last_failure(state),
        generation=generation,
    )
    return registry.job_kind(state.spec.kind).write_status(report, state.spec.name, before, now)


def difference(before: Object, after: Object) -> Object:
    """The merge patch from `before` to `after`; empty if they are the same."""
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


def _counts(state: JobState) -> dict[str, NodeCounts]:
    nodes = Counter((node.key.role, node.status) for node in state.nodes.values())
    return {
        role: NodeCounts(
            launching=nodes[role, NodeStatus.LAUNCHING],
            pending=nodes[role, NodeStatus.PENDING] + nodes[role, NodeStatus.STARTING],
            running=nodes[role, NodeStatus.RUNNING],
            succeeded=nodes[role, NodeStatus.SUCCEEDED],
            failed=nodes[role, NodeStatus.FAILED],
        )
        for role in dict.fromkeys([*state.spec.roles, *(role for role, _ in nodes)])
    }


def _trouble(state: JobState, hindrance: Callable[[NodeKey], str]) -> str:
    waiting = [n for n in state.nodes.values() if n.status is NodeStatus.PENDING and n.alive]
    if not waiting or state.phase.over or state.phase is Phase.SUSPENDED:
        return ""
    first = min(waiting, key=lambda node: node.key)
    others = f" (and {len(waiting) - 1} more)" if len(waiting) > 1 else ""
    why = hindrance(first.key)
    return f"{first.key}{others} cannot start now" + (f": {why}" if why else "")


def _recovery(state: JobState, phase: JobPhase) -> str:
    if phase is JobPhase.RESTARTING and state.progress.outages:
        return state.progress.outages[-1].because
    if phase is JobPhase.RUNNING and state.progress.step < 0:
        return _crashing(state)
    if phase is JobPhase.SCALING:
        coming = sorted(str(key) for change in state.changes for key in change.coming)
        going = sorted(str(key) for change in state.changes for key in change.going)
        return "; ".join([*_some("to come", coming), *_some("to leave", going)])
    return ""


def _crashing(state: JobState) -> str:
    times = sum(len(node.crashes) for node in state.nodes.values())
    first = state.rendezvous.failures.first
    if times < MANY_CRASHES or first is None:
        return ""
    key, failure = first
    return f"{times} failures and no step so far; the last on {key}: {failure}"


def _some(what: str, names: list[str]) -> list[str]:
    if not names:
        return []
    more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
    return [f"{what}: {', '.join(names[:MAX_NAMED])}{more}"]


def _last_failure(state: JobState) -> FailureReport | None:
    found: list[FailureReport] = []
    lost = (NodeStatus.FAILED, NodeStatus.DELETED)
    ended = [node for node in state.nodes.values() if node.status in lost and not node.leaving]
    if ended:
        node = max(ended, key=lambda one: one.ended_at or 0.0)
        found.append(
            FailureReport(
                node=node_name(state.spec, node.key.role, node.key.id),
                reason=_NOT_A_WORD.sub("", node.end.reason) or f"Node{node.status}",
                message=f"{node.key} {node.how_it_ended}",
                at=node.ended_at or 0.0,
                exit_code=node.end.exit_code,
            )
        )
    if state.rendezvous.failures.first is not None:
        key, failure = state.rendezvous.failures.first
        found.append(
            FailureReport(
                node=node_name(state.spec, key.role, key.id),
                reason="OOMKilled" if failure.oom else "ProcessFailed",
                message=str(failure),
                at=failure.at,
                exit_code=128 + failure.signal if failure.signal else failure.exit_code,
            )
        )
    return max(found, key=lambda failure: failure.at, default=None)
