"""Nodes and places: launching, losing, replacing, scaling.

A place is a role and a rank. It is filled by one node at a time; when that node is lost the relaunch policy decides
whether another one, with a new id and the same rank, takes over.
"""

from __future__ import annotations

from resile.api.ids import Bytes, NodeId, NodeKey, Rank
from resile.api.job import CHIEF, EVALUATOR, MAX_REPLICAS, PS
from resile.api.reports import NodeEnd, NodeResources, NodeStatus
from resile.core import endings, ledger, relaunch, rounds
from resile.core.deadlines import Alarm
from resile.core.decisions import DeleteNode, Drop, LaunchNode, Reply
from resile.core.endings import Reason
from resile.core.events import NodeSeen, NodesListed, ScaleWanted, SuspendWanted
from resile.core.relaunch import Cause, GiveUp, Relaunch, Spent
from resile.core.state import TRAINERS, Node, Phase, Underway
from resile.core.turn import Turn


def fill(turn: Turn) -> None:
    """Launch a node for every place that should be filled and is not."""
    state = turn.state
    if state.suspended or state.phase.over:
        return
    done = {(key.role, n.rank) for key, n in state.nodes.items() if n.status is NodeStatus.SUCCEEDED}
    for role, target in state.targets.items():
        for number in range(target):
            place = (role, Rank(number))
            if place not in turn.index.places and place not in state.given_up and place not in done:
                launch(turn, role, Rank(number))


def new_key(turn: Turn, role: str) -> NodeKey:
    """The next node of a role: ids only grow."""
    node_id = turn.state.next_id.get(role, NodeId(0))
    turn.state.next_id[role] = NodeId(node_id + 1)
    return NodeKey(role, node_id)


def launch(
    turn: Turn,
    role: str,
    rank: Rank,
    relaunch_count: int = 0,
    resources: NodeResources | None = None,
    delay: float = 0.0,
) -> None:
    """Fill a place with a new node, which may be held back for a while; nobody waits for it meanwhile."""
    node = Node(
        key=new_key(turn, role),
        rank=rank,
        status=NodeStatus.PENDING if delay else NodeStatus.LAUNCHING,
        launched_at=turn.now,
        relaunch_count=relaunch_count,
        resources=resources or NodeResources(),
        held_until=turn.now + delay if delay else None,
    )
    turn.state.nodes[node.key] = node
    turn.touch(node)
    if node.held_until is None:
        _launch_again(turn, node)
    else:
        turn.deadlines.set(Alarm.LAUNCH, node.held_until, node.key)


def launch_due(turn: Turn, node: Node) -> None:
    """The time of a node that was held back has come."""
    if node.held_until is None or not node.alive:
        return
    node.held_until = None
    node.status = NodeStatus.LAUNCHING
    node.launched_at = turn.now
    turn.touch(node)
    _launch_again(turn, node)


def _launch_again(turn: Turn, node: Node) -> None:
    turn.decide(
        LaunchNode(
            node=node.key,
            rank=node.rank,
            replicas=turn.state.targets.get(node.key.role, 0),
            relaunch_count=node.relaunch_count,
            resources=node.resources,
        )
    )


def seen(turn: Turn, event: NodeSeen) -> None:
    """The platform's word on one node."""
    node = turn.state.nodes.get(event.node)
    if node is None:
        if not event.status.ended:  # nothing in the journal asked for it, so nothing here would ever end it
            turn.decide(DeleteNode(node=event.node, grace=turn.timeouts.regroup_grace, because="no job knows it"))
        return
    if node.status.ended:
        if event.status is NodeStatus.FAILED:
            _explain(turn, node, event.end)
        return
    if event.status.ended:
        ended(turn, node, event.status, event.end)
        return
    if event.status is node.status or node.connected:  # what an agent says itself is newer than the platform's word
        return
    node.host = event.host or node.host
    node.status = event.status
    if event.status is NodeStatus.PENDING:
        watch_pending(turn, node)
        why = f": {event.end.message}" if event.end.message else ""
        turn.note("NodePending", f"{node.key} cannot start now{why}", node.key, warning=True)
    else:
        turn.deadlines.clear(Alarm.PEND, node.key)
    if event.status is NodeStatus.RUNNING:
        turn.note("NodeRunning", f"{node.key} runs", node.key)
        expect_agent(turn, node)
        if turn.state.phase in (Phase.CREATED, Phase.PENDING):
            turn.state.phase = Phase.RUNNING
    turn.touch(node)
    rounds.form(turn)


