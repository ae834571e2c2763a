"""The whole state of a job as plain data, which can be copied, compared, put in a journal and read back."""

from __future__ import annotations

import enum

import msgspec

from resile.api.ids import NO_ROUND, NodeId, NodeKey, Rank, Round
from resile.api.job import JobSpec
from resile.api.plan import NodeResources
from resile.core.ledger import Ledger
from resile.core.nodes.restart_budget import LOST, Spent
from resile.core.progress import Progress
from resile.core.rendezvous.state import Rendezvous, RoundForming
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
    """Connected. Its processes are down, and it has not asked for a round yet."""


class Waiting(msgspec.Struct, frozen=True, tag=True):
    """Its processes are down, or rest, and it waits for a round."""

    port: int
    nproc: int = 0
    """How many processes it brings; 0 means all."""


class Training(msgspec.Struct, frozen=True, tag=True):
    """Its processes run in this round, or are being stopped once the round is over."""

    round: Round


class Resting(msgspec.Struct, frozen=True, tag=True):
    """Its elastic processes were told that this round is over. They live, and the agent will join in a moment."""

    round: Round


class Stuck(msgspec.Struct, frozen=True, tag=True):
    """One of its elastic processes does not leave this round, and may be the last that has the round's state."""

    round: Round


class Done(msgspec.Struct, frozen=True, tag=True):
    """Its processes of this round ended well."""

    round: Round


AgentPhase = Idle | Waiting | Training | Resting | Stuck | Done


class Agent(msgspec.Struct, kw_only=True):
    incarnation: str
    address: str
    host: str
    nproc: int
    session: int
    """The number of its connection; 0 while it has none."""
    phase: AgentPhase
    elastic: bool = False
    """Its processes join a new round without being restarted."""
    holds: Round = NO_ROUND
    """The newest round whose state its processes had when it joined; unset when one fails."""
    replica_endpoint: ReplicaEndpoint | None = None
    """Where it receives copies of another node's checkpoints."""


class Node(msgspec.Struct, kw_only=True):
    """One node, from the decision to launch it to its end. Nodes that ended are kept: ids are never used again."""

    key: NodeKey
    rank: Rank
    status: NodeStatus
    launched_at: float
    relaunch_count: int = 0
    resources: NodeResources = NodeResources()
    agent: Agent | None = None
    host: str = ""
    machine: str = ""
    """Where it was put, as the platform names it; empty if the platform did not say."""
    held_until: float | None = None
    """The node is not launched before this moment; None once it was launched."""
    leaving: str = ""
    """Why the core asked it to go; empty unless it did."""
    replaces: NodeKey | None = None
    """The node whose place it takes once it is ready; None if it fills its place already."""
    end: NodeEnd = NodeEnd()
    ended_at: float | None = None
    restarts: int = 0
    """How often another agent process took over this node, because its command was restarted in place."""
    crashes: list[float] = []
    """Training time at each of its process failures; `max_restarts` limits their number."""
    crashed_in: Round = NO_ROUND
    """The last round in which its elastic processes failed. Together they count once."""
    counted: list[int] = []
    """Pids of its newest elastic processes that failed, since a report may come twice."""

    @property
    def alive(self) -> bool:
        """Whether it is part of the job: it has not ended and was not asked to go."""
        return not self.status.ended and not self.leaving

    @property
    def fills(self) -> bool:
        """Whether it fills its place: it is part of the job, and does not wait to replace another node."""
        return self.alive and self.replaces is None

    @property
    def connected(self) -> bool:
        return self.agent is not None and self.agent.session != 0

    @property
    def how_it_ended(self) -> str:
        """How this node ended, to follow its name in a sentence."""
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
    """A change of the job's nodes that is not complete yet."""

    name: str = ""
    """Name of its plan; empty for plain scaling, and for a plan whose end was reported."""
    uid: str = ""
    """Uid of its plan."""
    about: str = ""
    """What was asked for, as the subject of a sentence."""
    numbers: dict[str, int] = {}
    """How many nodes it gives to roles."""
    coming: set[NodeKey] = set()
    """Nodes that are to take part and do not yet."""
    going: set[NodeKey] = set()
    """Nodes that are to be gone and are not yet."""
    moves: dict[NodeKey, NodeKey] = {}
    """Migrations: the old node, and the new one that takes over once it is ready."""


class PlanEnd(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    succeeded: bool
    reason: str
    message: str = ""


class RoleResources(msgspec.Struct, frozen=True, kw_only=True):
    """What a plan gives the nodes of a role that are launched from now on."""

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
    """Gaps among the ranks: places below a role's highest rank that are not to be filled."""
    resources: dict[str, RoleResources] = {}
    """What plans give to roles. The templates decide the rest."""
    changes: list[ScaleOperation] = []
    """Changes that are not complete yet, oldest first."""
    plan_ends: dict[str, PlanEnd] = {}
    """How the newest plans ended, by uid."""
    given_up: set[tuple[str, Rank]] = set()
    """Places whose budget is spent."""
    spent: dict[tuple[str, Rank], Spent] = {}
    suspects: dict[str, float] = {}
    """Machines that fell silent, the newest last, with the moment until which they are avoided."""
    training: Rendezvous
    """The rendezvous of the nodes that train."""
    ledger: Ledger = msgspec.field(default_factory=Ledger)
    progress: Progress = msgspec.field(default_factory=Progress)
    """Gauges. Step reports are not in the journal, so no decision may depend on these."""
    trained: float = 0.0
    """Training time as the journal knows it, a little behind `progress.trained`. Budgets are counted in it."""


def new_state(spec: JobSpec, now: float) -> JobState:
    return JobState(
        spec=spec,
        created_at=now,
        suspended=spec.suspend,
        targets={role: declared.replicas for role, declared in spec.roles.items()},
        training=Rendezvous(current=RoundForming(since=now, first=True)),
    )
