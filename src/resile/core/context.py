"""One event being handled, with the indexes that keep handling cheap."""

from __future__ import annotations

from resile.api.ids import NodeKey, Rank, Round
from resile.api.timeouts import Timeouts
from resile.core.deadlines import Alarm, Deadlines
from resile.core.decisions import AnyDecision, Note, Send
from resile.core.state import Idle, JobState, Node, Resting, Stuck, Waiting
from resile.protocol.master_to_agent import MasterMessage
from resile.protocol.reports import NodeStatus


class Index:
    """Sets of nodes that handlers look up instead of scanning all nodes. Derived from the state; not in the journal."""

    def __init__(self, state: JobState) -> None:
        self.waiting: set[NodeKey] = set()
        self.coming: set[NodeKey] = set()
        """Nodes that can join the next round and have not joined. Nodes that the platform cannot start are left out."""
        self.elastic: set[NodeKey] = set()
        self.resting: set[NodeKey] = set()
        """Connected elastic nodes whose processes have left a round that is over. They will join in a moment."""
        self.inelastic: set[NodeKey] = set()
        """Waiting nodes whose processes have to be started for each round."""
        self.stuck: set[NodeKey] = set()
        """Nodes with a process that does not leave its round, and that may be the last one with the round's state."""
        self.holders: dict[Round, set[NodeKey]] = {}
        """Connected nodes that have the training state, by the newest round whose state they have."""
        self._holds: dict[NodeKey, Round] = {}
        self.places: dict[tuple[str, Rank], NodeKey] = {}
        self.trainers: set[NodeKey] = set()
        self.incarnations: dict[str, NodeKey] = {}
        self.lowest_free: dict[str, int] = {}
        """Where the search for a free rank begins, by role: all lower ranks have a node."""
        self._kinds = (self.waiting, self.coming, self.trainers, self.elastic, self.resting, self.inelastic, self.stuck)
        self._trains = state.spec.trains
        for node in state.nodes.values():
            self.update(node)

    def update(self, node: Node) -> None:
        """Put a node into the sets to which it now belongs, and remove it from all others.

        Handlers do not call this method. They call `Context.touch` after every change of a node, and `touch` calls it.
        """
        key = node.key
        for nodes in self._kinds:
            nodes.discard(key)
        self._note_holder(node)
        if node.agent is not None:
            self.incarnations[node.agent.incarnation] = key
        place = (key.role, node.rank)
        if not node.fills:
            if self.places.get(place) == key:
                del self.places[place]
                self.lowest_free[key.role] = min(self.lowest_free.get(key.role, 0), node.rank)
            return
        self.places[place] = key
        if not self._trains(key.role):
            return
        self.trainers.add(key)
        if node.agent is not None and node.agent.elastic:
            self.elastic.add(key)
            if node.connected and isinstance(node.agent.phase, Resting):
                self.resting.add(key)
            if node.connected and isinstance(node.agent.phase, Stuck):
                self.stuck.add(key)
        if node.agent is not None and isinstance(node.agent.phase, Waiting):
            self.waiting.add(key)
            if not node.agent.elastic:
                self.inelastic.add(key)
        elif node.status is not NodeStatus.PENDING:
            self.coming.add(key)

    def _note_holder(self, node: Node) -> None:
        known = self._holds.pop(node.key, None)
        if known is not None:
            self.holders[known].discard(node.key)
            if not self.holders[known]:
                del self.holders[known]
        if node.agent is not None and node.alive and node.connected and node.agent.holds:
            self._holds[node.key] = node.agent.holds
            self.holders.setdefault(node.agent.holds, set()).add(node.key)


class Context:
    """What the handlers of one event share: the state, the indexes, the time, and the decisions so far."""

    def __init__(self, state: JobState, index: Index, deadlines: Deadlines, now: float) -> None:
        self.state = state
        self.index = index
        self.deadlines = deadlines
        self.now = now
        self.decisions: list[AnyDecision] = []
        self.note_steps = False
        """True if the journal should get a summary of the step reports now."""

    @property
    def timeouts(self) -> Timeouts:
        return self.state.spec.timeouts

    def decide(self, decision: AnyDecision) -> None:
        self.decisions.append(decision)

    def send(self, node: NodeKey, message: MasterMessage) -> None:
        self.decisions.append(Send(to=(node,), message=message))

    def note(self, reason: str, message: str, node: NodeKey | None = None, *, warning: bool = False) -> None:
        self.decisions.append(Note(reason=reason, message=message, node=node, warning=warning))

    def touch(self, node: Node) -> None:
        """Call this after each change of a node. Updates the indexes, and clears the node's alarms if it has ended."""
        self.index.update(node)
        if node.status.ended:
            self.deadlines.forget(node.key)

    def detach(self, node: Node, until: float) -> None:
        """Note that this node's agent lost its connection. The node is lost unless the agent is back before `until`."""
        assert node.agent is not None
        node.agent.connection = 0
        if isinstance(node.agent.phase, Waiting):
            node.agent.phase = Idle()
        self.deadlines.clear(Alarm.SILENCE, node.key)
        self.deadlines.set(Alarm.AWAY, until, node.key)
        self.touch(node)
