"""The life of nodes: launching, losing, replacing and removing them.

A place is a role and a rank, filled by one node at a time. When that node is lost, the relaunch policy decides whether
a new node, with a new id and the same rank, fills the place again.
"""

from __future__ import annotations

from collections.abc import Mapping

from resile.api.ids import Bytes, NodeId, NodeKey, Rank
from resile.api.job import Loss
from resile.api.plan import NodeResources
from resile.core import completion, ledger
from resile.core.completion import Reason
from resile.core.context import Context
from resile.core.deadlines import Alarm
from resile.core.decisions import DeleteNode, Drop, LaunchNode, Reply
from resile.core.events import NodeSeen, NodesListed
from resile.core.nodes import rank_targets, relaunch, resource_limits, scale_operations
from resile.core.nodes.relaunch import Cause, GiveUp, Relaunch, Spent
from resile.core.rendezvous import forming, rounds, running
from resile.core.state import Node, Phase
from resile.protocol.job_changes import Suspend
from resile.protocol.reports import NodeEnd, NodeStatus

FIRST = NodeId(0)


def fill(ctx: Context, given: Mapping[tuple[str, Rank], NodeResources] | None = None) -> None:
    """Launch a node for every place that should be filled and is not; `given` holds the resources of some places."""
    state = ctx.state
    if state.suspended or state.phase.over:
        return
    done = {(key.role, n.rank) for key, n in state.nodes.items() if n.status is NodeStatus.SUCCEEDED}
    for role in state.targets:
        for rank in sorted(rank_targets.wanted(state, role)):
            place = (role, rank)
            if place not in ctx.index.places and place not in state.given_up and place not in done:
                launch(ctx, role, rank, resources=(given or {}).get(place))


def new_key(ctx: Context, role: str) -> NodeKey:
    """The key of a role's next node. Ids only grow."""
    node_id = ctx.state.next_id.get(role, FIRST)
    ctx.state.next_id[role] = NodeId(node_id + 1)
    return NodeKey(role, node_id)


def launch(
    ctx: Context,
    role: str,
    rank: Rank,
    relaunch_count: int = 0,
    resources: NodeResources | None = None,
    delay: float = 0.0,
    replaces: NodeKey | None = None,
) -> Node:
    """Fill a place with a new node. No round waits for it while it is held back.

    Args:
        ctx: the event being handled.
        role: of the place.
        rank: of the place.
        relaunch_count: how many nodes were lost there before.
        resources: of the node; those of the role unless given.
        delay: seconds to hold the node back.
        replaces: the node that fills the place until the new one is ready.
    """
    node = Node(
        key=new_key(ctx, role),
        rank=rank,
        status=NodeStatus.PENDING if delay else NodeStatus.LAUNCHING,
        launched_at=ctx.now,
        relaunch_count=relaunch_count,
        resources=resource_limits.for_role(ctx.state, role) if resources is None else resources,
        held_until=ctx.now + delay if delay else None,
        replaces=replaces,
    )
    ctx.state.nodes[node.key] = node
    ctx.touch(node)
    if node.held_until is None:
        _request_launch(ctx, node)
    else:
        ctx.deadlines.set(Alarm.LAUNCH, node.held_until, node.key)
    return node


def on_launch_due(ctx: Context, node: Node) -> None:
    """Launch a node that was held back."""
    if node.held_until is None or not node.alive:
        return
    node.held_until = None
    node.status = NodeStatus.LAUNCHING
    node.launched_at = ctx.now
    ctx.touch(node)
    _request_launch(ctx, node)


def _request_launch(ctx: Context, node: Node) -> None:
    ctx.decide(
        LaunchNode(
            node=node.key,
            rank=node.rank,
            replicas=ctx.state.targets.get(node.key.role, 0),
            relaunch_count=node.relaunch_count,
            resources=node.resources,
            avoid=_avoided(ctx),
        )
    )


def _avoided(ctx: Context) -> tuple[str, ...]:
    """The machines that get no new nodes now.

    If several machines are silent, and they are half or more of the machines that the job uses, none is avoided. Then
    the master's own network has probably failed, and a job that avoids all its machines finds no room.
    """
    state = ctx.state
    silent = {name for name, until in state.suspects.items() if until > ctx.now}
    if len(silent) > 1:
        used = silent.union(state.nodes[key].machine for key in ctx.index.places.values()) - {""}
        if 2 * len(silent) >= len(used):
            return ()
    return tuple(sorted(silent))


