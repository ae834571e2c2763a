"""The life of a node from its launch to its end, as the platform and the time-outs report it.

A rank of a role has one node at a time. When that node is lost, `relaunch` decides whether a new node replaces it.
"""

from __future__ import annotations

from resile.core import completion, shard_ledger
from resile.core.completion import Reason
from resile.core.context import Context
from resile.core.deadlines import Alarm
from resile.core.decisions import DeleteNode, Drop, Reply
from resile.core.events import NodeSeen, NodesListed
from resile.core.nodes import failure_causes, launching, migration, relaunch, scale_operations
from resile.core.rendezvous import forming, rounds, running
from resile.core.state import Node, Phase
from resile.protocol.job_changes import Suspend
from resile.protocol.reports import NodeEnd, NodeStatus


def on_node_seen(ctx: Context, event: NodeSeen) -> None:
    node = ctx.state.nodes.get(event.node)
    if node is None:
        if not event.status.ended:  # no event in the journal launched it, so the core would never end it
            ctx.decide(DeleteNode(node=event.node, grace=ctx.timeouts.kill_grace, because="no job knows it"))
        return
    node.machine = event.host or node.machine
    if node.status.ended:
        if event.status is NodeStatus.FAILED:
            relaunch.on_end_explained(ctx, node, event.end)
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
        # No round will show that such a node is ready.
        if not ctx.state.spec.trains(node.key.role) or ctx.state.rendezvous.config is None:
            migration.complete(ctx, node)
            scale_operations.on_nodes_arrived(ctx, (node.key,))
    ctx.touch(node)
    forming.form(ctx, ctx.state.rendezvous)


def watch_pending(ctx: Context, node: Node) -> None:
    config = ctx.state.rendezvous.config
    wait = ctx.timeouts.pend if config is None or config.pend_timeout is None else config.pend_timeout
    ctx.deadlines.set(Alarm.PENDING, ctx.now + wait, node.key)


def expect_agent(ctx: Context, node: Node) -> None:
    if node.agent is None and ctx.state.spec.trains(node.key.role):
        ctx.deadlines.set(Alarm.AWAY, ctx.now + ctx.timeouts.join, node.key)


def on_agent_never_connected(ctx: Context, node: Node) -> None:
    if ctx.state.rendezvous.config is None:  # no agent of this job has connected yet
        expect_agent(ctx, node)
    else:
        declare_lost(ctx, node, "it runs, but its agent never came")


def on_nodes_listed(ctx: Context, event: NodesListed) -> None:
    """Reconcile the nodes that the journal knows with those that the platform has, after a restart of the master."""
    there = {one.node for one in event.seen}
    for node in list(ctx.state.nodes.values()):
        if node.status.ended or node.key in there or not ctx.state.spec.managed:
            continue
        if node.held_until is not None and not node.leaving:
            ctx.deadlines.set(Alarm.LAUNCH, node.held_until, node.key)
        elif node.leaving or node.status not in (NodeStatus.LAUNCHING, NodeStatus.PENDING):
            on_node_ended(ctx, node, NodeStatus.DELETED, NodeEnd(message="it was gone when the master came back"))
        else:
            launching.request_launch(ctx, node)  # also if it could not start, since it may never have been created
    for one in event.seen:
        known = ctx.state.nodes.get(one.node)
        if known is not None and known.status.ended and not one.status.ended:
            _delete_leftovers(ctx, known)  # the old master may have died between counting it as lost and deleting it
            continue
        on_node_seen(ctx, one)
        if known is not None and known.leaving and not one.status.ended:
            ctx.decide(DeleteNode(node=one.node, grace=ctx.state.spec.exit_grace(one.node.role), because=known.leaving))


def _delete_leftovers(ctx: Context, node: Node) -> None:
    ctx.decide(DeleteNode(node=node.key, grace=ctx.timeouts.kill_grace, because=node.how_it_ended))


