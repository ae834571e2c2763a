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
from resile.api.reports import Meeting, NodeStatus, Place
from resile.core import completion, progress
from resile.core.completion import Reason
from resile.core.context import Turn
from resile.core.deadlines import Alarm
from resile.core.decisions import EndRound, FormRound
from resile.core.events import AgentChanged, AgentJoined, NodeFinished, RoundComplete
from resile.core.nodes import scale_operations
from resile.core.rendezvous import state_holders
from resile.core.rendezvous.replica_ring import ring
from resile.core.state import (
    TRAINERS,
    Done,
    Forming,
    Idle,
    JobState,
    Node,
    Past,
    Phase,
    Resting,
    Stuck,
    Training,
    Underway,
    Waiting,
)


def fit(nodes: int, meeting: Meeting) -> int:
    """How many of so many nodes make a round: at most max, a whole number of units, or 0 if below min."""
    size = min(nodes, meeting.max_nodes) // meeting.node_unit * meeting.node_unit
    return size if size >= meeting.min_nodes else 0


def with_max(meeting: Meeting, max_nodes: int) -> Meeting:
    """The same rules with another maximum."""
    return msgspec.structs.replace(meeting, max_nodes=max_nodes)


def raise_max(state: JobState, wanted: int) -> None:
    """Make room for a wish that goes beyond the maximum the agents were started with."""
    if state.meeting is not None and state.meeting.max_nodes < wanted:
        state.meeting = with_max(state.meeting, wanted)


def join(turn: Turn, node: Node, event: AgentJoined) -> None:
    """A node's processes are down, or rest, and it waits for a round newer than `after`."""
    state, agent = turn.state, node.agent
    if agent is None or not node.alive:
        return
    if isinstance(agent.stance, Training | Resting | Stuck | Done) and event.after < agent.stance.round:
        return  # it asked before it was told that it is a member; it was told since
    gathering = state.gathering
    if isinstance(gathering, Underway) and node.key in gathering.places:
        stop(turn, f"{node.key} left the round", node.key)
    agent.stance = Waiting(event.port, event.nproc)
    agent.elastic, agent.holds = event.elastic, event.holds
    turn.touch(node)
    state_holders.relieve(turn)
    growing = False
    if isinstance(state.gathering, Underway):
        growing = grow(turn)
    else:
        form(turn, newcomer=True)
    if isinstance(state.gathering, Underway) and not growing:
        scale_operations.arrived(turn, (node.key,))


def changed(turn: Turn, node: Node, event: AgentChanged) -> None:
    """A member has other processes than places: a new round will fit it, at once if it has none for its place."""
    gathering = turn.state.gathering
    if not isinstance(gathering, Underway) or event.round != gathering.round or node.agent is None:
        return
    place = gathering.places.get(node.key)
    if place is None or not node.alive or (_ends(gathering) and event.nproc):
        return
    if event.nproc:
        gathering.changed[node.key] = event.nproc
        grow(turn)
        return
    node.agent.stance = Idle()  # nobody waits for the process that it lacks
    node.agent.holds = NO_ROUND
    turn.touch(node)
    stop(turn, f"{node.key} has 0 processes ready, not {place.nproc}", None)
    form(turn)


def unchanged(turn: Turn, node: Node, nproc: int) -> None:
    """A process of this node failed that had no place, and so many can still meet: maybe no more than have one."""
    gathering = turn.state.gathering
    if isinstance(gathering, Underway) and node.key in gathering.changed:
        if nproc > gathering.places[node.key].nproc:
            gathering.changed[node.key] = nproc
        else:
            del gathering.changed[node.key]


def stepped(turn: Turn, number: Round) -> None:
    """A step was taken in a round."""
    gathering = turn.state.gathering
    if isinstance(gathering, Underway) and gathering.round == number and not gathering.stepped:
        gathering.stepped = True
        grow(turn)


