"""Which nodes have the training state, and whether a stuck process may be the last one that has it.

Elastic processes of one round have the same state, but for a step. An agent whose process stays in a round that is over
cannot know whether that process is the last one with the state, so it asks the master. The master answers as soon as a
connected node has joined with the state of that round or of a newer one. Until then the agent waits for the process,
which costs time but no state.
"""

from __future__ import annotations

from resile.core.context import Context
from resile.core.state import Done, Idle, Node, Resting, Stuck, Training, Waiting
from resile.protocol.agent_to_master import WorkerStuck
from resile.protocol.master_to_agent import StateHeld


def on_worker_stuck(ctx: Context, node: Node, event: WorkerStuck) -> None:
    agent = node.agent
    if agent is None or not node.alive or isinstance(agent.phase, Waiting):
        return
    if isinstance(agent.phase, Training | Resting | Done) and event.round < agent.phase.round:
        return
    agent.phase = Stuck(event.round)
    ctx.touch(node)
    answer_stuck(ctx)


def answer_stuck(ctx: Context) -> None:
    for key in sorted(ctx.index.stuck):
        node = ctx.state.nodes[key]
        assert node.agent is not None
        assert isinstance(node.agent.phase, Stuck)
        round_ = node.agent.phase.round
        if any(newest >= round_ and nodes != {key} for newest, nodes in ctx.index.holders.items()):
            node.agent.phase = Idle()  # its process is as good as lost
            ctx.touch(node)
            ctx.send(key, StateHeld(round=round_))
