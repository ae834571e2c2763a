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
    """The name in the `JobSpec`, in the names of nodes and in labels."""

    def declared(self, **fields: Any) -> RoleSpec:
        """Make a `RoleSpec` with the traits of this role. `fields` are what `RoleSpec` has besides these traits."""
        traits = {name: getattr(self, name) for name in RoleTraits.__struct_fields__}
        return RoleSpec(**traits, **fields)


class NodeSetting(msgspec.Struct, frozen=True, kw_only=True):
    """The facts about one node from which a kind makes the node's environment variables."""

    node: NodeKey
    rank: Rank
    replicas: int
    """How many nodes the role of this node has."""
    master_address: str
    """The address of the job's master, `host:port`."""
    relaunch_count: int = 0
    """How many nodes had this rank before."""
    address: str = ""
    """The node's own address; empty if the platform sets the variable for it."""
    host_address: str = ""
    """The address of the node's machine; empty if the platform sets the variable for it."""
    peers: Mapping[str, Sequence[str]] = {}
    """`host:port` of every rank by role, for a job whose nodes find each other by address."""


class BaseJobKind(abc.ABC):
    """The roles, names and environment variables of a kind of job. A kind without a custom resource has only these."""

    name: str
    """The name of this kind, as in `JobSpec.kind`."""
    noun: str
    """The noun that commands put before a job's name: `elasticjob/torch-mnist`."""
    roles: tuple[Role, ...]
    """The roles that jobs of this kind may have, in the order in which tables list them."""
    scaled_role: str
    """The role whose number of nodes changes if the user names none, as in `resile scale JOB 3`."""

    @abc.abstractmethod
    def node_name(self, job: str, role: str, node_id: int) -> str:
        """The name of a node and of its pod."""

    @abc.abstractmethod
    def node_of(self, name: str, job: str) -> NodeKey | None:
        """The node of `job` that `name` names; None if it names no node of `job`."""

    @abc.abstractmethod
    def master_name(self, job: str) -> str:
        """The name of a job's master: of its pod, its Service and its other objects."""

    @abc.abstractmethod
    def environment(self, spec: JobSpec, setting: NodeSetting) -> dict[str, str]:
        """The environment variables of one node, without credentials. They override those of the user."""

    def is_found_by_address(self, spec: JobSpec, role: str) -> bool:
        """True if nodes find each rank of a role by a fixed address. A node that replaces another gets its address."""
        return False


class Column(msgspec.Struct, frozen=True):
    """One column of `kubectl get`."""

    name: str
    path: str
    type: str = "string"
    wide: bool = False
    """True if only `-o wide` shows the column."""
    text: str = ""


class Rule(msgspec.Struct, frozen=True):
    """A validation rule of a CRD for the field at `path`. `expression` is written in CEL, where `self` is the field."""

    path: tuple[str, ...]
    expression: str
    message: str


class Definition(msgspec.Struct, frozen=True, kw_only=True):
    """The definition of a custom resource, from which its CustomResourceDefinition is generated."""

    group: str
    version: str
    kind: str
    plural: str
    short: str
    type: type
    """The struct with the fields; `kubectl explain` shows the text below each field."""
    columns: tuple[Column, ...]
    rules: tuple[Rule, ...] = ()
    scale: dict[str, str] | None = None
    """The paths of the scale subresource; None if the resource has none."""

    @property
    def api_version(self) -> str:
        return f"{self.group}/{self.version}"

    @property
    def name(self) -> str:
        """The name of the CustomResourceDefinition."""
        return f"{self.plural}.{self.group}"

    @property
    def words(self) -> tuple[str, ...]:
        """The words that mean this kind on a command line: the plural, the singular and the short name."""
        return (self.plural, self.kind.lower(), self.short)


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    comment: str
    manifest: Manifest


class Resource(Protocol):
    """A manifest that was read into the struct of its kind."""

    @property
    def metadata(self) -> Metadata: ...


