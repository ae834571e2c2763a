"""The interface of a kind of job: implement it to let users describe jobs in another way.

A kind is one way in which users describe a job: a custom resource of a cluster (`JobKind`), or the flags of a command
(`BaseJobKind` alone). It translates what users wrote into a `JobSpec`, and it keeps the conventions that its users rely
on: names, labels, environment, status. Operator, master, platforms and command line get the kind of a job from
`registry.py` and ask it for all of these, so a new kind is one more package beside this module and one more line there.

Kinds have no state. Their methods take and return plain data: manifests are dictionaries as in YAML.
"""

from __future__ import annotations

import abc
import enum
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import msgspec

from resile.api.ids import NodeId, NodeKey, Rank
from resile.api.job import JobSpec, RoleSpec, RoleTraits
from resile.api.job_phase import JobPhase
from resile.api.job_report import JobReport
from resile.api.manifests.errors import BadManifest, ManifestErrors
from resile.api.manifests.metadata import Metadata
from resile.api.manifests.validation import read
from resile.api.plan import Plan

Manifest = dict[str, Any]


class Role(RoleTraits, frozen=True, kw_only=True):
    """A role that the jobs of a kind may have."""

    name: str
    """In the `JobSpec`, in the names of nodes and in labels."""

    def declared(self, **fields: Any) -> RoleSpec:
        """The role in a job; `fields` are those that a user decides about."""
        traits = {name: getattr(self, name) for name in RoleTraits.__struct_fields__}
        return RoleSpec(**traits, **fields)


class NodeSetting(msgspec.Struct, frozen=True, kw_only=True):
    """One node, as its environment describes it."""

    node: NodeKey
    rank: Rank
    replicas: int
    """How many nodes its role has."""
    master_address: str
    """`host:port`."""
    relaunch_count: int = 0
    """How many nodes had this rank before."""
    address: str = ""
    """Empty where the platform fills it in."""
    host_address: str = ""
    """The address of its machine; empty where the platform fills it in."""
    peers: Mapping[str, Sequence[str]] = {}
    """`host:port` of every rank by role, for a job whose nodes find each other by address."""


class BaseJobKind(abc.ABC):
    """What every kind of job defines, with or without a custom resource."""

    name: str
    """Kept in `JobSpec.kind`."""
    noun: str
    """What commands put before a job's name: `elasticjob/torch-mnist`."""
    roles: tuple[Role, ...]
    """In the order in which tables list them."""
    scaled_role: str
    """The role that a bare number of nodes means, as in `resile scale JOB 3`."""

    @abc.abstractmethod
    def node_name(self, job: str, role: str, node_id: int) -> str:
        """The name of a node, which is that of its pod."""

    @abc.abstractmethod
    def node_of(self, name: str, job: str) -> NodeKey | None:
        """Which node of `job` has this name; None if it is no node's name."""

    @abc.abstractmethod
    def master_name(self, job: str) -> str:
        """The name of a job's master: of its pod, and of what it has in a cluster."""

    @abc.abstractmethod
    def environment(self, spec: JobSpec, setting: NodeSetting) -> dict[str, str]:
        """The variables of one node, without any credential; they win over those that its user wrote."""

    def is_found_by_address(self, spec: JobSpec, role: str) -> bool:
        """Whether the ranks of a role have addresses that outlive their nodes, by which other nodes find them."""
        return False


class Column(msgspec.Struct, frozen=True):
    """One column of `kubectl get`."""

    name: str
    path: str
    type: str = "string"
    wide: bool = False
    """Shown only with `-o wide`."""
    text: str = ""


class Rule(msgspec.Struct, frozen=True):
    """What only CEL can say of the field at `path`; `self` is that field."""

    path: tuple[str, ...]
    expression: str
    message: str


class Definition(msgspec.Struct, frozen=True, kw_only=True):
    """A kind of resource, as a cluster is told of it."""

    group: str
    version: str
    kind: str
    plural: str
    short: str
    type: type
    """The fields; the text below each of them is what `kubectl explain` says."""
    columns: tuple[Column, ...]
    rules: tuple[Rule, ...] = ()
    scale: dict[str, str] | None = None
    """The paths of the scale subresource, if there is one."""

    @property
    def api_version(self) -> str:
        """`apiVersion` of a manifest."""
        return f"{self.group}/{self.version}"

    @property
    def name(self) -> str:
        """The name of the CustomResourceDefinition."""
        return f"{self.plural}.{self.group}"

    @property
    def words(self) -> tuple[str, ...]:
        """What a user may call the kind on a command line."""
        return (self.plural, self.kind.lower(), self.short)


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """An example for the folder `config/samples`."""

    comment: str
    manifest: Manifest


