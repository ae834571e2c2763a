"""Rendezvous: rounds of agreed membership.

A round closes the moment every node that can come has come; nodes that cannot start now are not waited for, and nodes
that are on their way are waited for only as long as their late arrival would cost. A round ends the moment a
member is lost or enough newcomers wait, and every member is told at once.

Where all that wait are elastic, a late arrival costs next to nothing (a new round, and no process is restarted), so
only those are waited for that rest and will be there in a moment. But no newcomer ends a round of elastic processes
that is still meeting, or passing the state on, be it a node or a process that a node has replaced: so many could come
that no step is ever taken.
"""

from __future__ import annotations

import msgspec

from resile.api.ids import NO_ROUND, NodeKey, Rank, Round
from resile.core import completion, progress
from resile.core.completion import Reason
from resile.core.context import Context
from resile.core.deadlines import Alarm
from resile.core.decisions import Send
from resile.core.nodes import scale_operations
from resile.core.rendezvous import state_holders
from resile.core.rendezvous.replica_ring import ring
from resile.core.state import (
    Done,
    Idle,
    JobState,
    Node,
    Phase,
    PreviousRound,
    Resting,
    RoundForming,
    RoundRunning,
    Stuck,
    Training,
    Waiting,
)
from resile.protocol.agent_to_master import Join, LastStepTaken, NodeFinished, WorkersChanged
from resile.protocol.master_to_agent import RoundFormed, RoundOver
from resile.protocol.reports import NodeStatus, RendezvousConfig, RoundAssignment


def fit(nodes: int, meeting: RendezvousConfig) -> int:
    """How many of so many nodes make a round: at most max, a whole number of units, or 0 if below min."""
    size = min(nodes, meeting.max_nodes) // meeting.node_unit * meeting.node_unit
    return size if size >= meeting.min_nodes else 0


def with_max(meeting: RendezvousConfig, max_nodes: int) -> RendezvousConfig:
    """The same rules with another maximum."""
    return msgspec.structs.replace(meeting, max_nodes=max_nodes)


def raise_max(state: JobState, wanted: int) -> None:
    """Make room for a wish that goes beyond the maximum the agents were started with."""
    if state.meeting is not None and state.meeting.max_nodes < wanted:
        state.meeting = with_max(state.meeting, wanted)


def join(ctx: Context, node: Node, event: Join) -> None:
    """A node's processes are down, or rest, and it waits for a round newer than `after`."""
    state, agent = ctx.state, node.agent
    if agent is None or not node.alive:
        return
    if isinstance(agent.phase, Training | Resting | Stuck | Done) and event.after < agent.phase.round:
        return  # it asked before it was told that it is a member; it was told since
    gathering = state.gathering
    if isinstance(gathering, RoundRunning) and node.key in gathering.places:
        stop(ctx, f"{node.key} left the round", node.key)
    agent.phase = Waiting(event.port, event.nproc)
    agent.elastic, agent.holds = event.elastic, event.holds
    ctx.touch(node)
    state_holders.answer_stuck(ctx)
    growing = False
    if isinstance(state.gathering, RoundRunning):
        growing = grow(ctx)
    else:
        form(ctx, newcomer=True)
    if isinstance(state.gathering, RoundRunning) and not growing:
        scale_operations.arrived(ctx, (node.key,))


def changed(ctx: Context, node: Node, event: WorkersChanged) -> None:
    """A member has other processes than places: a new round will fit it, at once if it has none for its place."""
    gathering = ctx.state.gathering
    if not isinstance(gathering, RoundRunning) or event.round != gathering.round or node.agent is None:
        return
    place = gathering.places.get(node.key)
    if place is None or not node.alive or (_ends(gathering) and event.nproc):
        return
    if event.nproc:
        gathering.changed[node.key] = event.nproc
        grow(ctx)
        return
    node.agent.phase = Idle()  # nobody waits for the process that it lacks
    node.agent.holds = NO_ROUND
    ctx.touch(node)
    stop(ctx, f"{node.key} has 0 processes ready, not {place.nproc}", None)
    form(ctx)


def unchanged(ctx: Context, node: Node, nproc: int) -> None:
    """A process of this node failed that had no place, and so many can still meet: maybe no more than have one."""
    gathering = ctx.state.gathering
    if isinstance(gathering, RoundRunning) and node.key in gathering.changed:
        if nproc > gathering.places[node.key].nproc:
            gathering.changed[node.key] = nproc
        else:
            del gathering.changed[node.key]