class ResourceKind(abc.ABC):
    """A kind of custom resource, for jobs or for plans: reads and checks its manifests."""

    definition: Definition

    def read(self, document: Manifest, errors: ManifestErrors) -> Resource | None:
        """Read a manifest without `apiVersion` and `kind`. If it has errors, adds them to `errors` and returns None."""
        before = len(errors)
        resource: Resource | None = read(self.definition.type, document, errors)
        if resource is not None:
            self.check(resource, errors)
        return resource if len(errors) == before else None

    @abc.abstractmethod
    def check(self, resource: Any, errors: ManifestErrors) -> None:
        """Check a resource as a whole. Adds to `errors` what the checks of single fields cannot find."""

    @abc.abstractmethod
    def sample(self, image: str, namespace: str) -> Sample:
        """An example manifest with a comment, for `config/samples`."""


class JobKind(BaseJobKind, ResourceKind):
    """A kind of custom resource that describes a job."""

    @property
    def noun(self) -> str:  # type: ignore[override]
        return self.definition.kind.lower()

    @abc.abstractmethod
    def to_job_spec(self, resource: Any) -> JobSpec:
        """The `JobSpec` of a resource; the two share no data. Raises `BadManifest` if the job cannot be run."""

    @abc.abstractmethod
    def masters_part(self, item: Manifest) -> JobSpec:
        """Make a `JobSpec` with only what the master's pod needs. The rest of the manifest may have errors."""

    def check(self, resource: Any, errors: ManifestErrors) -> None:
        try:
            self.to_job_spec(resource)
        except BadManifest as bad:
            for error in bad.errors:
                errors.add(error.path, error.problem)

    # names and labels -----------------------------------------------------------------------------------------------

    @abc.abstractmethod
    def token_secret(self, job: str) -> str:
        """The name of the Secret that every node mounts. It holds the token and the master's certificate."""

    @abc.abstractmethod
    def tls_secret(self, job: str) -> str:
        """The name of the Secret that only the master mounts. It holds the master's certificate and key."""

    def master_host(self, job: str, namespace: str) -> str:
        """The host name of the master's Service. Nodes connect to it, and the master's certificate is issued for it."""
        return f"{self.master_name(job)}.{namespace}.svc"

    @abc.abstractmethod
    def node_labels(
        self, job: str, *, role: str, node_id: NodeId, rank: Rank, relaunch_count: int = 0
    ) -> dict[str, str]:
        """The labels of a node's pod. They override those of the user's template."""

    @abc.abstractmethod
    def master_labels(self, job: str, index: int = 0) -> dict[str, str]:
        """The labels of a master's pod. `index` is 0 for the job's first master, 1 for the next, and so on."""

    @abc.abstractmethod
    def master_index_of(self, labels: Mapping[str, str]) -> int:
        """The `index` that `master_labels` put into the labels of a master's pod."""

    @abc.abstractmethod
    def master_object_labels(self, job: str) -> dict[str, str]:
        """The labels of all objects of a master except its pod, such as its Service."""

    @property
    @abc.abstractmethod
    def masters(self) -> dict[str, str]:
        """The labels that select the masters' objects (pods, Services) of all jobs of this kind."""

    @abc.abstractmethod
    def master_selector(self, job: str) -> dict[str, str]:
        """The labels that select the master's pod of a job."""

    @abc.abstractmethod
    def job_selector(self, job: str) -> dict[str, str]:
        """The labels that select all pods of a job, that of its master included."""

    @abc.abstractmethod
    def rank_selector(self, job: str, role: str, rank: Rank) -> dict[str, str]:
        """The labels that select the pod of the node that has this rank now."""

    @abc.abstractmethod
    def job_of(self, labels: Mapping[str, str]) -> str:
        """The job of a pod with these labels; empty if the pod belongs to no job."""

    @abc.abstractmethod
    def rank_of(self, labels: Mapping[str, str]) -> int:
        """The rank of a pod with these labels; 0 if the labels name no rank."""

    @abc.abstractmethod
    def relaunch_count_of(self, labels: Mapping[str, str]) -> int:
        """How many earlier nodes had the same rank as the node whose pod has these labels."""

    def service_name(self, job: str, role: str, rank: Rank) -> str:
        """The name of the Service of a rank. It stays the same when the node of the rank is replaced."""
        return self.node_name(job, role, rank)

    def service_addresses(self, spec: JobSpec, sizes: Mapping[str, int]) -> dict[str, list[str]]:
        """The address (`host:port`) of the Service of every rank, by role.

        `sizes` overrides the numbers of ranks in `spec`. Roles for which `is_found_by_address` is False are left out.
        """
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
        """The roles in a job's manifest, without the master. The manifest may have errors."""

    @abc.abstractmethod
    def scale_patch(self, sizes: Mapping[str, int]) -> Manifest:
        """The merge patch of a job's manifest that sets the number of nodes of each role in `sizes`."""

    @abc.abstractmethod
    def is_suspended(self, item: Manifest) -> bool:
        """True if a job's manifest asks to suspend the job."""

    @abc.abstractmethod
    def suspend_patch(self, suspend: bool) -> Manifest:
        """The merge patch of a job's manifest that suspends the job, or resumes it if `suspend` is False."""

    # status ---------------------------------------------------------------------------------------------------------

    @abc.abstractmethod
    def phase_of(self, item: Manifest) -> JobPhase | None:
        """The phase in a job's status; None if it has no phase, or one that this version does not know."""

    @abc.abstractmethod
    def report_of(self, item: Manifest) -> JobReport:
        """The `JobReport` in a job's status; fields that the status does not have keep their defaults."""

    @abc.abstractmethod
    def conditions_of(self, item: Manifest) -> list[Manifest]: ...

    @abc.abstractmethod
    def write_status(self, report: JobReport, job: str, before: Manifest, now: float) -> Manifest:
        """Make the complete status of a job from its master's report.

        `before` is the present status. Its conditions are kept, and updated to the report's phase at time `now`.
        """

    @abc.abstractmethod
    def phase_patch(self, item: Manifest, phase: JobPhase | None, reason: str, message: str, now: float) -> Manifest:
        """Make the merge patch that sets phase, reason and message in the status of the job `item`.

        If `phase` is None, the phase stays as it is. `now` is the time for the timestamps of the status.
        """


