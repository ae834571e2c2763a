"""A round that forms: when it closes, with which nodes, and how long it may take.

A round closes the moment every node that can come has come. Nodes that cannot start are not waited for. Nodes on their
way are waited for only as long as their late arrival would cost. If all waiting nodes are elastic, a late arrival costs
only a new round without a restart, so the round waits only for nodes whose processes rest and will join in a moment.
"""

from __future__ import annotations

from itertools import accumulate

import msgspec

from resile.api.ids import NodeKey, Rank, Round
from resile.core import completion
from resile.core.completion import Reason
from resile.core.context import Context
from resile.core.deadlines import Alarm
from resile.core.nodes import scale_operations
from resile.core.rendezvous.replica_partners import partners_of
from resile.core.rendezvous.state import Rendezvous, RoundEnd, RoundRunning
from resile.core.state import Node, Phase, Training, Waiting
from resile.protocol.master_to_agent import RoundFormed
from resile.protocol.reports import NodeStatus, RendezvousConfig, RoundAssignment


def fit(nodes: int, config: RendezvousConfig) -> int:
    """The size of the largest round that `nodes` nodes can form by the rules in `config`; 0 if they are too few."""
    size = min(nodes, config.max_nodes) // config.node_unit * config.node_unit
    return size if size >= config.min_nodes else 0


def raise_max(rdzv: Rendezvous, wanted: int) -> None:
    """Allow rounds of `wanted` nodes, even if the agents were started for fewer."""
    if rdzv.config is not None and rdzv.config.max_nodes < wanted:
        rdzv.config = msgspec.structs.replace(rdzv.config, max_nodes=wanted)


def start_join_timer(ctx: Context, rdzv: Rendezvous) -> None:
    ctx.deadlines.set(Alarm.JOIN, ctx.now + _join_timeout(ctx, rdzv))


def form(ctx: Context, rdzv: Rendezvous, *, newcomer: bool = False) -> None:
    """Close the round that forms if enough nodes wait, and if no more are expected or no more fit in.

    Otherwise the round stays open. If enough nodes wait and `newcomer` is True (a node has just joined), the alarm that
    closes the round is set. If the previous round has finished, the job succeeds instead.
    """
    forming, config, index = rdzv.forming, rdzv.config, ctx.index
    if forming is None or config is None or succeed_if_finished(ctx, rdzv):
        return
    size = _size(ctx, rdzv)
    if not size:
        ctx.deadlines.clear(Alarm.STRAGGLERS)
        return
    unknown_may_come = forming.first and not ctx.state.spec.managed
    expected = index.coming if index.inelastic else index.resting
    if fit(size + config.node_unit, config) == size or not (expected or unknown_may_come):
        _close(ctx, rdzv, size)
    elif newcomer:
        wait: float = ctx.timeouts.straggler_wait
        if forming.first and config.last_call is not None:
            wait = config.last_call
        elif unknown_may_come:
            wait = ctx.timeouts.last_call
        ctx.deadlines.set(Alarm.STRAGGLERS, ctx.now + wait)


def close_if_possible(ctx: Context, rdzv: Rendezvous) -> bool:
    size = _size(ctx, rdzv)
    if size:
        _close(ctx, rdzv, size)
    return bool(size)


def on_join_timeout(ctx: Context, rdzv: Rendezvous) -> None:
    """End the wait for nodes to join. Close the round if enough nodes have come; otherwise fail the job.

    But if members of the previous round took the last step and have not ended, start the same wait again.
    """
    state, config = ctx.state, rdzv.config
    if rdzv.forming is None or state.suspended:
        return
    if config is None:
        completion.fail(ctx, Reason.RENDEZVOUS_TIMEOUT, f"no node came within {_join_timeout(ctx, rdzv):g} s")
        return
    if _awaits_complete_members(ctx, rdzv):
        late = ", ".join(sorted(map(str, ctx.index.waiting)))
        busy = ", ".join(sorted(str(key) for key in rdzv.previous.unfinished if state.nodes[key].alive))
        verb = "waits" if len(ctx.index.waiting) == 1 else "wait"
        also = f"; {late} came later and {verb} for that" if late else ""
        ctx.note("RoundAwaited", f"{busy} took the last step and did not end{also}")
        start_join_timer(ctx, rdzv)
        return
    if close_if_possible(ctx, rdzv):  # enough nodes came at the last moment and waited for more
        return
    pending = [str(n.key) for n in state.nodes.values() if n.alive and n.status is NodeStatus.PENDING]
    also = f"; {', '.join(sorted(pending))} cannot start" if pending else ""
    came, seconds = len(ctx.index.waiting), _join_timeout(ctx, rdzv)
    completion.fail(
        ctx,
        Reason.RENDEZVOUS_TIMEOUT,
        f"{came} of at least {config.min_nodes} nodes came within {seconds:g} s{also}",
    )