def stepped(ctx: Context, number: Round) -> None:
    """A step was taken in a round."""
    gathering = ctx.state.gathering
    if isinstance(gathering, RoundRunning) and gathering.round == number and not gathering.stepped:
        gathering.stepped = True
        grow(ctx)


def grow(ctx: Context) -> bool:
    """End the running round if a larger one can be had, now or in a moment; whether that is so.

    Elastic processes take a step first, or have had `straggler_wait` to take one: some scripts tell of none.
    """
    gathering = ctx.state.gathering
    if not isinstance(gathering, RoundRunning):
        return False
    if _ends(gathering):
        return False  # a newcomer would undo that
    because = _larger(ctx, gathering)
    if not because:
        return False
    soon = gathering.since + ctx.timeouts.straggler_wait
    if ctx.index.elastic and not gathering.stepped and ctx.now < soon:
        ctx.deadlines.set(Alarm.SETTLE, soon)
    else:
        stop(ctx, because, None)
    return True


def complete(ctx: Context, node: Node, event: LastStepTaken) -> None:
    """All members of a round have taken the last step: what they have is not to be done again by a newcomer."""
    gathering, previous_round = ctx.state.gathering, ctx.state.previous_round
    if isinstance(gathering, RoundRunning) and event.round == gathering.round and node.key in gathering.places:
        gathering.complete = True
    elif event.round == previous_round.round and node.key in previous_round.members and not previous_round.failed:
        previous_round.complete = True


def took_the_last_step(ctx: Context, key: NodeKey) -> bool:
    """Whether a node's processes have nothing left to train, and it has not ended: nobody can take its place."""
    gathering, previous_round = ctx.state.gathering, ctx.state.previous_round
    if isinstance(gathering, RoundRunning):
        return key in gathering.places and _ends(gathering)
    return previous_round.complete and key in previous_round.members - previous_round.done


def _ends(gathering: RoundRunning) -> bool:
    """Whether a round is about to end well: some members have finished, or all have taken the last step."""
    return bool(gathering.done) or gathering.complete


def _larger(ctx: Context, gathering: RoundRunning) -> str:
    """Who would make the next round larger than this one, as half a sentence; empty if nobody would."""
    meeting, waiting, size = ctx.state.meeting, ctx.index.waiting, len(gathering.places)
    if meeting is not None and waiting and fit(size + len(waiting), meeting) > size:
        return f"{min(waiting)} is ready to join"
    if gathering.changed:
        key = min(gathering.changed)
        return f"{key} has {gathering.changed[key]} processes ready, not {gathering.places[key].nproc}"
    return ""


def form(ctx: Context, *, newcomer: bool = False) -> None:
    """Close the round being formed if nobody else can come; else see to it that it closes in time."""
    state, index, meeting = ctx.state, ctx.index, ctx.state.meeting
    gathering = state.gathering
    if not isinstance(gathering, RoundForming) or meeting is None or _succeeded(ctx):
        return
    size = _size(ctx)
    if not size:
        ctx.deadlines.clear(Alarm.SETTLE)
        return
    unknown_may_come = gathering.first and not state.spec.managed
    expected = index.coming if index.rigid else index.near
    if fit(size + meeting.node_unit, meeting) == size or not (expected or unknown_may_come):
        _close(ctx, size)
    elif newcomer:
        wait: float = ctx.timeouts.straggler_wait
        if gathering.first and meeting.last_call is not None:
            wait = meeting.last_call
        elif unknown_may_come:
            wait = ctx.timeouts.last_call
        ctx.deadlines.set(Alarm.SETTLE, ctx.now + wait)


def settle_over(ctx: Context) -> None:
    """Nobody else came in time; or those that wait while a round runs have waited long enough."""
    if isinstance(ctx.state.gathering, RoundRunning):
        grow(ctx)
        return
    size = _size(ctx)
    if size:
        _close(ctx, size)