def grow(turn: Turn) -> bool:
    """End the running round if a larger one can be had, now or in a moment; whether that is so.

    Elastic processes take a step first, or have had `settle` to take one: some scripts tell of none.
    """
    gathering = turn.state.gathering
    if not isinstance(gathering, Underway):
        return False
    if _ends(gathering):
        return False  # a newcomer would undo that
    because = _larger(turn, gathering)
    if not because:
        return False
    soon = gathering.since + turn.timeouts.settle
    if turn.index.elastic and not gathering.stepped and turn.now < soon:
        turn.deadlines.set(Alarm.SETTLE, soon)
    else:
        stop(turn, because, None)
    return True


def complete(turn: Turn, node: Node, event: RoundComplete) -> None:
    """All members of a round have taken the last step: what they have is not to be done again by a newcomer."""
    gathering, past = turn.state.gathering, turn.state.past
    if isinstance(gathering, Underway) and event.round == gathering.round and node.key in gathering.places:
        gathering.complete = True
    elif event.round == past.round and node.key in past.members and not past.failed:
        past.complete = True


def took_the_last_step(turn: Turn, key: NodeKey) -> bool:
    """Whether a node's processes have nothing left to train, and it has not ended: nobody can take its place."""
    gathering, past = turn.state.gathering, turn.state.past
    if isinstance(gathering, Underway):
        return key in gathering.places and _ends(gathering)
    return past.complete and key in past.members - past.done


def _ends(gathering: Underway) -> bool:
    """Whether a round is about to end well: some members have finished, or all have taken the last step."""
    return bool(gathering.done) or gathering.complete


def _larger(turn: Turn, gathering: Underway) -> str:
    """Who would make the next round larger than this one, as half a sentence; empty if nobody would."""
    meeting, waiting, size = turn.state.meeting, turn.index.waiting, len(gathering.places)
    if meeting is not None and waiting and fit(size + len(waiting), meeting) > size:
        return f"{min(waiting)} is ready to join"
    if gathering.changed:
        key = min(gathering.changed)
        return f"{key} has {gathering.changed[key]} processes ready, not {gathering.places[key].nproc}"
    return ""


def form(turn: Turn, *, newcomer: bool = False) -> None:
    """Close the round being formed if nobody else can come; else see to it that it closes in time."""
    state, index, meeting = turn.state, turn.index, turn.state.meeting
    gathering = state.gathering
    if not isinstance(gathering, Forming) or meeting is None or _succeeded(turn):
        return
    size = _size(turn)
    if not size:
        turn.deadlines.clear(Alarm.SETTLE)
        return
    unknown_may_come = gathering.first and not state.spec.managed
    expected = index.coming if index.rigid else index.near
    if fit(size + meeting.node_unit, meeting) == size or not (expected or unknown_may_come):
        _close(turn, size)
    elif newcomer:
        wait: float = turn.timeouts.settle
        if gathering.first and meeting.last_call is not None:
            wait = meeting.last_call
        elif unknown_may_come:
            wait = turn.timeouts.last_call
        turn.deadlines.set(Alarm.SETTLE, turn.now + wait)


def settle_over(turn: Turn) -> None:
    """Nobody else came in time; or those that wait while a round runs have waited long enough."""
    if isinstance(turn.state.gathering, Underway):
        grow(turn)
        return
    size = _size(turn)
    if size:
        _close(turn, size)


def join_over(turn: Turn) -> None:
    """Too few came for too long."""
    state, meeting = turn.state, turn.state.meeting
    if not isinstance(state.gathering, Forming) or state.suspended:
        return
    if meeting is None:
        completion.fail(turn, Reason.RENDEZVOUS_TIMEOUT, f"no node came within {_join_timeout(turn):g} s")
        return
    if _awaits_the_complete(turn):
        late = ", ".join(sorted(map(str, turn.index.waiting))) or "nobody"
        busy = ", ".join(sorted(str(key) for key in state.past.members - state.past.done if state.nodes[key].alive))
        turn.note("RoundAwaited", f"{busy} took the last step and did not end; {late} came later and waits for that")
        open_forming(turn)
        return
    size = _size(turn)
    if size:  # enough came in the last moment and wait for more; this is when waiting ends
        _close(turn, size)
        return
    pending = [str(n.key) for n in state.nodes.values() if n.alive and n.status is NodeStatus.PENDING]
    also = f"; {', '.join(sorted(pending))} cannot start" if pending else ""
    completion.fail(
        turn,
        Reason.RENDEZVOUS_TIMEOUT,
        f"{len(turn.index.waiting)} of at least {meeting.min_nodes} nodes came within {_join_timeout(turn):g} s{also}",
    )


