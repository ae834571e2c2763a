"""The ElasticJob resource, field by field as DLRover's, all generations of it.

The types say what a manifest may hold; `api/manifests/reader.py` reads manifests into them and `to_job_spec.py` makes
the `JobSpec` that the engine runs. Amounts and options stay as the user wrote them here. The text below a field is
what `kubectl explain` tells of it (`resile.api.crd.generate`), so it speaks to users.
"""

from __future__ import annotations

import enum
import re
from typing import Annotated, Any

import msgspec

from resile.api.defaults import MAX_REPLICAS
from resile.api.job import Strategy
from resile.api.job_phase import JobPhase
from resile.api.kinds.elasticjob.master_options import read_options
from resile.api.kinds.elasticjob.names import JOB_NAMES, MAX_JOB_NAME, check_job_name
from resile.api.kinds.elasticjob.roles import LEGACY_MASTER_ROLE, MASTER_ROLE, ROLE_NAMES
from resile.api.manifests.errors import ManifestErrors, shown, under
from resile.api.manifests.metadata import Metadata
from resile.api.manifests.name_rules import check_env_name
from resile.api.manifests.pod_template import (
    PARTIAL_TEMPLATE_SCHEMA,
    TEMPLATE_SCHEMA,
    check_env_entry,
    check_partial_template,
    check_resources,
    check_template,
)
from resile.api.manifests.validation import matching, rule
from resile.api.quantity import QUANTITY

_MISSPELT_MANUAL = "manunal"
"""The constant for `manual` as DLRover spells it."""

_PRIORITY = re.compile(r"|high|low|0|1|0?\.[0-9]{1,9}|1\.0{1,9}", re.ASCII)
_CRITICAL = re.compile(r"|all|none|[0-9]{1,6}:[0-9]{1,6}(?:,[0-9]{1,6}:[0-9]{1,6})*", re.ASCII)


class OptimizeMode(enum.StrEnum):
    """Who decides on resources: the user, this job's master, or a service for the whole cluster."""

    MANUAL = "manual"
    SINGLE_JOB = "single-job"
    CLUSTER = "cluster"

    @classmethod
    def _missing_(cls, value: object) -> OptimizeMode | None:
        return cls.MANUAL if value == _MISSPELT_MANUAL else None


class RestartPolicy(enum.StrEnum):
    """What happens to a role's node that ended."""

    ALWAYS = "Always"
    ON_FAILURE = "OnFailure"
    NEVER = "Never"
    EXIT_CODE = "ExitCode"


def _check_priority(value: str, path: str, errors: ManifestErrors) -> None:
    if not _PRIORITY.fullmatch(value):
        errors.add(path, f"must be high, low or a fraction from 0 to 1 such as '0.5', not {shown(value)}")


def _check_critical(value: str, path: str, errors: ManifestErrors) -> None:
    if not _CRITICAL.fullmatch(value):
        errors.add(path, f"must be all, none or pairs of index:count such as '0:3,1:3', not {shown(value)}")


def _check_env(value: dict[str, Any], path: str, errors: ManifestErrors) -> None:
    for key, entry in value.items():
        check_env_name(key, under(path, key), errors)
        if isinstance(entry, dict):
            check_env_entry(entry, under(path, key), errors)
            if entry.get("name", key) != key:
                errors.add(under(under(path, key), "name"), f"must be {key} like its key, not {shown(entry['name'])}")


_ROLES_SCHEMA = {
    "anyOf": [{"required": [role]} for role in ROLE_NAMES],
    "not": {"required": [MASTER_ROLE, LEGACY_MASTER_ROLE]},
}
_NAME_SCHEMA = {"type": "string", "maxLength": MAX_JOB_NAME, "pattern": matching(JOB_NAMES)}


def _check_roles(value: dict[str, Any], path: str, errors: ManifestErrors) -> None:
    if not any(role in value for role in ROLE_NAMES):
        errors.add(path, f"must have at least one of {', '.join(ROLE_NAMES[:-1])} and {ROLE_NAMES[-1]}")
    if MASTER_ROLE in value and LEGACY_MASTER_ROLE in value:
        errors.add(under(path, LEGACY_MASTER_ROLE), f"is the old name of {MASTER_ROLE}, which is given as well")


