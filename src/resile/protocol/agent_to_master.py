"""What an agent says to its master.

A `Hello` carries the agent's whole state, so a lost connection loses nothing: the agent says Hello again and repeats
the requests that were not answered. Every message may arrive twice.
"""

from __future__ import annotations

from resile.api.ids import NO_ROUND, NodeId, Rank, Round
from resile.protocol.message import Message
from resile.protocol.reports import RendezvousConfig, ReplicaEndpoint, WorkerFailure
from resile.protocol.shards import ShardMessage


class Hello(Message, frozen=True, kw_only=True):
    """The first message of an agent on every connection, with the agent's whole state."""

    protocol: int
    job: str
    incarnation: str
    """A new random value for every agent process, so that the master can tell a reconnect from a restart."""
    address: str
    """Where this node's rank 0 would listen: an IP address or a name that the other nodes can reach."""
    host: str
    nproc: int
    rendezvous: RendezvousConfig
    role: str
    node_id: NodeId | None = None
    """None on bare machines, where the master numbers the nodes."""
    rank: Rank | None = None
    round: Round = NO_ROUND
    """The round its processes run in, or ran in last."""
    running: bool = False
    finished: bool = False
    """True if all processes of `round` on this node ended well."""
    elastic: bool = False
    """True if its processes can join a new round without being restarted."""
    replica_endpoint: ReplicaEndpoint | None = None


class Heartbeat(Message, frozen=True, kw_only=True):
    """The agent is alive and has nothing else to say."""


class Join(Message, frozen=True, kw_only=True):
    """The node is in no round, and can take part in any round newer than `after`."""

    after: Round
    store_port: int
    """A free port for the round's store, in case this node becomes group rank 0."""
    nproc: int = 0
    """How many processes it brings; 0 means as many as it said in its Hello."""
    elastic: bool = False
    """True if the processes are up and can join at once."""
    holds: Round = NO_ROUND
    """The newest round whose state one of the processes has."""


class CanRegroup(Message, frozen=True, kw_only=True):
    """The node's processes can join a new round without being restarted."""


class WorkersChanged(Message, frozen=True, kw_only=True):
    """This node can train with more or fewer processes than it has in `round`, so a new round is needed."""

    round: Round
    nproc: int
    """How many processes can take part, including those in `round`. With 0 the node joins later."""


class LastStepTaken(Message, frozen=True, kw_only=True):
    """All members of `round` have taken the last step of training. From now on, no joining node ends the round."""

    round: Round


class WorkerStuck(Message, frozen=True, kw_only=True):
    """A process of this node does not leave `round`, although the round is over.

    The master answers with StateHeld as soon as another node has the state. Then the process may be killed.
    """

    round: Round


class WorkerFailed(Message, frozen=True, kw_only=True):
    """A training process ended badly. `round` is the newest round that its agent knew."""

    round: Round
    failure: WorkerFailure
    member: bool = True
    """False for a process that was started before there was a round for it."""
    left: int = 0
    """How many processes of this node live and will join again; 0 if the agent stops all."""
    placed: Round = NO_ROUND
    """The round that an elastic process was in; NO_ROUND if it only waited for one."""


class NodeFinished(Message, frozen=True, kw_only=True):
    """All training processes of `round` on this node ended well."""

    round: Round


class StepReport(Message, frozen=True, kw_only=True):
    """Training has completed `step` steps of `total` (0 = unknown). The newest step was taken in `round`."""

    round: Round
    step: int
    total: int = 0


class ShardsFreed(Message, frozen=True, kw_only=True):
    """The training process `worker` has ended, well or badly. Its unfinished shards may be dealt again."""

    worker: str


class StandbyReport(Message, frozen=True, kw_only=True):
    """How many standbys this node has. It is shown to people; no decision depends on it."""

    ready: int
    memory: int
    """Bytes of memory that the standbys and their template use."""


class Leaving(Message, frozen=True, kw_only=True):
    """This node leaves for good by its own decision, for example after a signal."""

    because: str


AgentMessage = (
    Heartbeat
    | Join
    | CanRegroup
    | WorkersChanged
    | LastStepTaken
    | WorkerStuck
    | WorkerFailed
    | NodeFinished
    | StepReport
    | ShardsFreed
    | StandbyReport
    | Leaving
    | ShardMessage
)
"""Messages of an agent that the master has admitted."""