class Resource(Protocol):
    """A typed resource; its other fields are its kind's own."""

    @property
    def metadata(self) -> Metadata: ...


class ResourceKind(abc.ABC):
    """A kind of resource that users write."""

    definition: Definition

    def read(self, document: Manifest, errors: ManifestErrors) -> Resource | None:
        """The typed resource of a manifest without `apiVersion` and `kind`, or None if `errors` has grown."""
        before = errors.count
        resource: Resource | None = read(self.definition.type, document, errors)
        if resource is not None:
            self.check(resource, errors)
        return resource if errors.count == before else None

    @abc.abstractmethod
    def check(self, resource: Any, errors: ManifestErrors) -> None:
        """Collect the errors that only the whole resource shows."""

    @abc.abstractmethod
    def sample(self, image: str, namespace: str) -> Sample:
        """An example that runs on a fresh installation."""


class JobKind(BaseJobKind, ResourceKind):
    """A kind of resource that is a job."""

    @property
    def noun(self) -> str:  # type: ignore[override]
        """The kind as `kubectl` writes it before a slash."""
        return self.definition.kind.lower()

    @abc.abstractmethod
    def to_job_spec(self, resource: Any) -> JobSpec:
        """The job that a resource describes, complete; it shares nothing with the resource.

        Raises:
            BadManifest: the resource cannot be run.
        """

    @abc.abstractmethod
    def masters_part(self, item: Manifest) -> JobSpec:
        """What the pod of a master needs to know of a job whose manifest cannot be read as a whole."""

    def check(self, resource: Any, errors: ManifestErrors) -> None:
        """Collect what keeps the resource from becoming a job."""
        try:
            self.to_job_spec(resource)
        except BadManifest as bad:
            for error in bad.errors:
                errors.add(error.path, error.problem)

    # names and labels -----------------------------------------------------------------------------------------------

    @abc.abstractmethod
    def token_secret(self, job: str) -> str:
        """The name of the Secret that every node mounts: the token, and the certificate of the master."""

    @abc.abstractmethod
    def tls_secret(self, job: str) -> str:
        """The name of the Secret that the master alone mounts: its certificate and the key of it."""

    def master_host(self, job: str, namespace: str) -> str:
        """The name by which nodes call their master, and which its certificate must hold: its Service."""
        return f"{self.master_name(job)}.{namespace}.svc"

    @abc.abstractmethod
    def node_labels(
        self, job: str, *, role: str, node_id: NodeId, rank: Rank, relaunch_count: int = 0
    ) -> dict[str, str]:
        """The labels of a node's pod; laid over those of the user's template."""

    @abc.abstractmethod
    def master_labels(self, job: str, index: int = 0) -> dict[str, str]:
        """The labels of a master's pod; `index` counts the masters that the job has had."""

    @abc.abstractmethod
    def master_index_of(self, labels: Mapping[str, str]) -> int:
        """Which of the job's masters has these labels."""

    @abc.abstractmethod
    def master_object_labels(self, job: str) -> dict[str, str]:
        """The labels of what a master has in a cluster beside its pod."""

    @property
    @abc.abstractmethod
    def masters(self) -> dict[str, str]:
        """The labels that select the masters of all jobs of this kind."""

    @abc.abstractmethod
    def master_selector(self, job: str) -> dict[str, str]:
        """The labels that select the master's pod of a job."""

    @abc.abstractmethod
    def job_selector(self, job: str) -> dict[str, str]:
        """The labels that select everything of a job."""

    @abc.abstractmethod
    def role_selector(self, job: str, role: str) -> dict[str, str]:
        """The labels that select the pods of a role."""

    @abc.abstractmethod
    def rank_selector(self, job: str, role: str, rank: Rank) -> dict[str, str]:
        """The labels that select the pod that has a rank now."""

    @abc.abstractmethod
    def job_of(self, labels: Mapping[str, str]) -> str:
        """The job that a pod with these labels belongs to; empty for none."""

    @abc.abstractmethod
    def rank_of(self, labels: Mapping[str, str]) -> int:
        """The rank of a pod with these labels; 0 where it has none."""

    @abc.abstractmethod
    def relaunch_count_of(self, labels: Mapping[str, str]) -> int:
        """How many nodes had the rank of a pod with these labels before it."""

    def service_name(self, job: str, role: str, rank: Rank) -> str:
        """The Service of a rank, which outlives its nodes."""
        return self.node_name(job, role, rank)

    def service_addresses(self, spec: JobSpec, sizes: Mapping[str, int]) -> dict[str, list[str]]:
        """`host:port` of the Services of every rank, by role; `sizes` says how many ranks a role has."""
        return {
            role: [
                f"{self.service_name(spec.name, role, Rank(rank))}.{spec.namespace}.svc:{declared.port}"
                for rank in range(sizes.get(role, declared.replicas))
            ]
            for role, declared in spec.roles.items()
            if self.is_found_by_address(spec, role)
        }

    # what users change while a job runs -----------------------------------------------------------------------------

    @abc.abstractmethod
    def declared_roles(self, item: Manifest) -> list[str]:
        """The roles that a job's manifest names, except the master. The manifest may be wrong."""

    @abc.abstractmethod
    def scale_patch(self, sizes: Mapping[str, int]) -> Manifest:
        """The merge patch that gives roles other numbers of nodes."""

    @abc.abstractmethod
    def is_suspended(self, item: Manifest) -> bool:
        """Whether a job's manifest asks for a pause."""

    @abc.abstractmethod
    def suspend_patch(self, suspend: bool) -> Manifest:
        """The merge patch that pauses a job, or lets it go on."""

    # status ---------------------------------------------------------------------------------------------------------

    @abc.abstractmethod
    def phase_of(self, item: Manifest) -> JobPhase | None:
        """The phase in a job's status; None where there is none or this version does not know it."""

    @abc.abstractmethod
    def report_of(self, item: Manifest) -> JobReport:
        """What a job's status says, for readers; fields that it does not hold keep their defaults."""

    @abc.abstractmethod
    def conditions_of(self, item: Manifest) -> list[Manifest]:
        """The conditions in a job's status."""

    @abc.abstractmethod
    def write_status(self, report: JobReport, job: str, before: Manifest, now: float) -> Manifest:
        """The whole status as a master writes it; `before` is the status in the cluster, whose history goes on."""

    @abc.abstractmethod
    def phase_patch(self, item: Manifest, phase: JobPhase | None, reason: str, message: str, now: float) -> Manifest:
        """The merge patch of the status with which the operator puts a job into `phase`.

        None changes only what is said of the job.
        """