def open_forming(turn: Turn) -> None:
    """Start the clock for a round that has too few nodes."""
    turn.deadlines.set(Alarm.JOIN, turn.now + _join_timeout(turn))


def stop(turn: Turn, because: str, culprit: NodeKey | None, *, failed: bool = False) -> None:
    """End the running round, if one runs: every member that still lives is told to join again.

    Args:
        turn: of the event.
        because: half a sentence.
        culprit: the node that was lost, or that lost a process.
        failed: its script failed, which is more than a loss: what others have finished is to be done again with it.
    """
    state = turn.state
    gathering = state.gathering
    if not isinstance(gathering, Underway):
        return
    turn.deadlines.clear(Alarm.SETTLE)
    members = tuple(key for key in gathering.places if (node := state.nodes[key]).alive and node.agent is not None)
    done = set() if failed else gathering.done & turn.index.elastic
    state.past = Past(
        round=gathering.round,
        members=set(gathering.places),
        done=done,
        failed=failed,
        complete=gathering.complete and not failed,
    )
    state.gathering = Forming(since=turn.now, lost=culprit is not None)
    for node in (state.nodes[key] for key in members):
        if node.agent is not None and node.agent.elastic and node.agent.stance == Training(gathering.round):
            node.agent.stance = Resting(gathering.round)
            turn.touch(node)
    progress.stopped(state.progress, because, str(culprit) if culprit else "", turn.now)
    turn.note("RoundOver", f"round {gathering.round} is over: {because}", culprit, warning=culprit is not None)
    elastic = bool(turn.index.elastic)
    lost = culprit is not None
    turn.decide(EndRound(round=gathering.round, because=because, nodes=members, elastic=elastic, lost=lost))
    open_forming(turn)


def renamed(turn: Turn, old: NodeKey, new: NodeKey) -> None:
    """A node that counted as lost is back: its processes may still end in the round that its loss ended."""
    members = turn.state.past.members
    if old in members:
        members.remove(old)
        members.add(new)


def failed(turn: Turn, node: Node) -> None:
    """The script of a node failed, after its round was over: if others had ended well there, they come again.

    All of them had taken the last step then, and a node that is merely lost is not needed any more. But a script that
    fails in its last lines (an evaluation, say) is one that failed, and is tried again as any other.
    """
    past = turn.state.past
    if node.key in past.members and node.key not in past.done:
        past.failed, past.complete = True, False
        _bring_back(turn, set(past.done))


def _bring_back(turn: Turn, keys: set[NodeKey]) -> None:
    """Have nodes whose processes ended well take part in the next round."""
    state, past = turn.state, turn.state.past
    past.done -= keys
    here = [state.nodes[key] for key in sorted(keys) if state.nodes[key].alive]
    for node in here:
        if node.agent is not None:
            node.agent.stance = Idle()
            turn.touch(node)
    if here:
        because = "a script failed after the last step"
        turn.decide(EndRound(round=past.round, because=because, nodes=tuple(node.key for node in here), elastic=True))