def watch_pending(turn: Turn, node: Node) -> None:
    """Give a node that cannot start its time."""
    meeting = turn.state.meeting
    wait = turn.timeouts.pend if meeting is None or meeting.pend_timeout is None else meeting.pend_timeout
    turn.deadlines.set(Alarm.PEND, turn.now + wait, node.key)


def expect_agent(turn: Turn, node: Node) -> None:
    """Give a node that runs its time to speak: as long as others would wait for it, since it may be preparing."""
    if node.agent is None and node.key.role in TRAINERS:
        turn.deadlines.set(Alarm.AWAY, turn.now + turn.timeouts.join, node.key)


def miss_agent(turn: Turn, node: Node) -> None:
    """A node runs and its agent has not come: it is lost, unless this job's nodes have no agents at all (so far)."""
    if turn.state.meeting is None:
        expect_agent(turn, node)
    else:
        lose(turn, node, "it runs, but its agent never came")


def listed(turn: Turn, event: NodesListed) -> None:
    """Compare what the journal says with what the platform has, after a restart of the master."""
    there = {one.node for one in event.seen}
    for node in list(turn.state.nodes.values()):
        if node.status.ended or node.key in there or not turn.state.spec.managed:
            continue
        if node.held_until is not None and not node.leaving:
            turn.deadlines.set(Alarm.LAUNCH, node.held_until, node.key)
        elif node.leaving or node.status is not NodeStatus.LAUNCHING:
            ended(turn, node, NodeStatus.DELETED, NodeEnd(message="it was gone when the master came back"))
        else:
            _launch_again(turn, node)
    for one in event.seen:
        seen(turn, one)
        known = turn.state.nodes.get(one.node)
        if known is None or one.status.ended:
            continue
        if known.status.ended:  # the old master counted it as lost, and may have died before it could remove it
            because = describe(known.status, known.end)
            turn.decide(DeleteNode(node=one.node, grace=turn.timeouts.regroup_grace, because=because))
        elif known.leaving:
            turn.decide(DeleteNode(node=one.node, grace=turn.timeouts.exit_grace, because=known.leaving))


def ended(turn: Turn, node: Node, status: NodeStatus, end: NodeEnd) -> None:
    """A node has ended, whoever noticed: free what it held, tell its peers, fill its place."""
    state = turn.state
    node.status, node.end, node.ended_at = status, end, turn.now
    freed = ledger.release_node(state.ledger, node.key)
    turn.touch(node)
    how = describe(status, end, node.leaving)
    unwanted = status is not NodeStatus.SUCCEEDED and not node.leaving
    turn.note(f"Node{status}", f"{node.key} {how}", node.key, warning=unwanted)
    if freed:
        turn.note("ShardsReturned", f"{freed} records that {node.key} held are to do again", node.key)
    if state.phase.over:
        return
    gathering = state.gathering
    if isinstance(gathering, Underway) and node.key in gathering.places and node.key not in gathering.done:
        rounds.stop(turn, f"{node.key} {node.leaving or how}", node.key)
    if status is NodeStatus.SUCCEEDED:
        endings.succeed_if_done(turn)
    elif not node.leaving and not state.suspended:
        _replace(turn, node)
    rounds.form(turn)


def lose(turn: Turn, node: Node, because: str) -> None:
    """A node is out of reach: it counts as failed, and what may be left of it is removed."""
    turn.decide(Drop(node=node.key))
    if turn.state.spec.managed:
        turn.decide(DeleteNode(node=node.key, grace=turn.timeouts.regroup_grace, because=because))
    ended(turn, node, NodeStatus.FAILED, NodeEnd(reason=relaunch.LOST, message=because))


def pend_over(turn: Turn, node: Node) -> None:
    """A node could not start for too long; the job goes on if it can do without."""
    state, meeting = turn.state, turn.state.meeting
    if not node.alive or node.status is not NodeStatus.PENDING:
        return
    startable = sum(1 for key in turn.index.trainers if state.nodes[key].status is not NodeStatus.PENDING)
    enough = startable >= meeting.min_nodes if meeting is not None else False
    if node.key.role in TRAINERS and enough:
        return
    endings.fail(turn, Reason.PENDING_TIMEOUT, f"{node.key} could not start for too long and the job needs it")


