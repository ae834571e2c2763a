"""`JobSpec`: what the engine runs. Every front door (ElasticJob, ScalePlan, flags) is translated into this.

It is complete (all defaults filled in), checked, and plain data: it can be put in a journal and sent over a wire.
"""

from __future__ import annotations

import enum
from typing import Any

import msgspec

from resile.api.ids import Bytes
from resile.api.timeouts import Timeouts, derive

WORKER = "worker"
CHIEF = "chief"
PS = "ps"
EVALUATOR = "evaluator"
ROLES = (CHIEF, WORKER, PS, EVALUATOR)
"""The roles a job may have, in the order in which tables list them."""

MASTER_PORT = 50001
DEFAULT_CRASH_BUDGET = 3
MAX_REPLICAS = 10_000
"""Nodes of one role: as many as one master is made for; a greater number is a slip of the keyboard."""


class FrontDoor(enum.StrEnum):
    """Whose names and conventions a job keeps."""

    ELASTICJOB = "elasticjob"
    RUN = "run"


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


class RoleSpec(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One role of a job: how many nodes, and what each of them runs."""

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
    """Whose loss ends the job: `all`, `none`, or `index:count` pairs with commas; empty for the strategy's own rule."""
    batch_scheduler: str = ""
    template: dict[str, Any] = {}
    """The pod template as the user wrote it plus the job's `envs`, for the platform that makes pods."""


class JobSpec(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One job, ready to run."""

    name: str
    namespace: str = "default"
    uid: str = ""
    front_door: FrontDoor = FrontDoor.ELASTICJOB
    strategy: Strategy = Strategy.ALLREDUCE
    roles: dict[str, RoleSpec] = {}
    """Empty for a job on bare machines (`resile run`): nodes come by themselves and nobody launches them."""
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


def node_name(spec: JobSpec, role: str, node_id: int) -> str:
    """The name people see for a node: DLRover's pod name, or role and id on bare machines."""
    if spec.front_door is FrontDoor.ELASTICJOB:
        return f"{spec.name}-edljob-{role}-{node_id}"
    return f"{role}-{node_id}"
