"""Handles nodes that join, finish and fail. `forming` and `running` handle what only happens while a round does so."""

from __future__ import annotations

from resile.api.ids import NO_ROUND, NodeKey
from resile.core.context import Context
from resile.core.decisions import Send
from resile.core.nodes import scale_operations
from resile.core.rendezvous import forming, running, state_holders
from resile.core.rendezvous.state import Rendezvous, RoundEnd
from resile.core.state import Done, Idle, Node, Resting, Stuck, Training, Waiting
from resile.protocol.agent_to_master import Join, LastStepTaken, NodeFinished
from resile.protocol.master_to_agent import RoundComplete, RoundOver


def on_join(ctx: Context, rdzv: Rendezvous, node: Node, join: Join) -> None:
    """Let a node wait for a round newer than `join.after`. If possible, form it, or end the running round for it."""
    agent = node.agent
    if agent is None or not node.alive:
        return
    if isinstance(agent.phase, Training | Resting | Stuck | Done) and join.after < agent.phase.round:
        return  # it asked before it learned that it is a member
    if rdzv.running is not None and rdzv.has_member(node.key):
        if rdzv.running.complete:
            running.stop(ctx, rdzv, f"{node.key} took the last step and joins again", None)
        else:
            running.stop(ctx, rdzv, f"{node.key} missed a peer and left the round", node.key, symptom=True)
    agent.phase = Waiting(join.store_port, join.nproc)
    agent.elastic, agent.holds = join.elastic, join.holds
    ctx.touch(node)
    state_holders.answer_stuck(ctx)
    if rdzv.running is None:
        forming.form(ctx, rdzv, newcomer=True)
    elif not running.grow(ctx, rdzv):
        scale_operations.on_nodes_arrived(ctx, (node.key,))


def on_straggler_wait_over(ctx: Context, rdzv: Rendezvous) -> None:
    if not running.grow(ctx, rdzv):
        forming.close_if_possible(ctx, rdzv)


def on_last_step_taken(ctx: Context, rdzv: Rendezvous, node: Node, report: LastStepTaken) -> None:
    """Note that all members of a round took the last step, so that no newcomer does their work again.

    If the round still runs, its members are told that it is complete. If it is over, they know that already, and meet
    in another round. But a process that got no answer in time may still finish in the old round.
    """
    current, previous = rdzv.running, rdzv.previous
    if current is not None and report.round == current.round and node.key in current.assignments:
        to = (node.key,) if current.complete else running.living_members(ctx, current)
        current.complete = True
        ctx.decide(Send(to=to, message=RoundComplete(round=current.round)))
    elif report.round == previous.round and node.key in previous.members and previous.end is not RoundEnd.FAILED:
        previous.end = RoundEnd.COMPLETE


def on_node_finished(ctx: Context, rdzv: Rendezvous, node: Node, report: NodeFinished) -> bool:
    """Note that the node's processes ended well in the round of `report`. If all members did so, the job succeeds.

    Returns False if the node is not a member of that round, or if the round is too old to count. For elastic nodes, the
    previous round counts too, because it may have ended a moment ago, for example to let in a newcomer. But if a script
    failed in the previous round, the node is told to join again.
    """
    current, previous = rdzv.running, rdzv.previous
    if node.agent is None:
        return False
    node.agent.holds = NO_ROUND  # its processes are gone
    ctx.touch(node)
    if current is not None and report.round == current.round and node.key in current.assignments:
        node.agent.phase = Done(report.round)
        current.done.add(node.key)
        if len(current.done) == len(current.assignments):
            forming.succeed(ctx, current.round, len(current.assignments))
        return True
    if report.round == previous.round and node.key in previous.members and node.agent.elastic:
        if previous.end is RoundEnd.FAILED:
            _bring_back(ctx, rdzv, {node.key})
            return True
        node.agent.phase = Done(report.round)
        ctx.touch(node)
        previous.done.add(node.key)
        forming.succeed_if_finished(ctx, rdzv)
        return True
    return False


def on_script_failed(ctx: Context, rdzv: Rendezvous, node: Node) -> None:
    """Tell the finished members of the previous round to join again, because the script of its member `node` failed.

    Does nothing if `node` is not an unfinished member of that round. Call this only if the script failed. If a node was
    merely lost after the last step, the job can do without it.
    """
    if node.key in rdzv.previous.unfinished:
        rdzv.previous.end = RoundEnd.FAILED
        _bring_back(ctx, rdzv, set(rdzv.previous.done))


def _bring_back(ctx: Context, rdzv: Rendezvous, keys: set[NodeKey]) -> None:
    rdzv.previous.done -= keys
    nodes = [node for node in (ctx.state.nodes[key] for key in sorted(keys)) if node.alive]
    for node in nodes:
        if node.agent is not None:
            node.agent.phase = Idle()
            ctx.touch(node)
    if nodes:
        over = RoundOver(round=rdzv.previous.round, because="a script failed after the last step", elastic=True)
        ctx.decide(Send(to=tuple(node.key for node in nodes), message=over))