def scale(turn: Turn, event: ScaleWanted) -> None:
    """Somebody wants another number of nodes."""
    error = _scale_error(turn, event.role, event.replicas)
    turn.decide(Reply(request=event.request, error=error))
    if error:
        return
    state = turn.state
    before = state.targets[event.role]
    state.targets[event.role] = event.replicas
    state.given_up = {place for place in state.given_up if place[0] != event.role}
    if state.meeting is not None and event.role in TRAINERS:
        wanted = sum(state.targets.get(role, 0) for role in TRAINERS)
        rounds.raise_max(state, wanted)
    turn.note("Scaled", f"{event.role} goes from {before} to {event.replicas} nodes")
    surplus = [n for n in state.nodes.values() if n.key.role == event.role and n.alive and n.rank >= event.replicas]
    for node in surplus:
        send_off(turn, node, "was scaled down")
    fill(turn)
    rounds.form(turn)


def _scale_error(turn: Turn, role: str, replicas: int) -> str:
    state, meeting = turn.state, turn.state.meeting
    if state.phase.over:
        return f"the job is over ({state.phase})"
    if not state.spec.managed:
        return "this job runs on bare machines: start or stop `resile run` on them instead"
    if role not in state.targets:
        return f"the job has no role '{role}'; it has {', '.join(sorted(state.targets))}"
    if replicas < 0:
        return f"replicas must be 0 or more, not {replicas}"
    if replicas > MAX_REPLICAS:
        return f"replicas must be {MAX_REPLICAS} or fewer, not {replicas}"
    wanted = sum(replicas if r == role else n for r, n in state.targets.items() if r in TRAINERS)
    needed = meeting.min_nodes if meeting is not None else 1
    if role in TRAINERS and wanted < needed:
        return f"{wanted} nodes are fewer than the {needed} that the job needs (--nnodes)"
    return ""


def send_off(turn: Turn, node: Node, because: str) -> None:
    """Take a node out of the job on purpose; it costs no budget and is not replaced."""
    node.leaving = because
    turn.touch(node)
    turn.decide(DeleteNode(node=node.key, grace=turn.timeouts.exit_grace, because=because))
    gathering = turn.state.gathering
    if isinstance(gathering, Underway) and node.key in gathering.places and node.key not in gathering.done:
        rounds.stop(turn, f"{node.key} {because}", None)


def suspend(turn: Turn, event: SuspendWanted) -> None:
    """Let go of all nodes, or take them back. Ids, budgets and the ledger stay."""
    state = turn.state
    error = f"the job is over ({state.phase})" if state.phase.over else ""
    if not state.spec.managed:
        error = "this job runs on bare machines: stop `resile run` on them instead"
    turn.decide(Reply(request=event.request, error=error))
    if error or state.suspended == event.on:
        return
    state.suspended = event.on
    if event.on:
        state.phase = Phase.SUSPENDED
        turn.note("JobSuspended", "the job was suspended: its nodes are let go")
        for node in [n for n in state.nodes.values() if n.alive]:
            send_off(turn, node, "was suspended")
        turn.deadlines.clear(Alarm.JOIN)
    else:
        state.phase = Phase.PENDING
        turn.note("JobResumed", "the job was resumed")
        if state.meeting is not None:
            rounds.open_forming(turn)
        fill(turn)


def describe(status: NodeStatus, end: NodeEnd, leaving: str = "") -> str:
    """How a node ended, as the rest of a sentence that begins with its name; `leaving` is why it was sent off."""
    if leaving and status is NodeStatus.DELETED:  # how the signal ended it says nothing
        return f"was deleted: {'it ' if leaving.startswith('was ') else ''}{leaving}"
    if end.reason == relaunch.LOST:
        return f"was lost: {end.message}"
    detail = end.message or (f"exit code {end.exit_code}" if end.exit_code else "")
    verb = {NodeStatus.SUCCEEDED: "finished", NodeStatus.FAILED: "failed", NodeStatus.DELETED: "was deleted"}[status]
    reason = f" ({end.reason})" if end.reason and status is not NodeStatus.SUCCEEDED else ""
    return f"{verb}{reason}" + (f": {detail}" if detail and status is not NodeStatus.SUCCEEDED else "")


def _replace(turn: Turn, node: Node) -> None:
    state, role = turn.state, node.key.role
    if not state.spec.managed:
        if turn.index.trainers:
            return
        if node.end.reason == relaunch.LOST:  # perhaps it is only late: it may come again, as a new node
            turn.deadlines.set(Alarm.JOIN, turn.now + turn.timeouts.homecoming)
        else:
            deserted(turn, node)
        return
    if node.rank >= state.targets.get(role, 0):
        return
    cause = relaunch.cause_of(node.status, node.end)
    state.spent.setdefault((role, node.rank), Spent()).add(cause, state.trained, turn.timeouts.forgive)
    match _verdict(turn, node, cause):
        case Relaunch(memory=more, delay=delay):
            _succeed(turn, node, more, delay)
        case GiveUp(because=why):
            _give_up(turn, node, cause, why)