def finished(turn: Turn, node: Node, event: NodeFinished) -> bool:
    """A member's processes ended well; when all members' have, so has the job. Whether it was news.

    Elastic processes end well when all of their round have taken the last step, and nobody is needed any more. That
    holds even if the round was ended in that very moment, for a newcomer, say, who would find nobody with the state;
    but not if a script failed there.
    """
    gathering, past = turn.state.gathering, turn.state.past
    if node.agent is None:
        return False
    node.agent.holds = NO_ROUND  # its processes are gone
    turn.touch(node)
    if isinstance(gathering, Underway) and event.round == gathering.round and node.key in gathering.places:
        node.agent.stance = Done(event.round)
        gathering.done.add(node.key)
        if len(gathering.done) == len(gathering.places):
            _succeed(turn, gathering.round, len(gathering.places))
        return True
    if event.round == past.round and node.key in past.members and node.agent.elastic:
        if past.failed:
            _bring_back(turn, {node.key})
            return True
        node.agent.stance = Done(event.round)
        turn.touch(node)
        past.done.add(node.key)
        _succeeded(turn)
        return True
    return False


def _succeeded(turn: Turn) -> bool:
    """End the job if the last round's processes have taken the last step, and nobody is left who would say so again."""
    past = turn.state.past
    if not past.done or any(turn.state.nodes[key].alive for key in past.members - past.done):
        return False
    _succeed(turn, past.round, len(past.members))
    return True


def _succeed(turn: Turn, number: Round, size: int) -> None:
    completion.succeed(turn, f"{f'all {size} nodes' if size > 1 else 'the only node'} of round {number} finished")


def _size(turn: Turn) -> int:
    """How large a round could close now; 0 if none can."""
    state, meeting = turn.state, turn.state.meeting
    if not isinstance(state.gathering, Forming) or meeting is None or state.phase.over or state.suspended:
        return 0
    return 0 if _awaits_the_complete(turn) else fit(len(turn.index.waiting), meeting)


def _awaits_the_complete(turn: Turn) -> bool:
    """Whether nodes that took the last step in the last round are still there, and those that wait have no such state.

    A round of newcomers alone would train all over again. It is formed if the others are lost before they have ended.
    """
    state, past = turn.state, turn.state.past
    if not past.complete:
        return False
    waiting = turn.index.waiting
    if any((agent := state.nodes[key].agent) is not None and agent.holds >= past.round for key in waiting):
        return False
    return any(state.nodes[key].alive for key in past.members - past.done - waiting)


def _close(turn: Turn, size: int) -> None:
    state = turn.state
    members = sorted(
        (state.nodes[key] for key in turn.index.waiting), key=lambda n: (TRAINERS.index(n.key.role), n.rank)
    )
    members = members[:size]
    number = Round(state.last_round + 1)
    places = _places(members)
    state.last_round = number
    state.gathering = Underway(round=number, since=turn.now, places=places)
    state.phase = Phase.RUNNING
    for node in members:
        assert node.agent is not None
        node.agent.stance = Training(number)
        turn.touch(node)
    turn.deadlines.clear(Alarm.SETTLE)
    turn.deadlines.clear(Alarm.JOIN)
    scale_operations.arrived(turn, {*places, *turn.index.waiting})
    left = f"; {len(turn.index.waiting)} more wait" if turn.index.waiting else ""
    turn.note("RoundFormed", f"round {number} runs with {_count(size, 'node')}{left}")
    turn.decide(FormRound(round=number, places=places))


def _places(members: list[Node]) -> dict[NodeKey, Place]:
    agents = [node.agent for node in members if node.agent is not None]
    first = agents[0]
    assert isinstance(first.stance, Waiting)
    counts = [a.stance.nproc if isinstance(a.stance, Waiting) and a.stance.nproc else a.nproc for a in agents]
    world = sum(counts)
    places, rank = {}, 0
    partners = ring([agent.host for agent in agents])
    for group_rank, (node, count) in enumerate(zip(members, counts, strict=True)):
        places[node.key] = Place(
            group_rank=Rank(group_rank),
            group_world_size=len(members),
            first_rank=rank,
            world_size=world,
            master_addr=first.address,
            master_port=first.stance.port,
            nproc=count,
            partner=agents[partners[group_rank]].door if len(agents) > 1 else None,
        )
        rank += count
    return places


def _join_timeout(turn: Turn) -> float:
    meeting = turn.state.meeting
    if meeting is not None and meeting.join_timeout is not None:
        return meeting.join_timeout
    return turn.timeouts.join


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