def on_node_seen(ctx: Context, event: NodeSeen) -> None:
    """Take in what the platform reports about one node."""
    node = ctx.state.nodes.get(event.node)
    if node is None:
        if not event.status.ended:  # no event in the journal launched it, so the core would never end it
            ctx.decide(DeleteNode(node=event.node, grace=ctx.timeouts.regroup_grace, because="no job knows it"))
        return
    node.machine = event.host or node.machine
    if node.status.ended:
        if event.status is NodeStatus.FAILED:
            _on_end_explained(ctx, node, event.end)
        elif not event.status.ended and node.agent is None:  # it was deleted before it existed
            _delete_leftovers(ctx, node)
        return
    if event.status.ended:
        on_node_ended(ctx, node, event.status, event.end)
        return
    if event.status is node.status or node.connected:  # an agent's own report is newer than the platform's
        return
    node.host = event.host or node.host
    node.status = event.status
    if event.status is NodeStatus.PENDING:
        watch_pending(ctx, node)
        why = f": {event.end.message}" if event.end.message else ""
        ctx.note("NodePending", f"{node.key} cannot start now{why}", node.key, warning=True)
    else:
        ctx.deadlines.clear(Alarm.PENDING, node.key)
    if event.status is NodeStatus.RUNNING:
        ctx.note("NodeRunning", f"{node.key} runs", node.key)
        expect_agent(ctx, node)
        if ctx.state.phase in (Phase.CREATED, Phase.PENDING):
            ctx.state.phase = Phase.RUNNING
        if (
            not ctx.state.spec.trains(node.key.role) or ctx.state.training.config is None
        ):  # no round will show that it is ready
            complete_migration(ctx, node)
            scale_operations.on_nodes_arrived(ctx, (node.key,))
    ctx.touch(node)
    forming.form(ctx, ctx.state.training)


def complete_migration(ctx: Context, node: Node) -> None:
    """Let a node that was launched by a migration fill its place; other nodes are left alone."""
    if node.replaces is None or not node.alive:
        return
    old = ctx.state.nodes[node.replaces]
    node.replaces = None
    if old.alive:
        remove(ctx, old, f"was relieved by {node.key}")
    scale_operations.on_node_replaced(ctx, old.key, node.key)
    scale_operations.on_node_migrated(ctx, old.key)
    ctx.touch(node)
    ctx.note("NodeMigrated", f"{node.key} takes the place of {old.key}", node.key)


def watch_pending(ctx: Context, node: Node) -> None:
    """Start the time-out of a node that cannot start."""
    config = ctx.state.training.config
    wait = ctx.timeouts.pend if config is None or config.pend_timeout is None else config.pend_timeout
    ctx.deadlines.set(Alarm.PENDING, ctx.now + wait, node.key)


def expect_agent(ctx: Context, node: Node) -> None:
    """Start the time-out for a running node's agent to connect: as long as a round would wait for the node."""
    if node.agent is None and ctx.state.spec.trains(node.key.role):
        ctx.deadlines.set(Alarm.AWAY, ctx.now + ctx.timeouts.join, node.key)


def on_agent_never_connected(ctx: Context, node: Node) -> None:
    """Count a running node without an agent as lost, unless no node of this job has had an agent yet."""
    if ctx.state.training.config is None:
        expect_agent(ctx, node)
    else:
        declare_lost(ctx, node, "it runs, but its agent never came")


def on_nodes_listed(ctx: Context, event: NodesListed) -> None:
    """Compare the journal with what the platform has, after a restart of the master."""
    there = {one.node for one in event.seen}
    for node in list(ctx.state.nodes.values()):
        if node.status.ended or node.key in there or not ctx.state.spec.managed:
            continue
        if node.held_until is not None and not node.leaving:
            ctx.deadlines.set(Alarm.LAUNCH, node.held_until, node.key)
        elif node.leaving or node.status not in (NodeStatus.LAUNCHING, NodeStatus.PENDING):
            on_node_ended(ctx, node, NodeStatus.DELETED, NodeEnd(message="it was gone when the master came back"))
        else:
            _request_launch(ctx, node)  # also if it could not start, since it may never have been created
    for one in event.seen:
        known = ctx.state.nodes.get(one.node)
        if known is not None and known.status.ended and not one.status.ended:
            _delete_leftovers(ctx, known)  # the old master may have died between counting it as lost and deleting it
            continue
        on_node_seen(ctx, one)
        if known is not None and known.leaving and not one.status.ended:
            ctx.decide(DeleteNode(node=one.node, grace=ctx.timeouts.exit_grace, because=known.leaving))


