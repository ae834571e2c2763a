"""Everything that agents, masters, command lines and training processes say to each other.

All messages are one-way. An agent's `Hello` carries its whole state, so a lost connection loses nothing: the agent says
Hello again and repeats the requests that were not answered. Every message may arrive twice.
"""

from __future__ import annotations

from typing import Any

import msgspec

from resile.api.ids import NO_ROUND, NodeId, NodeKey, Rank, Round
from resile.protocol.reports import RendezvousConfig, ReplicaEndpoint, RoundAssignment, WorkerFailure

PROTOCOL = 4


class Message(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True, forbid_unknown_fields=True):
    """Base of all messages; the type's name is the tag on the wire."""


# agent -> master ---------------------------------------------------------------------------------------------------


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
    meeting: RendezvousConfig
    role: str = "worker"
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


# training process -> agent -> master: the shard ledger ---------------------------------------------------------------


class OpenDataset(Message, frozen=True, kw_only=True):
    """Register a data set; the same words twice change nothing, other words are refused."""

    worker: str
    request: int
    name: str
    size: int
    shard_size: int
    epochs: int = 1
    seed: int | None = None
    """Shuffles the order of shards, the same way for everybody; None keeps them in order."""


class TakeShard(Message, frozen=True, kw_only=True):
    """Ask for the next shard. The answer comes when there is one, or when there will be none."""

    worker: str
    request: int
    dataset: str


class ShardProgress(Message, frozen=True, kw_only=True):
    """Of the shard held under `lease`, everything before `upto` is done."""

    worker: str
    request: int
    dataset: str
    lease: int
    upto: int


# master -> agent ---------------------------------------------------------------------------------------------------


class Welcome(Message, frozen=True, kw_only=True):
    """The master knows this agent."""

    node: NodeKey
    rank: Rank
    heartbeat: float
    heartbeat_timeout: float
    regroup_grace: float
    exit_grace: float
    elastic: bool = False
    """The job's processes meet without restarts: start yours before you join."""


class Refused(Message, frozen=True, kw_only=True):
    """The master will not serve this peer; `because` is one sentence for its user. The connection ends."""

    because: str


class RoundFormed(Message, frozen=True, kw_only=True):
    """Start your processes, or let those that rest meet: this is your place in the round."""

    round: Round
    place: RoundAssignment


class RoundOver(Message, frozen=True, kw_only=True):
    """Stop the processes of `round` and join again: somebody was lost, or somebody waits to come in.

    To an elastic training process its agent says the same words: break off the collectives of `round` and be ready.
    """

    round: Round
    because: str
    elastic: bool = False
    """The job's processes meet without restarts: let yours live, even those that are still starting."""
    lost: bool = False
    """A member was lost, or leaves: what is saved in memory is to reach storage."""


class StateHeld(Message, frozen=True, kw_only=True):
    """Answer to Stuck, now or later: another node has the state of `round`, so who does not leave it may be killed."""

    round: Round


class Leave(Message, frozen=True, kw_only=True):
    """This node is no longer part of the job: stop and exit with `exit_code`."""

    because: str
    exit_code: int


class JobOver(Message, frozen=True, kw_only=True):
    """The job has ended."""

    succeeded: bool
    reason: str
    message: str
    failure: WorkerFailure | None = None
    """The failure that came first, and the node it came from."""
    failed_node: str = ""


class DatasetOpen(Message, frozen=True, kw_only=True):
    """Answer to OpenDataset; `error` is empty or one sentence."""

    worker: str
    request: int
    error: str = ""


class ShardGranted(Message, frozen=True, kw_only=True):
    """Answer to TakeShard: [start, end) of `epoch`, yours until done or lost. `lease` 0 means there is no more.

    A sentence in `error` means that nothing is known of more: whoever asks must not take it for the end.
    """

    worker: str
    request: int
    lease: int = 0
    epoch: int = 0
    start: int = 0
    end: int = 0
    error: str = ""


class ShardNoted(Message, frozen=True, kw_only=True):
    """Answer to ShardProgress: it is in the ledger (`counted`), or it came from somebody who no longer holds it."""

    worker: str
    request: int
    counted: bool


# command line <-> master ---------------------------------------------------------------------------------------------


class Ask(Message, frozen=True, kw_only=True):
    """A command for the master; `what` is one of the verbs in `resile.master.commands`."""

    request: int
    what: str
    arguments: dict[str, Any] = {}


class Answer(Message, frozen=True, kw_only=True):
    """The result of an Ask; `error` is empty or one sentence."""

    request: int
    error: str = ""
    result: Any = None


# training process <-> its agent (Unix socket) ------------------------------------------------------------------------


class Attach(Message, frozen=True, kw_only=True):
    """The first message of a training process to its agent."""

    worker: str


class WorkerReady(Message, frozen=True, kw_only=True):
    """An elastic training process is in no round and can meet in a new one; the first word on a line of its own."""

    worker: str
    step: int
    """Steps completed."""
    agreed: Round = NO_ROUND
    """The newest round in which it came to one state with all members: it has that round's state, but for a step."""


class WorkerAssignment(Message, frozen=True, kw_only=True):
    """Answer to Ready, now or later: the process's place in a new round, as torchrun's variables would say it."""

    round: Round
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    group_rank: int
    group_world_size: int
    master_addr: str
    master_port: int
    verdict: float = 3.0
    """Seconds in which the master ends this round, if it does, after an error although nobody hung up."""


# agent -> the agent that keeps its copies, and back -----------------------------------------------------------------


class ReplicaOffer(Message, frozen=True, kw_only=True):
    """A checkpoint to keep: once it is welcome, its layout, checksums and data follow, as so many bytes each."""

    round: Round
    """The newest that the sender knows: whoever was left behind by an older one overwrites nothing."""
    local_rank: int
    sequence: int
    step: int
    layout: int
    sums: int
    data: int


class ReplicaAnswer(Message, frozen=True, kw_only=True):
    """Answer to Copy: that it is welcome, and after the last byte that it is kept; `error` is empty or one sentence."""

    error: str = ""


ShardMessage = OpenDataset | TakeShard | ShardProgress
ShardAnswer = DatasetOpen | ShardGranted | ShardNoted
AgentMessage = (
    Hello
    | Heartbeat
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
"""What a master hears from an agent."""

MasterMessage = Welcome | Refused | RoundFormed | RoundOver | StateHeld | Leave | JobOver | ShardAnswer | Answer
"""What an agent or a command line hears from a master."""

ToMaster = AgentMessage | Ask
WorkerMessage = Attach | StepReport | WorkerReady | LastStepTaken | ShardMessage
"""What an agent hears from its training processes."""
RendezvousMessage = WorkerAssignment | RoundOver
"""What an elastic training process hears on its line."""