def _verdict(turn: Turn, node: Node, cause: Cause) -> Relaunch | GiveUp:
    """What the policy says about the newest loss of this place, which has been charged already."""
    declared = turn.state.spec.roles[node.key.role]
    spent = turn.state.spent[node.key.role, node.rank]
    used = spent.count(cause, turn.state.trained, turn.timeouts.forgive) - 1
    memory = node.resources.memory or declared.limits.memory or declared.requests.memory
    if relaunch.hopeless(node.end):
        return GiveUp("it cannot be started")
    lived = (node.ended_at or turn.now) - node.launched_at
    return relaunch.decide(cause, used, declared.crash_budget, memory, lived)


def _succeed(turn: Turn, node: Node, more: Bytes | None, delay: float = 0.0) -> None:
    resources = NodeResources(memory=more or node.resources.memory, cpu=node.resources.cpu)
    launch(turn, node.key.role, node.rank, node.relaunch_count + 1, resources, delay)
    successor = turn.index.places[node.key.role, node.rank]
    also = f" with {_size(more)} of memory" if more else ""
    also += f" in {delay:g} s, as it crashed so soon" if delay else ""
    turn.note("NodeRelaunched", f"{successor} replaces {node.key}{also}", successor)


def _give_up(turn: Turn, node: Node, cause: Cause, why: str) -> None:
    turn.state.given_up.add((node.key.role, node.rank))
    turn.note("NodeGivenUp", f"{node.key} is not replaced: {why}", node.key, warning=True)
    _fail_if_too_few(turn, node, cause, why)


def deserted(turn: Turn, last: Node) -> None:
    """Nobody is left, and nobody launches nodes here."""
    endings.fail(turn, Reason.DESERTED, f"{last.key} was the last node, and it {describe(last.status, last.end)}")


def _explain(turn: Turn, node: Node, end: NodeEnd) -> None:
    """The platform says why a node that fell out of reach had ended: charge it to the budget it belongs to.

    A closed connection is noticed before a container's end is reported, so this is the common way to learn of a
    crash. If the policy would have decided otherwise, the successor that was launched in haste goes.
    """
    state, place = turn.state, (node.key.role, node.rank)
    cause = relaunch.cause_of(NodeStatus.FAILED, end)
    spent = state.spent.get(place)
    if node.end.reason != relaunch.LOST or cause is Cause.INFRASTRUCTURE or spent is None or state.phase.over:
        return
    # Exit codes of signals say nothing here: the core had the node killed when it counted it as lost.
    if cause is Cause.PREEMPTION and end.reason not in relaunch.PREEMPTION_REASONS:
        return
    if not spent.move(Cause.INFRASTRUCTURE, cause):
        return
    node.end = end
    turn.note("NodeExplained", f"{node.key} {describe(node.status, end)}", node.key, warning=True)
    if node.rank >= state.targets.get(node.key.role, 0):
        return
    key = turn.index.places.get(place)
    successor = state.nodes[key] if key is not None else None
    match _verdict(turn, node, cause):
        case GiveUp(because=why):
            if successor is not None:
                send_off(turn, successor, "is not needed: its place is given up")
            _give_up(turn, node, cause, why)
        case Relaunch(memory=more) if more and successor is not None and successor.agent is None:
            send_off(turn, successor, "has too little memory")
            _succeed(turn, node, more)
    rounds.form(turn)


def _fail_if_too_few(turn: Turn, node: Node, cause: Cause, why: str) -> None:
    state, role = turn.state, node.key.role
    message = f"{node.key} {describe(node.status, node.end)}; it is not replaced: {why}"
    if role in (PS, EVALUATOR):
        endings.fail(turn, Reason.PS_ERROR if role == PS else Reason.EVALUATOR_ERROR, message)
        return
    left = sum(state.targets.get(r, 0) for r in TRAINERS) - sum(1 for r, _ in state.given_up if r in TRAINERS)
    needed = state.meeting.min_nodes if state.meeting is not None else left + 1
    if role == CHIEF or left < needed:
        endings.fail(turn, Reason.WORKER_OOM if cause is Cause.OOM else Reason.WORKER_ERROR, message)


def _size(memory: Bytes) -> str:
    return f"{memory / 1024**3:g}Gi"
