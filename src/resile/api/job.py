"""`JobSpec`: what the engine runs. Every kind of job (`resile.api.kinds`) translates what users write into it.

It is complete (all defaults are filled in), checked, and plain data, which a journal and a connection can carry. The
engine knows no role by name: each `RoleSpec` has the traits that the kind of the job gave to its role.
"""

from __future__ import annotations

import enum
from typing import Any

import msgspec

from resile.api.defaults import DEFAULT_CRASH_BUDGET
from resile.api.ids import Bytes, Seconds
from resile.api.timeouts import Timeouts, derive


class Loss(enum.StrEnum):
    """What happens to a job that gives a rank up. A rank is given up if its node has ended and is not replaced."""

    TOLERATED = "tolerated"
    """The job goes on as long as enough nodes that train are left."""
    FATAL = "fatal"


class RoleTraits(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What the nodes of a role do in a job, and what their loss means; the defaults are those of nodes that train."""

    trains: bool = True
    """The agents of this role join rounds."""
    decides_end: bool = True
    """The job succeeds when all ranks of the roles with this trait have succeeded."""
    loss: Loss = Loss.TOLERATED
    failure: str = "WorkerError"
    """The reason of a job that failed because a rank of this role was given up."""
    oom_failure: str = "WorkerOOM"
    """The reason in place of `failure` if the last node of the rank had run out of memory."""
    cannot_migrate: str = ""
    """Why nodes of this role cannot be migrated: the end of a sentence that begins with a node; empty if they can."""
    port: int = 0
    """The port on which nodes listen, in a job whose nodes find each other by address."""


class Strategy(enum.StrEnum):
    ALLREDUCE = "AllreduceStrategy"
    PARAMETER_SERVER = "ParameterServerStrategy"
    CUSTOM = "CustomStrategy"
    LOCAL = "Local"


class Resources(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The requests or limits of one node or of all nodes together. `cpu` and `memory` (bytes) are None if not given."""

    cpu: float | None = None
    memory: Bytes | None = None
    gpu: int = 0


class RoleSpec(RoleTraits, frozen=True, kw_only=True, omit_defaults=True):
    """One role of a job: how many nodes it has, what each of them runs, and its traits."""

    replicas: int
    command: tuple[str, ...] = ()
    """Program and arguments of the main container: `command` then `args` of the template."""
    env: dict[str, str] = {}
    """The environment variables with literal values; those with `valueFrom` are only in `template`."""
    requests: Resources = Resources()
    limits: Resources = Resources()
    crash_budget: int = DEFAULT_CRASH_BUDGET
    """`restartCount`: how many crashes of a rank are answered with a new node."""
    auto_scale: bool = True
    priority: str = ""
    grace: float | None = None
    """`terminationGracePeriodSeconds` of the template; None if not given."""
    restart_policy: str = ""
    """The role's `restartPolicy`, else its template's; empty if neither is given."""
    batch_scheduler: str = ""
    template: dict[str, Any] = {}
    """The pod template as the user wrote it, with the job's `envs` added; used to create pods."""


class JobSpec(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    name: str
    namespace: str = "default"
    uid: str = ""
    kind: str
    """The name of the job's kind in `resile.api.kinds.registry`."""
    strategy: Strategy = Strategy.ALLREDUCE
    roles: dict[str, RoleSpec] = {}
    """By name, in listing order. Empty for a job on bare machines (`resile run`), whose nodes no platform launches."""
    master: RoleSpec | None = None
    """The user's changes to the master's pod; the template may be partial."""
    resource_limits: Resources = Resources()
    """The limits of all nodes together; scaling does not exceed them."""
    suspend: bool = False
    timeouts: Timeouts = msgspec.field(default_factory=derive)
    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}

    @property
    def managed(self) -> bool:
        """True if a platform launches this job's nodes."""
        return bool(self.roles)

    @property
    def trainers(self) -> tuple[str, ...]:
        """The roles whose agents join rounds, in the order in which rounds rank them; empty on bare machines."""
        return tuple(name for name, role in self.roles.items() if role.trains)

    def trains(self, role: str) -> bool:
        """True if the agents of this role join rounds. On bare machines, always True."""
        return self.roles[role].trains if role in self.roles else not self.managed

    def decides_end(self, role: str) -> bool:
        """True if the job succeeds only after the nodes of this role have succeeded. On bare machines, always True."""
        return self.roles[role].decides_end if role in self.roles else not self.managed

    def exit_grace(self, role: str) -> Seconds:
        """How long a node of this role may take to save and end: the role's `grace`, else the job's `exit_grace`."""
        declared = self.roles.get(role)
        if declared is None or declared.grace is None:
            return self.timeouts.exit_grace
        return Seconds(max(declared.grace, self.timeouts.kill_grace))

    @property
    def longest_exit_grace(self) -> Seconds:
        return max((self.exit_grace(role) for role in self.roles), default=self.timeouts.exit_grace)

    def role_order(self, role: str) -> int:
        """The index of a role among the job's roles, to sort by; an unknown role comes last."""
        return [*self.roles, role].index(role)
