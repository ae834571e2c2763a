"""The ElasticJob resource, field by field as DLRover's, all generations of it.

The types say what a manifest may hold; `resile.api.manifest` reads manifests into them and `resile.api.translate` makes
the `JobSpec` that the engine runs. Amounts and options stay as the user wrote them here.
"""

from __future__ import annotations

import enum
import re
from typing import Annotated, Any

import msgspec

from resile.api.checks import rule
from resile.api.job import CHIEF, EVALUATOR, PS, ROLES, WORKER, Strategy
from resile.api.metadata import API_VERSION, Metadata
from resile.api.mistakes import Mistakes, shown, under
from resile.api.names import MASTER_ROLE, check_env_name, check_job_name
from resile.api.options import read_options
from resile.api.podtemplate import check_env_entry, check_partial_template, check_resources, check_template

KIND = "ElasticJob"
PLURAL = "elasticjobs"

LEGACY_MASTER_ROLE = "master"

MAX_REPLICAS = 100_000
"""Ten times what the engine is measured with: what is above is a slip of the keyboard."""

_FRACTION = re.compile(r"0|1|[01]?\.[0-9]{1,9}", re.ASCII)
_CRITICAL = re.compile(r"|all|none|[0-9]{1,6}:[0-9]{1,6}(?:,[0-9]{1,6}:[0-9]{1,6})*", re.ASCII)


class OptimizeMode(enum.StrEnum):
    """Who decides on resources: the user, this job's master, or a service for the whole cluster."""

    MANUAL = "manual"
    SINGLE_JOB = "single-job"
    CLUSTER = "cluster"

    @classmethod
    def _missing_(cls, value: object) -> OptimizeMode | None:
        return cls.MANUAL if value == "manunal" else None  # DLRover's own constant is misspelt


class RestartPolicy(enum.StrEnum):
    """What happens to a role's node that ended."""

    ALWAYS = "Always"
    ON_FAILURE = "OnFailure"
    NEVER = "Never"
    EXIT_CODE = "ExitCode"


class Phase(enum.StrEnum):
    """Where a job is; also the types of its conditions."""

    CREATED = "Created"
    PENDING = "Pending"
    RUNNING = "Running"
    RESTARTING = "Restarting"
    SCALING = "Scaling"
    SUSPENDED = "Suspended"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"

    @property
    def reason(self) -> str:
        """The reason that a condition of this type carries."""
        return f"Job{self.value}"

    @property
    def ended(self) -> bool:
        """Whether a job in this phase will never run again."""
        return self in (Phase.SUCCEEDED, Phase.FAILED)


def _check_priority(value: str, path: str, mistakes: Mistakes) -> None:
    is_fraction = bool(_FRACTION.fullmatch(value)) and float(value) <= 1
    if value not in ("", "high", "low") and not is_fraction:
        mistakes.add(path, f"must be high, low or a fraction from 0 to 1 such as '0.5', not {shown(value)}")


def _check_critical(value: str, path: str, mistakes: Mistakes) -> None:
    if not _CRITICAL.fullmatch(value):
        mistakes.add(path, f"must be all, none or pairs of index:count such as '0:3,1:3', not {shown(value)}")


def _check_env(value: dict[str, Any], path: str, mistakes: Mistakes) -> None:
    for key, entry in value.items():
        check_env_name(key, under(path, key), mistakes)
        if isinstance(entry, dict):
            check_env_entry(entry, under(path, key), mistakes)
            if entry.get("name", key) != key:
                mistakes.add(under(under(path, key), "name"), f"must be {key} like its key, not {shown(entry['name'])}")


def _check_roles(value: dict[str, Any], path: str, mistakes: Mistakes) -> None:
    if not any(role in value for role in ROLES):
        mistakes.add(path, "must have at least one of worker, chief, ps and evaluator")
    if MASTER_ROLE in value and LEGACY_MASTER_ROLE in value:
        mistakes.add(under(path, LEGACY_MASTER_ROLE), f"is the old name of {MASTER_ROLE}, which is given as well")


def _check_metadata(value: dict[str, Any], path: str, mistakes: Mistakes) -> None:
    if isinstance(value.get("name"), str):
        check_job_name(value["name"], under(path, "name"), mistakes)
    if isinstance(value.get("annotations"), dict):
        read_options(value["annotations"], under(path, "annotations"), mistakes)


Count = Annotated[int, msgspec.Meta(ge=0, le=MAX_REPLICAS)]
Quantity = str | int | float