def _delete_leftovers(ctx: Context, node: Node) -> None:
    """Delete what the platform still has of a node that has ended."""
    because = describe(node.status, node.end)
    ctx.decide(DeleteNode(node=node.key, grace=ctx.timeouts.regroup_grace, because=because))


def on_node_ended(ctx: Context, node: Node, status: NodeStatus, end: NodeEnd) -> None:
    """Handle the end of a node: free its shards, end its round, and fill its place if the policy says so."""
    state = ctx.state
    node.status, node.end, node.ended_at = status, end, ctx.now
    freed = ledger.release_node(state.ledger, node.key)
    ctx.touch(node)
    how = describe(status, end, node.leaving)
    unwanted = status is not NodeStatus.SUCCEEDED and not node.leaving
    ctx.note(f"Node{status}", f"{node.key} {how}", node.key, warning=unwanted)
    if freed:
        ctx.note("ShardsReturned", f"{freed} records that {node.key} held are to do again", node.key)
    if state.phase.over:
        return
    rdzv = state.training
    failed = unwanted and relaunch.cause_of(status, end) in relaunch.OWN_FAULTS
    if rdzv.needs(node.key):
        running.stop(ctx, rdzv, f"{node.key} {node.leaving or how}", node.key, failed=failed)
    elif failed and rdzv.forming is not None:
        rounds.on_script_failed(ctx, rdzv, node)
    if rdzv.forming is not None and unwanted and state.spec.trains(node.key.role) and not node.replaces:
        rdzv.forming.lost = True
    if status is NodeStatus.SUCCEEDED:
        cancel_migration(ctx, node)
        completion.succeed_if_done(ctx)
    elif node.leaving or state.suspended:
        pass
    elif node.replaces is not None:
        because = f"{node.key}, which was to take over from {node.replaces}, {how}; {node.replaces} stays"
        scale_operations.fail_waiting_for(ctx, node.key, scale_operations.MIGRATION_FAILED, because)
    else:
        _replace(ctx, node)
    scale_operations.on_node_gone(ctx, node.key)
    forming.form(ctx, ctx.state.training)


def cancel_migration(ctx: Context, node: Node) -> None:
    """Remove the node that was to take over: the old node has finished or has nothing left to train."""
    replacement = scale_operations.replacement_of(ctx, node.key)
    if replacement is not None:
        scale_operations.fail_waiting_for(
            ctx,
            replacement,
            scale_operations.MIGRATION_FAILED,
            f"{node.key} took its last step before {replacement} was ready",
        )
        remove(ctx, ctx.state.nodes[replacement], f"is not needed: {node.key} has taken its last step")


def avoid_machine(ctx: Context, node: Node) -> None:
    """Put no new nodes on this node's machine for a while."""
    suspects = ctx.state.suspects
    if node.machine:
        suspects.pop(node.machine, None)
        suspects[node.machine] = ctx.now + relaunch.SUSPECT_SECONDS
    while len(suspects) > relaunch.MAX_SUSPECTS:
        del suspects[next(iter(suspects))]


def declare_lost(ctx: Context, node: Node, because: str) -> None:
    """Count a node that is out of reach as failed, and delete what may be left of it."""
    ctx.decide(Drop(node=node.key))
    if ctx.state.spec.managed:
        ctx.decide(DeleteNode(node=node.key, grace=ctx.timeouts.regroup_grace, because=because))
    on_node_ended(ctx, node, NodeStatus.FAILED, NodeEnd(reason=relaunch.LOST, message=because))


def on_pending_timeout(ctx: Context, node: Node) -> None:
    """Go on without a node that could not start for too long, or fail the job if it needs the node."""
    state, config = ctx.state, ctx.state.training.config
    if not node.alive or node.status is not NodeStatus.PENDING:
        return
    because = f"{node.key} could not start for too long"
    if node.replaces is not None:
        scale_operations.fail_waiting_for(ctx, node.key, scale_operations.PENDING, f"{because}; {node.replaces} stays")
        remove(ctx, node, "could not start for too long")
        return
    startable = sum(1 for key in ctx.index.trainers if state.nodes[key].status is not NodeStatus.PENDING)
    enough = config is not None and startable >= config.min_nodes
    if state.spec.trains(node.key.role) and enough:
        scale_operations.fail_waiting_for(
            ctx, node.key, scale_operations.PENDING, f"{because}; it will join when there is room"
        )
        return
    completion.fail(ctx, Reason.PENDING_TIMEOUT, f"{because} and the job needs it")


