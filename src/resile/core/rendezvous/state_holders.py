"""Who has the state of a training: whether a process that does not leave its round may be the last one.

Elastic processes of one round have the same state, but for a step. An agent whose process stays in a round that is over
cannot know whether that is the last one that has it. It asks, and is told as soon as a node that is there has joined
with the state of that round or of a newer one. What is not known for certain counts for nothing: the process is waited
for then, which costs time and no state.
"""

from __future__ import annotations

from resile.api.ids import NodeKey, Round
from resile.core.context import Turn
from resile.core.decisions import TellHeld
from resile.core.events import AgentStuck
from resile.core.state import Done, Idle, Node, Resting, Stuck, Training, Waiting


def stuck(turn: Turn, node: Node, event: AgentStuck) -> None:
    """A node has a process that does not leave its round. It is not near any more."""
    agent = node.agent
    if agent is None or not node.alive or isinstance(agent.stance, Waiting):
        return
    if isinstance(agent.stance, Training | Resting | Done) and event.round < agent.stance.round:
        return
    agent.stance = Stuck(event.round)
    turn.touch(node)
    relieve(turn)


def relieve(turn: Turn) -> None:
    """Tell whoever asked, and is not the last that has the state."""
    for key in sorted(turn.index.stuck):
        node = turn.state.nodes[key]
        assert node.agent is not None
        assert isinstance(node.agent.stance, Stuck)
        round_ = node.agent.stance.round
        if _held(turn, round_, but=key):
            node.agent.stance = Idle()  # its process is as good as lost
            turn.touch(node)
            turn.decide(TellHeld(node=key, round=round_))


def _held(turn: Turn, round_: Round, but: NodeKey) -> bool:
    return any(newest >= round_ and nodes != {but} for newest, nodes in turn.index.holders.items())