def succeed_if_finished(ctx: Context, rdzv: Rendezvous) -> bool:
    """Let the job succeed if the previous round has finished, and return True; otherwise return False.

    The round has finished if at least one member ended well and no unfinished member is alive.
    """
    previous = rdzv.previous
    if not previous.done or any(ctx.state.nodes[key].alive for key in previous.unfinished):
        return False
    succeed(ctx, previous.round, len(previous.members))
    return True


def succeed(ctx: Context, number: Round, size: int) -> None:
    completion.succeed(ctx, f"{f'all {size} nodes' if size > 1 else 'the only node'} of round {number} finished")


def _size(ctx: Context, rdzv: Rendezvous) -> int:
    if rdzv.forming is None or rdzv.config is None or ctx.state.phase.over or ctx.state.suspended:
        return 0
    return 0 if _awaits_complete_members(ctx, rdzv) else fit(len(ctx.index.waiting), rdzv.config)


def _awaits_complete_members(ctx: Context, rdzv: Rendezvous) -> bool:
    """True if no round may form yet, because members of the previous round took the last step and have not ended.

    A round of newcomers alone would train from the start again. If a node that waits has the state of the previous
    round, this cannot happen, and the result is False.
    """
    previous, waiting = rdzv.previous, ctx.index.waiting
    if previous.end is not RoundEnd.COMPLETE:
        return False
    agents = (ctx.state.nodes[key].agent for key in waiting)
    if any(agent is not None and agent.holds >= previous.round for agent in agents):
        return False
    return any(ctx.state.nodes[key].alive for key in previous.unfinished - waiting)


def _close(ctx: Context, rdzv: Rendezvous, size: int) -> None:
    state = ctx.state
    order = state.spec.role_order
    waiting = (state.nodes[key] for key in ctx.index.waiting)
    members = sorted(waiting, key=lambda node: (order(node.key.role), node.rank))[:size]
    number = Round(rdzv.last_round + 1)
    assignments = _assignments(members)
    rdzv.last_round = number
    rdzv.current = RoundRunning(round=number, since=ctx.now, assignments=assignments)
    state.phase = Phase.RUNNING
    for node in members:
        assert node.agent is not None
        node.agent.phase = Training(number)
        ctx.touch(node)
    ctx.deadlines.clear(Alarm.STRAGGLERS)
    ctx.deadlines.clear(Alarm.JOIN)
    scale_operations.on_nodes_arrived(ctx, {*assignments, *ctx.index.waiting})
    left = f"; {len(ctx.index.waiting)} more wait" if ctx.index.waiting else ""
    nodes = "1 node" if size == 1 else f"{size} nodes"
    ctx.note("RoundFormed", f"round {number} runs with {nodes}{left}")
    for key, assignment in assignments.items():
        ctx.send(key, RoundFormed(round=number, assignment=assignment))


def _assignments(members: list[Node]) -> dict[NodeKey, RoundAssignment]:
    agents = [node.agent for node in members if node.agent is not None]
    first = agents[0]
    assert isinstance(first.phase, Waiting)
    counts = [a.phase.nproc if isinstance(a.phase, Waiting) and a.phase.nproc else a.nproc for a in agents]
    first_ranks = [0, *accumulate(counts)]
    world_size = first_ranks.pop()
    partners = partners_of([agent.host for agent in agents])
    return {
        node.key: RoundAssignment(
            group_rank=Rank(group_rank),
            group_world_size=len(members),
            first_rank=first_ranks[group_rank],
            world_size=world_size,
            master_addr=first.address,
            master_port=first.phase.store_port,
            nproc=counts[group_rank],
            partner=agents[partners[group_rank]].replica_endpoint if len(agents) > 1 else None,
        )
        for group_rank, node in enumerate(members)
    }


def _join_timeout(ctx: Context, rdzv: Rendezvous) -> float:
    if rdzv.config is not None and rdzv.config.join_timeout is not None:
        return rdzv.config.join_timeout
    return ctx.timeouts.join