def remove(ctx: Context, node: Node, because: str) -> None:
    """Take a node out of the job on purpose. That costs no budget, and the node is not replaced."""
    node.leaving = because
    ctx.touch(node)
    ctx.decide(DeleteNode(node=node.key, grace=ctx.timeouts.exit_grace, because=because))
    if ctx.state.training.needs(node.key):
        running.stop(ctx, ctx.state.training, f"{node.key} {because}", None)


def on_suspend(ctx: Context, wanted: Suspend, request: int) -> None:
    """Delete all nodes, or launch them again. Ids, budgets and the ledger stay."""
    state = ctx.state
    error = f"the job is over ({state.phase})" if state.phase.over else ""
    if not state.spec.managed:
        error = "this job runs on bare machines: stop `resile run` on them instead"
    ctx.decide(Reply(request=request, error=error))
    if error or state.suspended == wanted.on:
        return
    state.suspended = wanted.on
    if wanted.on:
        state.phase = Phase.SUSPENDED
        scale_operations.abandon(ctx, scale_operations.SUSPENDED, "the job was suspended before it was done")
        ctx.note("JobSuspended", "the job was suspended: its nodes are let go")
        for node in [n for n in state.nodes.values() if n.alive]:
            remove(ctx, node, "was suspended")
        ctx.deadlines.clear(Alarm.JOIN)
    else:
        state.phase = Phase.PENDING
        ctx.note("JobResumed", "the job was resumed")
        if state.training.config is not None:
            forming.start_join_timer(ctx, state.training)
        fill(ctx)


def describe(status: NodeStatus, end: NodeEnd, leaving: str = "") -> str:
    """How a node ended, to follow its name in a sentence. `leaving` is why the core deleted it."""
    if leaving and status is NodeStatus.DELETED:  # its exit code comes from the signal
        return f"was deleted: {'it ' if leaving.startswith('was ') else ''}{leaving}"
    if end.reason == relaunch.LOST:
        return f"was lost: {end.message}"
    detail = end.message or (f"exit code {end.exit_code}" if end.exit_code else "")
    verb = {NodeStatus.SUCCEEDED: "finished", NodeStatus.FAILED: "failed", NodeStatus.DELETED: "was deleted"}[status]
    reason = f" ({end.reason})" if end.reason and status is not NodeStatus.SUCCEEDED else ""
    return f"{verb}{reason}" + (f": {detail}" if detail and status is not NodeStatus.SUCCEEDED else "")


def _replace(ctx: Context, node: Node) -> None:
    state, role = ctx.state, node.key.role
    if not state.spec.managed:
        if ctx.index.trainers:
            return
        if node.end.reason == relaunch.LOST:  # it may only be late, and come again as a new node
            ctx.deadlines.set(Alarm.JOIN, ctx.now + ctx.timeouts.master_recovery)
        else:
            fail_without_nodes(ctx, node)
        return
    replacement = scale_operations.replacement_of(ctx, node.key)
    if replacement is not None:
        complete_migration(ctx, state.nodes[replacement])
        return
    if not rank_targets.is_wanted(state, role, node.rank):
        return
    cause = relaunch.cause_of(node.status, node.end)
    state.spent.setdefault((role, node.rank), Spent()).add(cause, state.trained, ctx.timeouts.budget_window)
    if node.end.exit_code in relaunch.HARDWARE_EXIT_CODES:
        avoid_machine(ctx, node)
    match _verdict(ctx, node, cause):
        case Relaunch(memory=more, delay=delay):
            _relaunch(ctx, node, more, delay)
        case GiveUp(because=why):
            _give_up(ctx, node, cause, why)