class PlanPhase(enum.StrEnum):
    """How far a plan has come."""

    CREATED = "Created"
    PENDING = "Pending"
    SCALING = "Scaling"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"

    @property
    def ended(self) -> bool:
        """Whether nothing more becomes of a plan in this phase."""
        return self in (PlanPhase.SUCCEEDED, PlanPhase.FAILED)


class PlanKind(ResourceKind):
    """A kind of resource that changes the nodes of a running job, once."""

    job_kind: JobKind
    """The kind of the jobs that its plans change."""

    @abc.abstractmethod
    def job_of(self, item: Manifest) -> str:
        """The job that a plan names, which need not be one that can be read; empty for none."""

    @abc.abstractmethod
    def to_plan(self, resource: Any, uid: str) -> Plan:
        """The change that a plan describes; `uid` is the plan's own."""

    @abc.abstractmethod
    def not_supported(self, resource: Any) -> str:
        """What of a plan this version cannot do, in one sentence; empty if it can do all of it."""

    @abc.abstractmethod
    def is_order(self, resource: Any) -> bool:
        """Whether a plan is to be executed; others are records of what a master did by itself."""

    @abc.abstractmethod
    def roles_of(self, resource: Any) -> set[str]:
        """The roles whose nodes a plan changes."""

    @abc.abstractmethod
    def phase_of(self, item: Manifest) -> PlanPhase | None:
        """The phase in a plan's status; None where there is none."""

    @abc.abstractmethod
    def write_status(self, item: Manifest, phase: PlanPhase, reason: str, message: str, now: float) -> Manifest:
        """The whole status of a plan that is in `phase` now."""

    def is_open(self, item: Manifest) -> bool:
        """Whether something may still become of a plan."""
        phase = self.phase_of(item)
        return phase is None or not phase.ended
