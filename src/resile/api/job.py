"""`JobSpec`: what the engine runs. Every kind of job (`resile.api.kinds`) translates what users write into it.

It is complete (all defaults filled in), checked, and plain data: it can be put in a journal and sent over a wire. The
engine knows no role by name: each `RoleSpec` says what its role does, as the kind of the job defined it.
"""

from __future__ import annotations

import enum
from typing import Any

import msgspec

from resile.api.defaults import DEFAULT_CRASH_BUDGET
from resile.api.ids import Bytes
from resile.api.timeouts import Timeouts, derive


class Loss(enum.StrEnum):
    """What it means for a job that a rank of a role is given up: its node ended and is not replaced."""

    TOLERATED = "tolerated"
    """The job goes on as long as enough nodes that train are left."""
    FATAL = "fatal"
    """The job fails."""


class RoleTraits(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What the nodes of a role do in their job; the defaults are those of nodes that train."""

    trains: bool = True
    """Its agents meet in rounds."""
    decides_end: bool = True
    """The job succeeds when every rank of all roles that decide has ended well."""
    loss: Loss = Loss.TOLERATED
    failure: str = "WorkerError"
    """The reason of a job that failed because a rank of this role was given up."""
    oom_failure: str = "WorkerOOM"
    """The same where the node had run out of memory."""
    cannot_migrate: str = ""
    """Why a node of this role cannot be migrated, as the rest of a sentence that begins with its name; empty if it
    can."""
    port: int = 0
    """Where its nodes listen for the others, in a job whose nodes find each other by address."""


class Strategy(enum.StrEnum):
    """How the training processes work together."""

    ALLREDUCE = "AllreduceStrategy"
    PARAMETER_SERVER = "ParameterServerStrategy"
    CUSTOM = "CustomStrategy"
    LOCAL = "Local"


class Resources(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What one node asks for, or may use at most; None where nothing was said."""

    cpu: float | None = None
    memory: Bytes | None = None
    gpu: int = 0


class RoleSpec(RoleTraits, frozen=True, kw_only=True, omit_defaults=True):
    """One role of a job: how many nodes, what each of them runs, and what it does in the job."""

    replicas: int
    command: tuple[str, ...] = ()
    """Program and arguments of the main container: `command` then `args` of the template."""
    env: dict[str, str] = {}
    """Literal values only; what a cluster would look up stays in `template`."""
    requests: Resources = Resources()
    limits: Resources = Resources()
    crash_budget: int = DEFAULT_CRASH_BUDGET
    """`restartCount`: how many of its crashes are answered with a new node."""
    auto_scale: bool = True
    priority: str = ""
    grace: float | None = None
    """`terminationGracePeriodSeconds` of the template, if given."""
    restart_policy: str = ""
    """The role's `restartPolicy`, else its template's; empty where neither says anything."""
    restart_timeout: float | None = None
    critical_nodes: str = ""
    """Nodes whose loss ends the job: `all`, `none`, or `index:count` pairs with commas; empty for the strategy's own
    rule."""
    batch_scheduler: str = ""
    template: dict[str, Any] = {}
    """The pod template as the user wrote it plus the job's `envs`, for the platform that makes pods."""


class JobSpec(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One job, ready to run."""

    name: str
    namespace: str = "default"
    uid: str = ""
    kind: str
    """The name of its kind in `resile.api.kinds.registry`."""
    strategy: Strategy = Strategy.ALLREDUCE
    roles: dict[str, RoleSpec] = {}
    """In the order in which tables list them. Empty for a job on bare machines (`resile run`), whose nodes come by
    themselves."""
    master: RoleSpec | None = None
    """What the user wants changed about the master's own pod; its template may be partial."""
    resource_limits: Resources = Resources()
    """Of the whole job; scaling stays within it."""
    optimize_mode: str = "single-job"
    brain_service: str = ""
    suspend: bool = False
    timeouts: Timeouts = msgspec.field(default_factory=derive)
    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}

    @property
    def managed(self) -> bool:
        """Whether a platform launches this job's nodes."""
        return bool(self.roles)

    @property
    def trainers(self) -> tuple[str, ...]:
        """The roles whose agents meet in rounds, in the order of their ranks; none are named on bare machines."""
        return tuple(name for name, role in self.roles.items() if role.trains)

    def trains(self, role: str) -> bool:
        """Whether the agents of a role meet in rounds: on bare machines those of every role do."""
        declared = self.roles.get(role)
        return not self.roles if declared is None else declared.trains

    def decides_end(self, role: str) -> bool:
        """Whether the job is over only when the nodes of this role have ended."""
        declared = self.roles.get(role)
        return not self.roles if declared is None else declared.decides_end

    def role_order(self, role: str) -> int:
        """The place of a role among the job's roles; behind them all if the job does not name it."""
        return next((at for at, name in enumerate(self.roles) if name == role), len(self.roles))