def join_over(ctx: Context) -> None:
    """Too few came for too long."""
    state, meeting = ctx.state, ctx.state.meeting
    if not isinstance(state.gathering, RoundForming) or state.suspended:
        return
    if meeting is None:
        completion.fail(ctx, Reason.RENDEZVOUS_TIMEOUT, f"no node came within {_join_timeout(ctx):g} s")
        return
    if _awaits_the_complete(ctx):
        late = ", ".join(sorted(map(str, ctx.index.waiting))) or "nobody"
        busy = ", ".join(
            sorted(
                str(key) for key in state.previous_round.members - state.previous_round.done if state.nodes[key].alive
            )
        )
        ctx.note("RoundAwaited", f"{busy} took the last step and did not end; {late} came later and waits for that")
        open_forming(ctx)
        return
    size = _size(ctx)
    if size:  # enough came in the last moment and wait for more; this is when waiting ends
        _close(ctx, size)
        return
    pending = [str(n.key) for n in state.nodes.values() if n.alive and n.status is NodeStatus.PENDING]
    also = f"; {', '.join(sorted(pending))} cannot start" if pending else ""
    completion.fail(
        ctx,
        Reason.RENDEZVOUS_TIMEOUT,
        f"{len(ctx.index.waiting)} of at least {meeting.min_nodes} nodes came within {_join_timeout(ctx):g} s{also}",
    )


def open_forming(ctx: Context) -> None:
    """Start the clock for a round that has too few nodes."""
    ctx.deadlines.set(Alarm.JOIN, ctx.now + _join_timeout(ctx))


def stop(ctx: Context, because: str, culprit: NodeKey | None, *, failed: bool = False) -> None:
    """End the running round, if one runs: every member that still lives is told to join again.

    Args:
        ctx: of the event.
        because: half a sentence.
        culprit: the node that was lost, or that lost a process.
        failed: its script failed, which is more than a loss: what others have finished is to be done again with it.
    """
    state = ctx.state
    gathering = state.gathering
    if not isinstance(gathering, RoundRunning):
        return
    ctx.deadlines.clear(Alarm.SETTLE)
    members = tuple(key for key in gathering.places if (node := state.nodes[key]).alive and node.agent is not None)
    done = set() if failed else gathering.done & ctx.index.elastic
    state.previous_round = PreviousRound(
        round=gathering.round,
        members=set(gathering.places),
        done=done,
        failed=failed,
        complete=gathering.complete and not failed,
    )
    state.gathering = RoundForming(since=ctx.now, lost=culprit is not None)
    for node in (state.nodes[key] for key in members):
        if node.agent is not None and node.agent.elastic and node.agent.phase == Training(gathering.round):
            node.agent.phase = Resting(gathering.round)
            ctx.touch(node)
    progress.stopped(state.progress, because, str(culprit) if culprit else "", ctx.now)
    ctx.note("RoundOver", f"round {gathering.round} is over: {because}", culprit, warning=culprit is not None)
    over = RoundOver(round=gathering.round, because=because, elastic=bool(ctx.index.elastic), lost=culprit is not None)
    ctx.decide(Send(to=members, message=over))
    open_forming(ctx)


def renamed(ctx: Context, old: NodeKey, new: NodeKey) -> None:
    """A node that counted as lost is back: its processes may still end in the round that its loss ended."""
    members = ctx.state.previous_round.members
    if old in members:
        members.remove(old)
        members.add(new)


def failed(ctx: Context, node: Node) -> None:
    """The script of a node failed, after its round was over: if others had ended well there, they come again.

    All of them had taken the last step then, and a node that is merely lost is not needed any more. But a script that
    fails in its last lines (an evaluation, say) is one that failed, and is tried again as any other.
    """
    previous_round = ctx.state.previous_round
    if node.key in previous_round.members and node.key not in previous_round.done:
        previous_round.failed, previous_round.complete = True, False
        _bring_back(ctx, set(previous_round.done))


def _bring_back(ctx: Context, keys: set[NodeKey]) -> None:
    """Have nodes whose processes ended well take part in the next round."""
    state, previous_round = ctx.state, ctx.state.previous_round
    previous_round.done -= keys
    here = [state.nodes[key] for key in sorted(keys) if state.nodes[key].alive]
    for node in here:
        if node.agent is not None:
            node.agent.phase = Idle()
            ctx.touch(node)
    if here:
        because = "a script failed after the last step"
        over = RoundOver(round=previous_round.round, because=because, elastic=True)
        ctx.decide(Send(to=tuple(node.key for node in here), message=over))