def on_node_ended(ctx: Context, node: Node, status: NodeStatus, end: NodeEnd) -> None:
    """Handle the end of a node: free its shards, end its round, and let `relaunch` decide whether to replace it."""
    state = ctx.state
    node.status, node.end, node.ended_at = status, end, ctx.now
    freed = shard_ledger.release_node(state.ledger, node.key)
    ctx.touch(node)
    how = node.how_it_ended
    unwanted = status is not NodeStatus.SUCCEEDED and not node.leaving
    ctx.note(f"Node{status}", f"{node.key} {how}", node.key, warning=unwanted)
    if freed:
        ctx.note("ShardsReturned", f"{freed} records that {node.key} held are to do again", node.key)
    if state.phase.over:
        return
    rdzv = state.rendezvous
    failed = unwanted and failure_causes.cause_of(status, end) in failure_causes.OWN_FAULTS
    if rdzv.needs(node.key):
        running.stop(ctx, rdzv, f"{node.key} {node.leaving or how}", node.key, failed=failed)
    elif failed and rdzv.forming is not None:
        rounds.on_script_failed(ctx, rdzv, node)
    if rdzv.forming is not None and unwanted and state.spec.trains(node.key.role) and not node.replaces:
        rdzv.forming.lost = True
    if status is NodeStatus.SUCCEEDED:
        migration.cancel(ctx, node)
        completion.succeed_if_done(ctx)
    elif node.leaving or state.suspended:
        pass
    elif node.replaces is not None:
        because = f"{node.key}, which was to take over from {node.replaces}, {how}; {node.replaces} stays"
        scale_operations.fail_waiting_for(ctx, node.key, scale_operations.MIGRATION_FAILED, because)
    else:
        relaunch.replace(ctx, node)
    scale_operations.on_node_gone(ctx, node.key)
    forming.form(ctx, ctx.state.rendezvous)


def declare_lost(ctx: Context, node: Node, because: str) -> None:
    ctx.decide(Drop(node=node.key))
    if ctx.state.spec.managed:
        ctx.decide(DeleteNode(node=node.key, grace=ctx.timeouts.kill_grace, because=because))
    on_node_ended(ctx, node, NodeStatus.FAILED, NodeEnd(reason=failure_causes.LOST, message=because))


def on_pending_timeout(ctx: Context, node: Node) -> None:
    """Fail the job if it needs a node that could not start for too long. Otherwise go on without the node."""
    state, config = ctx.state, ctx.state.rendezvous.config
    if not node.alive or node.status is not NodeStatus.PENDING:
        return
    because = f"{node.key} could not start for too long"
    if node.replaces is not None:
        scale_operations.fail_waiting_for(ctx, node.key, scale_operations.PENDING, f"{because}; {node.replaces} stays")
        launching.remove(ctx, node, "could not start for too long")
        return
    startable = sum(1 for key in ctx.index.trainers if state.nodes[key].status is not NodeStatus.PENDING)
    enough = config is not None and startable >= config.min_nodes
    if state.spec.trains(node.key.role) and enough:
        scale_operations.fail_waiting_for(
            ctx, node.key, scale_operations.PENDING, f"{because}; it will join when there is room"
        )
        return
    completion.fail(ctx, Reason.PENDING_TIMEOUT, f"{because} and the job needs it")


def on_suspend(ctx: Context, wanted: Suspend, request: int) -> None:
    """Suspend the job and delete its nodes if `wanted.on` is True; else resume it and launch nodes again.

    Node ids, budgets and the ledger do not change. The request is refused if the job is over or runs on bare machines.
    """
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
            launching.remove(ctx, node, "was suspended")
        ctx.deadlines.clear(Alarm.JOIN)
    else:
        state.phase = Phase.PENDING
        ctx.note("JobResumed", "the job was resumed")
        if state.rendezvous.config is not None:
            forming.start_join_timer(ctx, state.rendezvous)
        launching.fill(ctx)
