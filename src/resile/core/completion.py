"""How a job ends: phases, exit reasons, and what is cleared away."""

from __future__ import annotations

import enum

from resile.core.context import Context
from resile.core.deadlines import Alarm
from resile.core.decisions import DeleteNode, Finish
from resile.core.nodes import scale_operations
from resile.core.state import JobState, Node, Phase
from resile.protocol.master_to_agent import JobOver
from resile.protocol.reports import NodeStatus


class Reason(enum.StrEnum):
    """Why a job ended. If DLRover has a name for a reason, that name is used.

    If nodes of a role make the job fail, the role's `RoleSpec.failure` is the reason. It may be none of these.
    """

    COMPLETED = "Completed"
    WORKER_ERROR = "WorkerError"
    WORKER_OOM = "WorkerOOM"
    RESTARTS_SPENT = "RestartOverLimit"
    RENDEZVOUS_TIMEOUT = "RdzvTimeout"
    PENDING_TIMEOUT = "PendingTimeout"
    NO_NODES_LEFT = "NoNodesLeft"
    STOPPED = "Stopped"


def succeed(ctx: Context, message: str) -> None:
    _finish(ctx, Phase.SUCCEEDED, Reason.COMPLETED, message)


def fail(ctx: Context, reason: str, message: str) -> None:
    _finish(ctx, Phase.FAILED, reason, message)


def job_over(state: JobState) -> JobOver:
    first = state.rendezvous.failures.first if state.phase is Phase.FAILED else None
    return JobOver(
        succeeded=state.phase is Phase.SUCCEEDED,
        reason=state.reason,
        message=state.message,
        failure=first[1] if first else None,
        failed_node=str(first[0]) if first else "",
    )


def remove_leftover(ctx: Context, node: Node) -> None:
    node.leaving = node.leaving or "the job is over"
    ctx.touch(node)
    ctx.decide(DeleteNode(node=node.key, grace=ctx.timeouts.kill_grace, because="the job is over"))


def succeed_if_done(ctx: Context) -> None:
    """End the job as succeeded if all ranks are done. Only the roles that decide the job's end count.

    A rank is done if its node has succeeded, or if the rank was given up. At least one node must have succeeded.
    """
    state, decides = ctx.state, ctx.state.spec.decides_end
    if state.phase.over or not state.spec.managed or state.suspended:
        return
    if any(decides(role) for role, _ in ctx.index.places):
        return
    done = {
        (key.role, node.rank)
        for key, node in state.nodes.items()
        if decides(key.role) and node.status is NodeStatus.SUCCEEDED
    }
    wanted = sum(replicas for role, replicas in state.targets.items() if decides(role))
    if done and len(done | {place for place in state.given_up if decides(place[0])}) >= wanted:
        succeed(ctx, f"all {wanted} training nodes finished" if wanted != 1 else "the training node finished")


def _finish(ctx: Context, phase: Phase, reason: str, message: str) -> None:
    state = ctx.state
    if state.phase.over:
        return
    state.phase, state.reason, state.message, state.ended_at = phase, reason, message, ctx.now
    ctx.deadlines.reset()
    ctx.note(f"Job{phase}", message, warning=phase is Phase.FAILED)
    scale_operations.abandon(ctx, scale_operations.OVER, f"the job is over ({phase})")
    ctx.decide(Finish(message=job_over(state)))
    if not state.spec.managed:
        return
    for key, node in state.nodes.items():
        if node.status.ended:
            continue
        # Trainers whose agents finished exit by themselves, so that their pods stay as Completed. A trainer that does
        # not exit is out of reach and has to be removed.
        if phase is Phase.SUCCEEDED and state.spec.trains(key.role) and node.connected:
            ctx.deadlines.set(Alarm.AWAY, ctx.now + state.spec.exit_grace(key.role), key)
            continue
        node.leaving = "the job is over"
        ctx.touch(node)
        ctx.decide(DeleteNode(node=key, grace=state.spec.exit_grace(key.role), because="the job is over"))