class EnvVar(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, rename="camel"):
    """One variable of every node: its value, or where a cluster takes it from."""

    name: str = ""
    value: str = ""
    value_from: dict[str, Any] | None = None


class ResourceLimits(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, rename="camel"):
    """What the whole job may use at most."""

    cpu: Quantity | None = None
    memory: Quantity | None = None
    gpu: Quantity | None = None


class _Replica(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, rename="camel"):
    replicas: Count | None = None
    restart_policy: RestartPolicy | None = None
    restart_count: Count | None = None
    auto_scale: bool | None = None
    restart_timeout: Annotated[int, msgspec.Meta(ge=0)] | None = None
    priority: Annotated[str, rule(_check_priority)] = ""
    batch_scheduler: str = msgspec.field(name="BatchScheduler", default="")
    critical_nodes: Annotated[str, rule(_check_critical)] = ""


class ReplicaSpec(_Replica, frozen=True, kw_only=True, omit_defaults=True, rename="camel"):
    """One role: how many nodes, and the pod that each of them is."""

    template: Annotated[dict[str, Any], rule(check_template)]


class MasterSpec(_Replica, frozen=True, kw_only=True, omit_defaults=True, rename="camel"):
    """Changes to the master's own pod; its template may name only what differs."""

    template: Annotated[dict[str, Any], rule(check_partial_template)] = {}


class ReplicaSpecs(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, rename="camel"):
    """The roles of a job."""

    chief: ReplicaSpec | None = None
    worker: ReplicaSpec | None = None
    ps: ReplicaSpec | None = None
    evaluator: ReplicaSpec | None = None
    dlrover_master: MasterSpec | None = msgspec.field(name=MASTER_ROLE, default=None)
    legacy_master: MasterSpec | None = msgspec.field(name=LEGACY_MASTER_ROLE, default=None)

    def given(self) -> dict[str, ReplicaSpec]:
        """The roles that the job has, the master apart, in the order in which tables list them."""
        roles = {CHIEF: self.chief, WORKER: self.worker, PS: self.ps, EVALUATOR: self.evaluator}
        return {role: spec for role, spec in roles.items() if spec is not None}

    @property
    def master(self) -> MasterSpec | None:
        """The master's, under its present or its old name."""
        return self.dlrover_master or self.legacy_master


class ElasticJobSpec(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, rename="camel"):
    """What the user wants."""

    replica_specs: Annotated[ReplicaSpecs, rule(_check_roles)]
    distribution_strategy: Strategy = Strategy.PARAMETER_SERVER
    """Without one a job is a parameter-server job, as in DLRover."""
    resource_limits: Annotated[ResourceLimits, rule(check_resources)] = ResourceLimits()
    optimize_mode: OptimizeMode = OptimizeMode.SINGLE_JOB
    brain_service: str = ""
    envs: Annotated[dict[str, EnvVar], rule(_check_env)] = {}
    suspend: bool = False
    enable_elastic_scheduling: bool | None = None
    enable_dynamic_sharding: bool | None = None
    """Read and without effect: shards are dealt to whoever asks for them."""


class Condition(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, rename="camel"):
    """One entry of a job's history."""

    type: Phase
    status: str
    reason: str = ""
    message: str = ""
    last_update_time: str = ""
    last_transition_time: str = ""


class ReplicaStatus(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, rename="camel"):
    """How many nodes of a role are in which state."""

    initial: int = 0
    pending: int = 0
    active: int = 0
    succeeded: int = 0
    failed: int = 0
    label_selector: str = ""


class JobProgress(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, rename="camel"):
    """The inner `status` of a status."""

    conditions: tuple[Condition, ...] = ()
    replica_statuses: dict[str, ReplicaStatus] = {}
    start_time: str = ""
    completion_time: str = ""
    last_reconcile_time: str = ""


class ElasticJobStatus(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, rename="camel"):
    """What became of it. The nesting `status.status` is DLRover's."""

    phase: Phase | None = None
    status: JobProgress = JobProgress()
    scale_plan: str = ""
    """The name of the plan being executed."""


class ElasticJob(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """One job as users write it and as the cluster keeps it."""

    api_version: str = API_VERSION
    kind: str = KIND
    metadata: Annotated[Metadata, rule(_check_metadata)]
    spec: ElasticJobSpec
    status: ElasticJobStatus = ElasticJobStatus()
