"""All a job's brain remembers, as plain data: it can be copied, compared, put in a journal and read back."""

from __future__ import annotations

import enum

import msgspec

from resile.api.ids import NO_ROUND, NodeId, NodeKey, Rank, Round
from resile.api.job import JobSpec
from resile.api.plan import NodeResources
from resile.core.ledger import Ledger
from resile.core.nodes.relaunch import Spent
from resile.core.progress import Progress
from resile.core.rendezvous.state import Rendezvous, RoundForming
from resile.protocol.reports import NodeEnd, NodeStatus, ReplicaEndpoint


class Phase(enum.StrEnum):
    """The phase people see in `get elasticjob`."""

    CREATED = "Created"
    PENDING = "Pending"
    RUNNING = "Running"
    SUSPENDED = "Suspended"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"

    @property
    def over(self) -> bool:
        """Whether the job has ended."""
        return self in (Phase.SUCCEEDED, Phase.FAILED)


# where an agent stands ----------------------------------------------------------------------------------------------


class Idle(msgspec.Struct, frozen=True, tag=True):
    """Connected; its processes are down and it has not asked for a round yet."""


class Waiting(msgspec.Struct, frozen=True, tag=True):
    """Its processes are down, or rest, and it waits for a round."""

    port: int
    nproc: int = 0
    """How many processes it brings; 0: all."""


class Training(msgspec.Struct, frozen=True, tag=True):
    """Its processes run in this round (or are being stopped, once the round is over)."""

    round: Round


class Resting(msgspec.Struct, frozen=True, tag=True):
    """Its elastic processes were told that this round is over; they live, and it will join in a moment."""

    round: Round


class Stuck(msgspec.Struct, frozen=True, tag=True):
    """One of its elastic processes does not leave this round, and may be the last that has its state."""

    round: Round


class Done(msgspec.Struct, frozen=True, tag=True):
    """Its processes of this round ended well."""

    round: Round


AgentPhase = Idle | Waiting | Training | Resting | Stuck | Done


class Agent(msgspec.Struct, kw_only=True):
    """A node's agent as the core knows it."""

    incarnation: str
    address: str
    host: str
    nproc: int
    session: int
    """The connection it speaks on; 0 while it has none."""
    phase: AgentPhase
    elastic: bool = False
    """Its processes meet in a new round without being restarted."""
    holds: Round = NO_ROUND
    """The newest round whose state one of its processes had when it joined, and has as long as none of them failed."""
    replica_endpoint: ReplicaEndpoint | None = None
    """Where it takes in copies of another node's checkpoints."""


class Node(msgspec.Struct, kw_only=True):
    """One node, from the decision to launch it to its end. Nodes that ended are kept: their ids are used up."""

    key: NodeKey
    rank: Rank
    status: NodeStatus
    launched_at: float
    relaunch_count: int = 0
    resources: NodeResources = NodeResources()
    agent: Agent | None = None
    host: str = ""
    machine: str = ""
    """Where it was put, in the platform's own words; empty where it did not say."""
    held_until: float | None = None
    """It is not launched before this moment; None once it was."""
    leaving: str = ""
    """Why the core asked it to go; empty unless it did."""
    replaces: NodeKey | None = None
    """The node whose place it takes once it is ready; None once it has, and for all who filled theirs at once."""
    end: NodeEnd = NodeEnd()
    ended_at: float | None = None
    restarts: int = 0
    """How often another agent process took over this node: its command was started again in place."""
    crashes: list[float] = []
    """Training time at each of its process failures: what `max_restarts` is compared with."""
    crashed_in: Round = NO_ROUND
    """The last round in which elastic processes of its failed: together they count once."""
    counted: list[int] = []
    """Pids of its newest elastic processes that failed: a report may come twice."""

    @property
    def alive(self) -> bool:
        """Whether it is part of the job: not ended and not asked to go."""
        return not self.status.ended and not self.leaving

    @property
    def fills(self) -> bool:
        """Whether it fills its place: part of the job, and not in reserve for a node that still does."""
        return self.alive and self.replaces is None

    @property
    def connected(self) -> bool:
        """Whether its agent has an open connection."""
        return self.agent is not None and self.agent.session != 0


# changes that people asked for --------------------------------------------------------------------------------------

MAX_PLAN_ENDS = 100
"""How many ends of plans are kept: more than could be waiting to be told."""


class ScaleOperation(msgspec.Struct, kw_only=True):
    """A change of the job's nodes that is not complete yet."""

    name: str = ""
    """Of its ScalePlan; empty for a plain wish, and for a plan that has had its end told."""
    uid: str = ""
    """Of its ScalePlan."""
    about: str = ""
    """What it wants, as half a sentence."""
    numbers: dict[str, int] = {}
    """How many nodes it wants roles to have."""
    coming: set[NodeKey] = set()
    """Nodes that shall take part and do not yet."""
    going: set[NodeKey] = set()
    """Nodes that shall be gone and are not yet."""
    moves: dict[NodeKey, NodeKey] = {}
    """Who takes over from whom, once ready: the old node, and the new one."""


class PlanEnd(msgspec.Struct, frozen=True, kw_only=True):
    """What became of a ScalePlan."""

    name: str
    succeeded: bool
    reason: str
    message: str = ""


class RoleResources(msgspec.Struct, frozen=True, kw_only=True):
    """What a plan wants the nodes of a role to have that are launched from now on."""

    resources: NodeResources
    since: NodeId
    """Nodes with smaller ids were launched before."""


class JobState(msgspec.Struct, kw_only=True):
    """The whole state of one job."""

    spec: JobSpec
    created_at: float
    phase: Phase = Phase.CREATED
    started_at: float | None = None
    ended_at: float | None = None
    reason: str = ""
    message: str = ""
    suspended: bool = False
    nodes: dict[NodeKey, Node] = {}
    next_id: dict[str, NodeId] = {}
    targets: dict[str, int] = {}
    """How many nodes each role should have."""
    vacated: set[tuple[str, Rank]] = set()
    """Gaps among the ranks: places below a role's highest that nobody should fill."""
    resources: dict[str, RoleResources] = {}
    """What plans want roles to have; their templates decide where nothing is said."""
    changes: list[ScaleOperation] = []
    """What people asked for and is not complete yet, oldest first."""
    plan_ends: dict[str, PlanEnd] = {}
    """How the newest plans ended, by uid."""
    given_up: set[tuple[str, Rank]] = set()
    """Places whose budget is spent."""
    spent: dict[tuple[str, Rank], Spent] = {}
    suspects: dict[str, float] = {}
    """Machines that fell silent, the newest last, with the moment until which they are avoided."""
    training: Rendezvous
    """Where the nodes that train meet."""
    ledger: Ledger = msgspec.field(default_factory=Ledger)
    progress: Progress = msgspec.field(default_factory=Progress)
    """Gauges. Step reports are not in the journal, so nothing may be decided by them."""
    trained: float = 0.0
    """Training time as the journal knows it, a little behind `progress.trained`: what budgets are counted in."""


def new_state(spec: JobSpec, now: float) -> JobState:
    """The state of a job that nothing has happened to."""
    return JobState(
        spec=spec,
        created_at=now,
        suspended=spec.suspend,
        targets={role: declared.replicas for role, declared in spec.roles.items()},
        training=Rendezvous(current=RoundForming(since=now, first=True)),
    )
