"""A round that runs, and what ends it.

A round ends the moment a member is lost or enough newcomers wait, and every member is told at once. But a newcomer (a
node or a replaced process) does not end a round of elastic processes that still meet or pass the state on. Otherwise a
stream of newcomers could keep the job from ever taking a step.
"""

from __future__ import annotations

from resile.api.ids import NO_ROUND, NodeKey, Round
from resile.core import progress
from resile.core.context import Context
from resile.core.deadlines import Alarm
from resile.core.decisions import Send
from resile.core.rendezvous import forming
from resile.core.rendezvous.state import PreviousRound, Rendezvous, RoundEnd, RoundForming, RoundRunning
from resile.core.state import Idle, Node, Resting, Training
from resile.protocol.agent_to_master import WorkersChanged
from resile.protocol.master_to_agent import RoundOver


def on_workers_changed(ctx: Context, rdzv: Rendezvous, node: Node, report: WorkersChanged) -> None:
    """Note how many processes a member of the running round has ready, so that the next round uses them.

    If the member has none, the round ends at once. Otherwise `grow` decides when the round ends.
    """
    running = rdzv.running
    if running is None or report.round != running.round or node.agent is None:
        return
    assignment = running.assignments.get(node.key)
    if assignment is None or not node.alive or (running.is_ending and report.nproc):
        return
    if report.nproc:
        running.changed[node.key] = report.nproc
        grow(ctx, rdzv)
        return
    node.agent.phase = Idle()  # no round waits for the process that it lacks
    node.agent.holds = NO_ROUND
    ctx.touch(node)
    stop(ctx, rdzv, f"{node.key} has 0 processes ready, not {assignment.nproc}", None)
    forming.form(ctx, rdzv)


def on_spare_worker_failed(rdzv: Rendezvous, node: Node, left: int) -> None:
    """Note that a process of `node` failed while it waited for the next round. `left` processes of the node live.

    If all of these are in the running round, the node is no reason to form a new one any more.
    """
    running = rdzv.running
    if running is not None and node.key in running.changed:
        if left > running.assignments[node.key].nproc:
            running.changed[node.key] = left
        else:
            del running.changed[node.key]


def on_step_noted(ctx: Context, rdzv: Rendezvous, number: Round) -> None:
    """Note that the journal has a step of round `number`. After the first, `grow` may end the round for newcomers."""
    running = rdzv.running
    if running is not None and running.round == number and not running.stepped:
        running.stepped = True
        grow(ctx, rdzv)


def grow(ctx: Context, rdzv: Rendezvous) -> bool:
    """End the running round if a larger one is possible, or if a member has more or fewer processes ready than before.

    If there are elastic processes, the round ends only after its first step, or `straggler_wait` after its start, and
    not while a member is not connected.
    Returns True if the round has ended or will end soon. Returns False if there is no reason to end it, or if its
    members have taken the last step.
    """
    running = rdzv.running
    if running is None or running.is_ending:  # a newcomer would do the finished work again
        return False
    because = _reason_to_grow(ctx, rdzv, running)
    if not because:
        return False
    soon = running.since + ctx.timeouts.straggler_wait
    if ctx.index.elastic and not running.stepped and ctx.now < soon:
        ctx.deadlines.set(Alarm.STRAGGLERS, soon)
    elif ctx.index.elastic and not all(ctx.state.nodes[key].connected for key in running.assignments):
        ctx.deadlines.set(Alarm.STRAGGLERS, ctx.now + ctx.timeouts.straggler_wait)  # it may have taken the last step
    else:
        stop(ctx, rdzv, because, None)
    return True


def stop(
    ctx: Context,
    rdzv: Rendezvous,
    because: str,
    culprit: NodeKey | None,
    *,
    failed: bool = False,
    symptom: bool = False,
) -> None:
    """End the running round, if one runs, and tell every living member to join again.

    `because` completes the sentence "round 3 is over: …". `culprit` is the node that was lost or that lost a process;
    None if nothing was lost. `failed` means that the culprit's script failed, so members that have finished must join
    again, too. `symptom` means that the culprit only missed a peer: the failure behind that may be reported later.
    """
    state, running = ctx.state, rdzv.running
    if running is None:
        return
    ctx.deadlines.clear(Alarm.STRAGGLERS)
    members = living_members(ctx, running)
    rdzv.previous = PreviousRound(
        round=running.round,
        end=RoundEnd.FAILED if failed else RoundEnd.COMPLETE if running.complete else RoundEnd.INTERRUPTED,
        members=set(running.assignments),
        done=set() if failed else running.done & ctx.index.elastic,
    )
    rdzv.current = RoundForming(lost=culprit is not None)
    for node in (state.nodes[key] for key in members):
        if node.agent is not None and node.agent.elastic and node.agent.phase == Training(running.round):
            node.agent.phase = Resting(running.round)
            ctx.touch(node)
    progress.on_round_over(state.progress, because, str(culprit) if culprit else "", ctx.now, symptom=symptom)
    ctx.note("RoundOver", f"round {running.round} is over: {because}", culprit, warning=culprit is not None)
    over = RoundOver(round=running.round, because=because, elastic=bool(ctx.index.elastic), lost=culprit is not None)
    ctx.decide(Send(to=members, message=over))
    forming.start_join_timer(ctx, rdzv)


def living_members(ctx: Context, running: RoundRunning) -> tuple[NodeKey, ...]:
    """The members of the round that are alive and have an agent."""
    nodes = ctx.state.nodes
    return tuple(key for key in running.assignments if nodes[key].alive and nodes[key].agent is not None)


def _reason_to_grow(ctx: Context, rdzv: Rendezvous, running: RoundRunning) -> str:
    config, waiting, size = rdzv.config, ctx.index.waiting, len(running.assignments)
    if config is not None and waiting and forming.fit(size + len(waiting), config) > size:
        return f"{min(waiting)} is ready to join"
    if running.changed:
        key = min(running.changed)
        return f"{key} has {running.changed[key]} processes ready, not {running.assignments[key].nproc}"
    return ""
