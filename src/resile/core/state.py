"""The whole state of a job as plain data, which can be copied, compared, put in a journal and read back."""

from __future__ import annotations

import enum

import msgspec

from resile.api.ids import NO_ROUND, NodeId, NodeKey, Rank, Round
from resile.api.job import JobSpec
from resile.api.plan import NodeResources
from resile.core.nodes.failure_causes import LOST
from resile.core.nodes.restart_budget import Spent
from resile.core.progress import Progress
from resile.core.rendezvous.state import Rendezvous, RoundForming
from resile.core.shard_ledger import Ledger
from resile.protocol.reports import NodeEnd, NodeStatus, ReplicaEndpoint


class Phase(enum.StrEnum):
    """How far a job is, as the core decides; people see `JobPhase`."""

    CREATED = "Created"
    PENDING = "Pending"
    RUNNING = "Running"
    SUSPENDED = "Suspended"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"

    @property
    def over(self) -> bool:
        return self in (Phase.SUCCEEDED, Phase.FAILED)


# where an agent stands ----------------------------------------------------------------------------------------------


class Idle(msgspec.Struct, frozen=True, tag=True):
    """The agent has not asked for a round yet. Its processes are down."""


class Waiting(msgspec.Struct, frozen=True, tag=True):
    """The agent waits for a round. Its processes are down, or elastic and in no round."""

    store_port: int
    nproc: int = 0
    """How many processes the agent brings; 0 means as many as `Agent.nproc`."""


class Training(msgspec.Struct, frozen=True, tag=True):
    """The agent's processes run in this round, or are being stopped after its end."""

    round: Round


class Resting(msgspec.Struct, frozen=True, tag=True):
    """The agent's elastic processes left this round, which is over. The agent will join in a moment."""

    round: Round


class Stuck(msgspec.Struct, frozen=True, tag=True):
    """An elastic process of the agent does not leave this round, which is over.

    This process may be the last one that has the training state. So the agent waits for it until the master says that
    another node has the state.
    """

    round: Round


class Done(msgspec.Struct, frozen=True, tag=True):
    """The agent's processes of this round ended well."""

    round: Round


AgentPhase = Idle | Waiting | Training | Resting | Stuck | Done


class Agent(msgspec.Struct, kw_only=True):
    incarnation: str
    address: str
    host: str
    nproc: int
    connection: int
    """The number of the agent's connection; 0 while it has none."""
    phase: AgentPhase
    elastic: bool = False
    """True if its processes join a new round without being restarted."""
    holds: Round = NO_ROUND
    """The newest round whose state its processes had when the agent joined; `NO_ROUND` after one of them failed."""
    replica_endpoint: ReplicaEndpoint | None = None


class Node(msgspec.Struct, kw_only=True):
    """One node, from the decision to launch it to its end.

    Nodes that ended stay in the state, because ids are never used again.
    """

    key: NodeKey
    rank: Rank
    status: NodeStatus
    launched_at: float
    relaunch_count: int = 0
    resources: NodeResources = NodeResources()
    agent: Agent | None = None
    host: str = ""
    machine: str = ""
    """The machine that the node is on, by the platform's name for it; empty if not known."""
    held_until: float | None = None
    """When the node will be launched, if its launch is delayed; None once it was launched."""
    leaving: str = ""
    """Why the core removes the node; empty unless it does."""
    replaces: NodeKey | None = None
    """During a migration: the node that this one will replace. Otherwise None."""
    end: NodeEnd = NodeEnd()
    ended_at: float | None = None
    restarts: int = 0
    """How often another agent process took over the node, because its command was restarted in place."""
    crashes: list[float] = []
    """Training time at each failure of its processes; `max_restarts` limits their number."""
    crashed_in: Round = NO_ROUND
    """The last round in which its elastic processes failed. All failures in one round count once."""
    counted: list[int] = []
    """Pids of its elastic processes that failed last, to recognise a report that comes twice."""

    @property
    def alive(self) -> bool:
        """True if the node is part of the job: it has not ended, and the core is not removing it."""
        return not self.status.ended and not self.leaving

    @property
    def fills(self) -> bool:
        """True if the node has its rank: it is part of the job, and does not wait to replace another node."""
        return self.alive and self.replaces is None

    @property
    def connected(self) -> bool:
        return self.agent is not None and self.agent.connection != 0

    @property
    def how_it_ended(self) -> str:
        """How this node ended, in words that follow its name in a sentence: "failed: …"."""
        if self.leaving and self.status is NodeStatus.DELETED:  # its exit code comes from the signal
            return f"was deleted: {'it ' if self.leaving.startswith('was ') else ''}{self.leaving}"
        end = self.end
        if end.reason == LOST:
            return f"was lost: {end.message}"
        if self.status is NodeStatus.SUCCEEDED:
            return "finished"
        detail = end.message or (f"exit code {end.exit_code}" if end.exit_code else "")
        verb = "failed" if self.status is NodeStatus.FAILED else "was deleted"
        return verb + (f" ({end.reason})" if end.reason else "") + (f": {detail}" if detail else "")


# changes that people asked for --------------------------------------------------------------------------------------

MAX_PLAN_ENDS = 100
"""How many ends of plans are kept: more than can wait to be reported."""


class ScaleOperation(msgspec.Struct, kw_only=True):
    name: str = ""
    """The plan's name; empty for plain scaling, and for a plan whose end was reported."""
    uid: str = ""
    about: str = ""
    """What was requested, as the subject of a sentence: "the plan p1"."""
    numbers: dict[str, int] = {}
    """The number of nodes that this change gives to each role."""
    coming: set[NodeKey] = set()
    """Nodes that must still join before the change is complete."""
    going: set[NodeKey] = set()
    """Nodes that must still end before the change is complete."""
    moves: dict[NodeKey, NodeKey] = {}
    """Migrations: from the old node to the new one, which takes over once it is ready."""


class PlanEnd(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    succeeded: bool
    reason: str
    message: str = ""


class RoleResources(msgspec.Struct, frozen=True, kw_only=True):
    """The resources that a plan gives to those nodes of a role that are launched after the plan."""

    resources: NodeResources
    since: NodeId
    """Nodes with smaller ids were launched before the plan."""


class JobState(msgspec.Struct, kw_only=True):
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
    """Gaps among the ranks: ranks below a role's highest one that are to have no node."""
    resources: dict[str, RoleResources] = {}
    """The resources that plans gave to roles. All other amounts are those of the roles' templates."""
    changes: list[ScaleOperation] = []
    """Changes that are not complete yet, oldest first."""
    plan_ends: dict[str, PlanEnd] = {}
    """How the newest plans ended, by uid."""
    given_up: set[tuple[str, Rank]] = set()
    """Ranks whose budget is spent."""
    spent: dict[tuple[str, Rank], Spent] = {}
    suspects: dict[str, float] = {}
    """Machines that fell silent, the newest last, and until when each is avoided."""
    rendezvous: Rendezvous
    ledger: Ledger = msgspec.field(default_factory=Ledger)
    progress: Progress = msgspec.field(default_factory=Progress)
    """Gauges of the training. Step reports are not in the journal, so no decision may depend on these gauges."""
    trained: float = 0.0
    """Training time that the journal knows of, a little behind `progress.trained`. Budgets use this time."""


def new_state(spec: JobSpec, now: float) -> JobState:
    return JobState(
        spec=spec,
        created_at=now,
        suspended=spec.suspend,
        targets={role: declared.replicas for role, declared in spec.roles.items()},
        rendezvous=Rendezvous(current=RoundForming(first=True)),
    )