def finished(ctx: Context, node: Node, event: NodeFinished) -> bool:
    """A member's processes ended well; when all members' have, so has the job. Whether it was news.

    Elastic processes end well when all of their round have taken the last step, and nobody is needed any more. That
    holds even if the round was ended in that very moment, for a newcomer, say, who would find nobody with the state;
    but not if a script failed there.
    """
    gathering, previous_round = ctx.state.gathering, ctx.state.previous_round
    if node.agent is None:
        return False
    node.agent.holds = NO_ROUND  # its processes are gone
    ctx.touch(node)
    if isinstance(gathering, RoundRunning) and event.round == gathering.round and node.key in gathering.places:
        node.agent.phase = Done(event.round)
        gathering.done.add(node.key)
        if len(gathering.done) == len(gathering.places):
            _succeed(ctx, gathering.round, len(gathering.places))
        return True
    if event.round == previous_round.round and node.key in previous_round.members and node.agent.elastic:
        if previous_round.failed:
            _bring_back(ctx, {node.key})
            return True
        node.agent.phase = Done(event.round)
        ctx.touch(node)
        previous_round.done.add(node.key)
        _succeeded(ctx)
        return True
    return False


def _succeeded(ctx: Context) -> bool:
    """End the job if the last round's processes have taken the last step, and nobody is left who would say so again."""
    previous_round = ctx.state.previous_round
    if not previous_round.done or any(
        ctx.state.nodes[key].alive for key in previous_round.members - previous_round.done
    ):
        return False
    _succeed(ctx, previous_round.round, len(previous_round.members))
    return True


def _succeed(ctx: Context, number: Round, size: int) -> None:
    completion.succeed(ctx, f"{f'all {size} nodes' if size > 1 else 'the only node'} of round {number} finished")


def _size(ctx: Context) -> int:
    """How large a round could close now; 0 if none can."""
    state, meeting = ctx.state, ctx.state.meeting
    if not isinstance(state.gathering, RoundForming) or meeting is None or state.phase.over or state.suspended:
        return 0
    return 0 if _awaits_the_complete(ctx) else fit(len(ctx.index.waiting), meeting)


def _awaits_the_complete(ctx: Context) -> bool:
    """Whether nodes that took the last step in the last round are still there, and those that wait have no such state.

    A round of newcomers alone would train all over again. It is formed if the others are lost before they have ended.
    """
    state, previous_round = ctx.state, ctx.state.previous_round
    if not previous_round.complete:
        return False
    waiting = ctx.index.waiting
    if any((agent := state.nodes[key].agent) is not None and agent.holds >= previous_round.round for key in waiting):
        return False
    return any(state.nodes[key].alive for key in previous_round.members - previous_round.done - waiting)


def _close(ctx: Context, size: int) -> None:
    state = ctx.state
    order = state.spec.role_order
    waiting = (state.nodes[key] for key in ctx.index.waiting)
    members = sorted(waiting, key=lambda node: (order(node.key.role), node.rank))[:size]
    number = Round(state.last_round + 1)
    places = _places(members)
    state.last_round = number
    state.gathering = RoundRunning(round=number, since=ctx.now, places=places)
    state.phase = Phase.RUNNING
    for node in members:
        assert node.agent is not None
        node.agent.phase = Training(number)
        ctx.touch(node)
    ctx.deadlines.clear(Alarm.SETTLE)
    ctx.deadlines.clear(Alarm.JOIN)
    scale_operations.arrived(ctx, {*places, *ctx.index.waiting})
    left = f"; {len(ctx.index.waiting)} more wait" if ctx.index.waiting else ""
    ctx.note("RoundFormed", f"round {number} runs with {_count(size, 'node')}{left}")
    for key, assignment in places.items():
        ctx.send(key, RoundFormed(round=number, assignment=assignment))


def _places(members: list[Node]) -> dict[NodeKey, RoundAssignment]:
    agents = [node.agent for node in members if node.agent is not None]
    first = agents[0]
    assert isinstance(first.phase, Waiting)
    counts = [a.phase.nproc if isinstance(a.phase, Waiting) and a.phase.nproc else a.nproc for a in agents]
    world = sum(counts)
    places, rank = {}, 0
    partners = ring([agent.host for agent in agents])
    for group_rank, (node, count) in enumerate(zip(members, counts, strict=True)):
        places[node.key] = RoundAssignment(
            group_rank=Rank(group_rank),
            group_world_size=len(members),
            first_rank=rank,
            world_size=world,
            master_addr=first.address,
            master_port=first.phase.port,
            nproc=count,
            partner=agents[partners[group_rank]].replica_endpoint if len(agents) > 1 else None,
        )
        rank += count
    return places


def _join_timeout(ctx: Context) -> float:
    meeting = ctx.state.meeting
    if meeting is not None and meeting.join_timeout is not None:
        return meeting.join_timeout
    return ctx.timeouts.join


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