def _verdict(ctx: Context, node: Node, cause: Cause) -> Relaunch | GiveUp:
    """What the policy says about the newest loss of this place, which is in `spent` already."""
    declared = ctx.state.spec.roles[node.key.role]
    spent = ctx.state.spent[node.key.role, node.rank]
    used = spent.count(cause, ctx.state.trained, ctx.timeouts.budget_window) - 1
    memory = node.resources.memory or declared.limits.memory or declared.requests.memory
    if relaunch.is_unstartable(node.end):
        return GiveUp("it cannot be started")
    lived = (node.ended_at or ctx.now) - node.launched_at
    most = resource_limits.memory_for(ctx, node.key.role, node.rank) if cause is Cause.OOM else None
    return relaunch.decide(cause, used, declared.crash_budget, memory, lived, most)


def _relaunch(ctx: Context, node: Node, more: Bytes | None, delay: float = 0.0) -> NodeKey:
    resources = NodeResources(memory=more).over(resource_limits.inherited(ctx.state, node.key, node.resources))
    successor = launch(ctx, node.key.role, node.rank, node.relaunch_count + 1, resources, delay).key
    scale_operations.on_node_replaced(ctx, node.key, successor)
    also = f" with {_size(more)} of memory" if more else ""
    also += f" in {delay:g} s, as it crashed so soon" if delay else ""
    ctx.note("NodeRelaunched", f"{successor} replaces {node.key}{also}", successor)
    return successor


def _give_up(ctx: Context, node: Node, cause: Cause, why: str) -> None:
    ctx.state.given_up.add((node.key.role, node.rank))
    ctx.note("NodeGivenUp", f"{node.key} is not replaced: {why}", node.key, warning=True)
    scale_operations.fail_waiting_for(ctx, node.key, scale_operations.GIVEN_UP, f"{node.key} is not replaced: {why}")
    _fail_if_too_few(ctx, node, cause, why)


def fail_without_nodes(ctx: Context, last: Node) -> None:
    """Fail a job on bare machines that has lost its last node: no platform launches another."""
    completion.fail(
        ctx, Reason.NO_NODES_LEFT, f"{last.key} was the last node, and it {describe(last.status, last.end)}"
    )


def _on_end_explained(ctx: Context, node: Node, end: NodeEnd) -> None:
    """Charge a lost node to the right budget once the platform says why it ended.

    A closed connection is noticed before a container's end is reported, so this is the common way to learn of a crash.
    If the policy decides otherwise now, the successor that was launched already is removed.
    """
    state, place = ctx.state, (node.key.role, node.rank)
    cause = relaunch.cause_of(NodeStatus.FAILED, end)
    spent = state.spent.get(place)
    if node.end.reason != relaunch.LOST or cause is Cause.INFRASTRUCTURE or spent is None or state.phase.over:
        return
    # The exit code of a signal explains nothing here: the core had the node killed when it counted it as lost.
    if cause is Cause.PREEMPTION and end.reason not in relaunch.PREEMPTION_REASONS:
        return
    if not spent.move(Cause.INFRASTRUCTURE, cause):
        return
    node.end = end
    ctx.note("NodeExplained", f"{node.key} {describe(node.status, end)}", node.key, warning=True)
    if not rank_targets.is_wanted(state, node.key.role, node.rank):
        return
    key = ctx.index.places.get(place)
    successor = state.nodes[key] if key is not None else None
    match _verdict(ctx, node, cause):
        case GiveUp(because=why):
            if successor is not None:
                remove(ctx, successor, "is not needed: its place is given up")
                scale_operations.fail_waiting_for(
                    ctx, successor.key, scale_operations.GIVEN_UP, f"{node.key} is not replaced: {why}"
                )
            _give_up(ctx, node, cause, why)
        case Relaunch(memory=more) if more and successor is not None and successor.agent is None:
            remove(ctx, successor, "has too little memory")
            scale_operations.on_node_replaced(ctx, successor.key, _relaunch(ctx, node, more))
    forming.form(ctx, ctx.state.training)


def _fail_if_too_few(ctx: Context, node: Node, cause: Cause, why: str) -> None:
    state, declared = ctx.state, ctx.state.spec.roles[node.key.role]
    trains = state.spec.trains
    left = sum(state.targets[role] for role in state.spec.trainers) - sum(trains(role) for role, _ in state.given_up)
    needed = state.training.config.min_nodes if state.training.config is not None else left + 1
    if declared.loss is Loss.FATAL or (declared.trains and left < needed):
        message = f"{node.key} {describe(node.status, node.end)}; it is not replaced: {why}"
        completion.fail(ctx, declared.oom_failure if cause is Cause.OOM else declared.failure, message)


def _size(memory: Bytes) -> str:
    return f"{memory / 1024**3:g}Gi"
