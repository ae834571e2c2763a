"""What an agent says to its master.

A `Hello` carries the agent's whole state, so a lost connection loses nothing: the agent says Hello again and repeats
the requests that were not answered. Every message may arrive twice.
"""

from __future__ import annotations

from resile.api.ids import NO_ROUND, NodeId, Rank, Round
from resile.api.kinds.run.names import WORKER
from resile.protocol.message import Message
from resile.protocol.reports import RendezvousConfig, ReplicaEndpoint, WorkerFailure
from resile.protocol.shards import ShardMessage


class Hello(Message, frozen=True, kw_only=True):
    """The first message of an agent on every connection: who it is and all it holds."""

    protocol: int
    job: str
    incarnation: str
    """Made anew by every agent process; tells a returning agent from another process in its place."""
    address: str
    """Where this node's rank 0 would listen: an IP address or a name that the other nodes can reach."""
    host: str
    nproc: int
    rendezvous: RendezvousConfig
    role: str = WORKER
    node_id: NodeId | None = None
    """None on bare machines, where the master numbers the nodes."""
    rank: Rank | None = None
    round: Round = NO_ROUND
    """The round its processes run in, or ran in last."""
    running: bool = False
    finished: bool = False
    """All its processes of `round` ended well."""
    elastic: bool = False
    """Its processes can meet in a new round without being restarted."""
    replica_endpoint: ReplicaEndpoint | None = None
    """Where it takes in copies of another node's checkpoints."""


class Heartbeat(Message, frozen=True, kw_only=True):
    """I am alive and have nothing else to say."""


class Join(Message, frozen=True, kw_only=True):
    """My processes are down, or rest; take me into any round newer than `after`."""

    after: Round
    port: int
    """A free port for the round's store, in case this node becomes group rank 0."""
    nproc: int = 0
    """How many processes it brings; 0: as many as it said in its Hello."""
    elastic: bool = False
    """Those processes are up and can meet at once."""
    holds: Round = NO_ROUND
    """The newest round whose state one of them has."""


class CanRegroup(Message, frozen=True, kw_only=True):
    """My processes can meet in a new round without being restarted."""


class WorkersChanged(Message, frozen=True, kw_only=True):
    """More or fewer processes of this node can meet than have a place in `round`: another round would suit it."""

    round: Round
    nproc: int
    """How many can meet, those that have a place included; 0: it will join when one can."""


class LastStepTaken(Message, frozen=True, kw_only=True):
    """All members of `round` have taken the last step there is; what their scripts do now needs no newcomer."""

    round: Round


class WorkerStuck(Message, frozen=True, kw_only=True):
    """A process does not leave `round`, which is over, and nobody else here has its state: say if another node has."""

    round: Round


class WorkerFailed(Message, frozen=True, kw_only=True):
    """A training process ended badly; `round` is the newest that its agent knew."""

    round: Round
    failure: WorkerFailure
    member: bool = True
    """It had a place in the round; not so a process that was started ahead of its round."""
    left: int = 0
    """Processes of this node that live and will meet again; 0 where all are stopped."""
    placed: Round = NO_ROUND
    """The round in which an elastic process had its place; none if it only waited for one."""


class NodeFinished(Message, frozen=True, kw_only=True):
    """All training processes of `round` on this node ended well."""

    round: Round


class StepReport(Message, frozen=True, kw_only=True):
    """Training reached `step` of `total` (0 = unknown) in `round`."""

    round: Round
    step: int
    total: int = 0
    at: float = 0.0
    """Wall-clock seconds of the newest step."""


class WorkerGone(Message, frozen=True, kw_only=True):
    """The training process `worker` is gone, however it ended; what it had taken is free."""

    worker: str


class StandbyReport(Message, frozen=True, kw_only=True):
    """How many interpreters wait on this node to replace processes; for people, no decision depends on it."""

    ready: int
    memory: int
    """Bytes of all of them, and of the one that makes them."""


class Leaving(Message, frozen=True, kw_only=True):
    """This node leaves for good, by its own will (a signal, a person)."""

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
    | WorkerGone
    | StandbyReport
    | Leaving
    | ShardMessage
)
"""What a master hears from an agent that it has welcomed."""