def _check_metadata(value: dict[str, Any], path: str, errors: ManifestErrors) -> None:
    if isinstance(value.get("name"), str):
        check_job_name(value["name"], under(path, "name"), errors)
    if isinstance(value.get("annotations"), dict):
        read_options(value["annotations"], under(path, "annotations"), errors)


Count = Annotated[int, msgspec.Meta(ge=0, le=MAX_REPLICAS)]
Quantity = Annotated[str | int | float, msgspec.Meta(extra_json_schema={"pattern": matching(QUANTITY)})]


class EnvVar(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, rename="camel"):
    """One environment variable of every node: its value, or where a cluster takes it from."""

    name: str = ""
    """The same as its key, if given at all."""
    value: str = ""
    """The value, where it is known; otherwise give valueFrom."""
    value_from: dict[str, Any] | None = None
    """Where the cluster takes the value from, as in the env of a container."""


class ResourceLimits(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, rename="camel"):
    """The most that all nodes of a job may have together; a request for more is refused."""

    cpu: Quantity | None = None
    """Cores of all nodes together, such as "15"."""
    memory: Quantity | None = None
    """Memory of all nodes together, such as 30000Mi."""
    gpu: Quantity | None = None
    """GPUs of all nodes together, a whole number."""


class _Replica(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, rename="camel"):
    replicas: Count | None = None
    """How many nodes. The parameter servers and workers of a job that scales itself need not be counted."""
    restart_policy: RestartPolicy | None = None
    """What happens to a node that ended; without it the restartPolicy of the template counts."""
    restart_count: Count | None = None
    """How many crashes of a node are answered with a new node: 3 unless given. Being preempted, evicted or deleted is
    no crash and costs nothing."""
    auto_scale: bool | None = None
    """Whether a job that scales itself may change this role; true unless given."""
    restart_timeout: Annotated[int, msgspec.Meta(ge=0)] | None = None
    """How many seconds a node may take to come back."""
    priority: Annotated[str, rule(_check_priority, pattern=matching(_PRIORITY))] = ""
    """Which nodes are scheduled with high priority: high (all), low (none), or a fraction such as "0.5", of which the
    first nodes are."""
    batch_scheduler: str = msgspec.field(name="BatchScheduler", default="")
    """The scheduler of the pods, where it is not the cluster's own."""
    critical_nodes: Annotated[str, rule(_check_critical, pattern=matching(_CRITICAL))] = ""
    """Whose loss ends the job: all, none, or pairs of index:count such as "0:3,1:3", the number of crashes that each of
    these nodes may have."""


class ReplicaSpec(_Replica, frozen=True, kw_only=True, omit_defaults=True, rename="camel"):
    """One role: how many nodes it has, and the pod template of these nodes."""

    template: Annotated[dict[str, Any], rule(check_template, **TEMPLATE_SCHEMA)]
    """The pod of every node, as in a Deployment (kubectl explain pod.spec). The container named main trains, or the
    first if none is named so."""


class MasterSpec(_Replica, frozen=True, kw_only=True, omit_defaults=True, rename="camel"):
    """Changes to the master's own pod; its template may name only what differs."""

    template: Annotated[dict[str, Any], rule(check_partial_template, **PARTIAL_TEMPLATE_SCHEMA)] = {}
    """Laid over the pod that a master gets without it: resources, an image, a node selector, …"""


class ReplicaSpecs(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, rename="camel"):
    """The roles of a job, at least one of worker, chief, ps and evaluator."""

    chief: ReplicaSpec | None = None
    """The worker of a parameter-server job that also saves. Without it one of the workers is the chief."""
    worker: ReplicaSpec | None = None
    """The nodes that train. `kubectl scale` changes how many there are."""
    ps: ReplicaSpec | None = None
    """The parameter servers."""
    evaluator: ReplicaSpec | None = None
    """The nodes that evaluate beside training."""
    dlrover_master: MasterSpec | None = msgspec.field(name=MASTER_ROLE, default=None)
    """Changes to the pod of the job's master."""
    legacy_master: MasterSpec | None = msgspec.field(name=LEGACY_MASTER_ROLE, default=None)
    """The old name of dlrover-master; give one of the two."""