class PlanPhase(enum.StrEnum):
    CREATED = "Created"
    PENDING = "Pending"
    SCALING = "Scaling"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"

    @property
    def ended(self) -> bool:
        return self in (PlanPhase.SUCCEEDED, PlanPhase.FAILED)


class PlanKind(ResourceKind):
    """A kind of custom resource that describes a plan: one change to the nodes of a running job."""

    job_kind: JobKind
    """The kind of the jobs that plans of this kind change."""

    @abc.abstractmethod
    def job_of(self, item: Manifest) -> str:
        """The name of the job that a plan changes; empty if the plan names no job. The plan may have errors."""

    @abc.abstractmethod
    def to_plan(self, resource: Any, uid: str) -> Plan:
        """The plan that a resource describes; `uid` is the uid of the resource."""

    @abc.abstractmethod
    def not_supported(self, resource: Any) -> str:
        """One sentence about a field of the plan that this version cannot execute; empty if there is none."""

    @abc.abstractmethod
    def is_order(self, resource: Any) -> bool:
        """True if the master shall execute a plan; False if the plan only records what a master decided."""

    @abc.abstractmethod
    def roles_of(self, resource: Any) -> set[str]:
        """The roles whose nodes a plan changes."""

    @abc.abstractmethod
    def phase_of(self, item: Manifest) -> PlanPhase | None:
        """The phase in a plan's status; None if there is none."""

    @abc.abstractmethod
    def write_status(self, item: Manifest, phase: PlanPhase, reason: str, message: str, now: float) -> Manifest:
        """The complete status of the plan `item` in `phase`; `now` is the time for its timestamps."""

    def is_open(self, item: Manifest) -> bool:
        phase = self.phase_of(item)
        return phase is None or not phase.ended
