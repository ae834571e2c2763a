"""What can happen to a job. Every event is plain data, so a journal of them is the job's whole history."""

from __future__ import annotations

import msgspec

from resile.api.ids import NO_ROUND, NodeId, NodeKey, Rank, Round
from resile.protocol.reports import NodeEnd, NodeResources, NodeStatus, RendezvousConfig, ReplicaEndpoint, WorkerFailure


class Event(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """Base of all events; the type's name is the tag in the journal."""


class Started(Event, frozen=True, kw_only=True):
    """The job begins."""


class MasterReturned(Event, frozen=True, kw_only=True):
    """A new master has read the journal: nobody is connected, agents are expected home."""


class NodeSeen(Event, frozen=True, kw_only=True):
    """The platform's word on one node."""

    node: NodeKey
    status: NodeStatus
    end: NodeEnd = NodeEnd()
    host: str = ""


class NodesListed(Event, frozen=True, kw_only=True):
    """All the platform knows, after a restart: what is missing here is missing there."""

    seen: tuple[NodeSeen, ...]


class AgentCame(Event, frozen=True, kw_only=True):
    """An agent said Hello on connection `session`."""

    session: int
    incarnation: str
    address: str
    host: str
    nproc: int
    meeting: RendezvousConfig
    role: str = "worker"
    node_id: NodeId | None = None
    rank: Rank | None = None
    round: Round = Round(0)
    running: bool = False
    finished: bool = False
    elastic: bool = False
    replica_endpoint: ReplicaEndpoint | None = None


class AgentWent(Event, frozen=True, kw_only=True):
    """Connection `session` of this node's agent ended."""

    node: NodeKey
    session: int


class AgentLeaving(Event, frozen=True, kw_only=True):
    """The agent says it leaves for good."""

    node: NodeKey
    because: str


class AgentJoined(Event, frozen=True, kw_only=True):
    """The agent's processes are down, or rest (`elastic`), and it waits for a round newer than `after`."""

    node: NodeKey
    after: Round
    port: int
    nproc: int = 0
    """How many processes it brings; 0: as many as it came with."""
    elastic: bool = False
    holds: Round = Round(0)
    """The newest round whose state one of its processes has."""


class CanRegroup(Event, frozen=True, kw_only=True):
    """The agent's processes can meet in a new round without being restarted."""

    node: NodeKey


class WorkersChanged(Event, frozen=True, kw_only=True):
    """More or fewer processes (`nproc`) of this node can meet than have a place in `round`."""

    node: NodeKey
    round: Round
    nproc: int


class LastStepTaken(Event, frozen=True, kw_only=True):
    """All members of `round` have taken the last step there is; the processes of this node have said so."""

    node: NodeKey
    round: Round


class WorkerStuck(Event, frozen=True, kw_only=True):
    """A process of this node does not leave `round`, and its agent does not know of another that has its state."""

    node: NodeKey
    round: Round


class WorkerFailed(Event, frozen=True, kw_only=True):
    """A training process ended badly; `round` is the newest that its agent knew."""

    node: NodeKey
    round: Round
    failure: WorkerFailure
    member: bool = True
    """It had a place in the round."""
    left: int = 0
    """Processes of the node that live and will meet again."""
    placed: Round = NO_ROUND
    """The round in which an elastic process had its place."""


class NodeFinished(Event, frozen=True, kw_only=True):
    """All training processes of `round` on this node ended well."""

    node: NodeKey
    round: Round


class StepReport(Event, frozen=True, kw_only=True):
    """Training reached `step` of `total` (0 = unknown)."""

    node: NodeKey
    round: Round
    step: int
    total: int = 0


class DatasetOpened(Event, frozen=True, kw_only=True):
    """A worker registers a data set."""

    node: NodeKey
    worker: str
    request: int
    name: str
    size: int
    shard_size: int
    epochs: int = 1
    seed: int | None = None


class ShardWanted(Event, frozen=True, kw_only=True):
    """A worker asks for its next shard."""

    node: NodeKey
    worker: str
    request: int
    dataset: str


class ShardAdvanced(Event, frozen=True, kw_only=True):
    """Of the shard held under `lease`, everything before `upto` is done."""

    node: NodeKey
    worker: str
    request: int
    dataset: str
    lease: int
    upto: int


class WorkerWent(Event, frozen=True, kw_only=True):
    """A training process is gone; what it had taken is free."""

    node: NodeKey
    worker: str


class ScaleWanted(Event, frozen=True, kw_only=True):
    """Somebody wants `role` to have `replicas` nodes."""

    role: str
    replicas: int
    request: int = 0


class RoleWish(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a plan wants of a role; None and nothing leave it as it is."""

    replicas: int | None = None
    resources: NodeResources = NodeResources()
    """Of the nodes that are launched from now on."""


class NodeWish(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A node that a plan wants."""

    role: str
    rank: Rank | None = None
    """The lowest free one unless given."""
    resources: NodeResources = NodeResources()


class Move(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A node that a plan wants to be replaced by one with other resources."""

    node: NodeKey
    resources: NodeResources = NodeResources()


class PlanWanted(Event, frozen=True, kw_only=True):
    """Somebody wants what a ScalePlan says. Repeating it is harmless: a plan is known by its uid."""

    name: str
    uid: str
    roles: dict[str, RoleWish] = {}
    create: tuple[NodeWish, ...] = ()
    remove: tuple[NodeKey, ...] = ()
    migrate: tuple[Move, ...] = ()
    request: int = 0


class PlanDropped(Event, frozen=True, kw_only=True):
    """A ScalePlan was deleted."""

    uid: str


class SuspendWanted(Event, frozen=True, kw_only=True):
    """Somebody wants the job to let go of its nodes (`on`) or to take them back."""

    on: bool
    request: int = 0


class StopWanted(Event, frozen=True, kw_only=True):
    """Somebody wants the job to end."""

    because: str
    request: int = 0


# what only the passing of time brings: made by `Engine.due`, never by the shell -------------------------------------


class AgentSilent(Event, frozen=True, kw_only=True):
    """An open connection was silent for too long."""

    node: NodeKey
    seconds: float


class AgentStayedAway(Event, frozen=True, kw_only=True):
    """A closed connection did not come back in time."""

    node: NodeKey


class SettleOver(Event, frozen=True, kw_only=True):
    """Nobody else came; the round being formed closes with those who wait."""


class JoinOver(Event, frozen=True, kw_only=True):
    """Too few nodes came for too long."""


class LaunchDue(Event, frozen=True, kw_only=True):
    """A node that was held back is to be launched now."""

    node: NodeKey


class PendOver(Event, frozen=True, kw_only=True):
    """This node has been unschedulable for too long."""

    node: NodeKey


class StepsNoted(Event, frozen=True, kw_only=True):
    """How far training is, now and then: what the journal keeps of many step reports, and what budgets count in."""

    trained: float
    step: int
    total: int
    round: Round
    at: float
    """When the newest step was reported."""


AnyEvent = (
    Started
    | MasterReturned
    | NodeSeen
    | NodesListed
    | AgentCame
    | AgentWent
    | AgentLeaving
    | AgentJoined
    | CanRegroup
    | WorkersChanged
    | LastStepTaken
    | WorkerStuck
    | WorkerFailed
    | NodeFinished
    | StepReport
    | DatasetOpened
    | ShardWanted
    | ShardAdvanced
    | WorkerWent
    | ScaleWanted
    | PlanWanted
    | PlanDropped
    | SuspendWanted
    | StopWanted
    | AgentSilent
    | AgentStayedAway
    | SettleOver
    | JoinOver
    | LaunchDue
    | PendOver
    | StepsNoted
)