class ElasticJobSpec(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, rename="camel"):
    """The job that the user wants: its roles, and how their nodes train together."""

    replica_specs: Annotated[ReplicaSpecs, rule(_check_roles, **_ROLES_SCHEMA)]
    distribution_strategy: Strategy = Strategy.PARAMETER_SERVER
    """How the training processes work together. Without one a job is a parameter-server job, as in DLRover."""
    resource_limits: Annotated[ResourceLimits, rule(check_resources)] = ResourceLimits()
    optimize_mode: Annotated[
        OptimizeMode, msgspec.Meta(extra_json_schema={"enum": [*map(str, OptimizeMode), _MISSPELT_MANUAL]})
    ] = OptimizeMode.SINGLE_JOB
    """Who decides on resources: manual (the user), single-job (this job's master) or cluster (the service that
    brainService names). DLRover's misspelt manunal is taken for manual."""
    brain_service: str = ""
    """The address of the service that decides when optimizeMode is cluster."""
    envs: Annotated[dict[str, EnvVar], rule(_check_env)] = {}
    """Variables of every node, by name; where a template has one of the same name, the template's counts."""
    suspend: bool = False
    """Let go of all nodes and keep the job; it goes on where it was when this is false again."""
    enable_elastic_scheduling: bool | None = None
    """Whether the job may scale itself at all; true unless given."""
    enable_dynamic_sharding: bool | None = None
    """Read and without effect: shards are dealt to whoever asks for them."""


class Condition(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, rename="camel"):
    """One entry of a job's history."""

    type: JobPhase
    """The phase that it tells of."""
    status: str
    """True while the job is in that phase, else False."""
    reason: str = ""
    """One word that programs can rely on, such as JobRunning."""
    message: str = ""
    """One sentence for people."""
    last_update_time: str = ""
    """When the entry was last written."""
    last_transition_time: str = ""
    """When its status last changed."""


class ReplicaStatus(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, rename="camel"):
    """How many nodes of a role are in which state."""

    initial: int = 0
    """Asked for, and nothing seen of them yet."""
    pending: int = 0
    """Not running yet: without room, or starting."""
    active: int = 0
    """Running."""
    succeeded: int = 0
    """Ended well."""
    failed: int = 0
    """Ended badly."""
    label_selector: str = ""
    """Finds the pods of the role."""


class JobProgress(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, rename="camel"):
    """The part of a job's status that DLRover has too, under DLRover's names."""

    conditions: tuple[Condition, ...] = ()
    """The job's history, one entry for each phase that it was in."""
    replica_statuses: dict[str, ReplicaStatus] = {}
    """The nodes by role."""
    start_time: str = ""
    """When the first node was asked for."""
    completion_time: str = ""
    """When the job ended."""
    last_reconcile_time: str = ""
    """When the operator last looked at the job."""


class StepProgress(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, rename="camel"):
    """How far training is."""

    step: int | None = None
    """The number of steps completed; absent before the first."""
    total: int = 0
    """The last step there will be, if the script says."""
    speed: float = 0.0
    """Steps per second over the last minute."""
    round: int = 0
    """Which agreed membership trains; every regrouping makes a new one."""
    members: int = 0
    """How many nodes are in it."""


class LastFailure(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, rename="camel"):
    """The newest thing that went wrong, also when the job has long recovered."""

    node: str = ""
    """The pod that it happened to; absent when it is the whole job."""
    reason: str = ""
    """One word that programs can rely on, such as OOMKilled."""
    message: str = ""
    """What happened, in one sentence."""
    time: str = ""
    """When it was noticed."""
    exit_code: int | None = None
    """Of the process, if one ended; 128 + n after signal n."""


class ElasticJobStatus(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, rename="camel"):
    """What has become of the job. The nesting `status.status` is DLRover's."""

    phase: JobPhase | None = None
    """Where the job is."""
    reason: str = ""
    """Why it is there, in one word that programs can rely on."""
    message: str = ""
    """Why it is there, or what keeps it from going on, in one sentence."""
    status: JobProgress = JobProgress()
    scale_plan: str = ""
    """The name of the plan being executed."""
    progress: StepProgress | None = None
    goodput: float | None = None
    """The share of the job's time that went into steps that count, from 0 to 1."""
    restarts: int = 0
    """How often a node was replaced or its training processes started again."""
    last_failure: LastFailure | None = None
    observed_generation: int = 0
    """The generation of the spec that this status speaks of."""


class ElasticJob(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """One elastic training job: its nodes are replaced when they fail and may become more or fewer while it trains."""

    metadata: Annotated[Metadata, rule(_check_metadata, properties={"name": _NAME_SCHEMA})]
    spec: ElasticJobSpec
    status: ElasticJobStatus = ElasticJobStatus()
