"""The ScalePlan resource: a change to the nodes of a running job, field by field as DLRover's.

A plan of type `manual` comes from a user and is executed by the job's master; one of type `auto` is a record of what
the master decided by itself.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Annotated, Any

import msgspec

from resile.api.ids import NodeId, NodeKey
from resile.api.kinds.base import PlanPhase
from resile.api.kinds.elasticjob.labels import JOB_LABELS, SCALE_TYPE
from resile.api.kinds.elasticjob.names import node_of
from resile.api.kinds.elasticjob.resource import Count, Quantity
from resile.api.kinds.elasticjob.roles import CHIEF, EVALUATOR, PS, ROLE_NAMES, WORKER
from resile.api.manifests.errors import ManifestErrors, listed, shown, under
from resile.api.manifests.metadata import Metadata
from resile.api.manifests.name_rules import MAX_OBJECT_NAME, OBJECT_NAMES, check_object_name
from resile.api.manifests.pod_template import check_resources
from resile.api.manifests.validation import matching, rule


class ScaleType(enum.StrEnum):
    """Whether a user wrote a plan, or a master recorded what it did."""

    MANUAL = "manual"
    AUTO = "auto"


class Role(enum.StrEnum):
    """The roles whose nodes a plan can change."""

    CHIEF = CHIEF.name
    WORKER = WORKER.name
    PS = PS.name
    EVALUATOR = EVALUATOR.name


ResourceList = Annotated[dict[str, Quantity], rule(check_resources)]


class ReplicaResourceSpec(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, rename="camel"):
    """How many nodes a role shall have and what each of them gets; what is not given stays as it is."""

    replicas: Count | None = None
    """How many nodes the role shall have."""
    resource: ResourceList = {}
    """What each new node gets, such as cpu and memory, laid over the requests of its template. Nodes that run stay as
    they are; migratePods changes those."""


def _check_pod(value: dict[str, Any], path: str, errors: ManifestErrors) -> None:
    if "name" not in value and not ("type" in value and "id" in value):
        errors.add(path, "must name a pod by its name, or by its type and id")


class PodMeta(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, rename="camel"):
    """One pod that a plan creates, removes or migrates. For a pod to create, every field is optional."""

    name: str = ""
    """The pod's name; type and id are an equal way to name it."""
    id: Annotated[int, msgspec.Meta(ge=0)] | None = None
    """The number at the end of the pod's name."""
    type: Role | None = None
    """The pod's role."""
    rank_index: Annotated[int, msgspec.Meta(ge=0)] | None = None
    """The place that the pod fills."""
    service: str = ""
    """The address of the pod's Service."""
    resource: ResourceList = {}
    """What the new pod gets, such as cpu and memory."""

    def node(self, job: str) -> NodeKey | None:
        """The node of `job` that this entry names; None if it names no node of `job`."""
        if self.name:
            return node_of(self.name, job)
        if self.type is None or self.id is None:
            return None
        return NodeKey(self.type.value, NodeId(self.id))


NamedPod = Annotated[PodMeta, rule(_check_pod, anyOf=[{"required": ["name"]}, {"required": ["type", "id"]}])]


class ScalePlanSpec(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, rename="camel"):
    """The change to the nodes of a job."""

    owner_job: str = ""
    """The job to change; without it the label elasticjob-name names the job."""
    replica_resource_specs: Annotated[
        dict[str, ReplicaResourceSpec], msgspec.Meta(extra_json_schema={"maxProperties": len(ROLE_NAMES)})
    ] = {}
    """By role (worker, ps, chief or evaluator), how many nodes there shall be."""
    create_pods: tuple[PodMeta, ...] = ()
    """Nodes to add, each at its rankIndex, or at the lowest free rank."""
    remove_pods: tuple[NamedPod, ...] = ()
    """Nodes to let go; their role has so many fewer."""
    migrate_pods: tuple[NamedPod, ...] = ()
    """Nodes to replace by new ones with the resources given here; an old one leaves when its new one has taken over."""
    ps_hosts: tuple[str, ...] = ()
    """The addresses of the parameter servers after the change. Refused: this version does not move them."""


class ScalePlanStatus(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, rename="camel"):
    """What has become of the plan."""

    phase: PlanPhase | None = None
    """How far the plan has come."""
    reason: str = ""
    """Why it is there, in one word that programs can rely on."""
    message: str = ""
    """Why it failed or what it waits for, in one sentence."""
    create_time: str = ""
    """When it was taken up."""
    finish_time: str = ""
    """When it was done, or given up."""


def _check_metadata(value: dict[str, Any], path: str, errors: ManifestErrors) -> None:
    if isinstance(value.get("name"), str):
        check_object_name(value["name"], under(path, "name"), errors)
    scale_type = value.get("labels", {}).get(SCALE_TYPE)
    if isinstance(scale_type, str) and scale_type not in list(ScaleType):
        at = under(under(path, "labels"), SCALE_TYPE)
        errors.add(at, f"must be {listed(ScaleType)}, not {shown(scale_type)}")


_CHANGES = ("replicaResourceSpecs", "createPods", "removePods", "migratePods", "psHosts")


def _check_spec(value: dict[str, Any], path: str, errors: ManifestErrors) -> None:
    if not any(value.get(change) for change in _CHANGES):
        errors.add(path, f"must ask for a change with {listed(_CHANGES)}")
    for role in value.get("replicaResourceSpecs", {}):
        if role not in ROLE_NAMES:
            errors.add(
                under(under(path, "replicaResourceSpecs"), role), f"unknown role; known are {listed(ROLE_NAMES)}"
            )


_NAME_SCHEMA = {"type": "string", "maxLength": MAX_OBJECT_NAME, "pattern": matching(OBJECT_NAMES)}


def job_named(owner_job: str, labels: Mapping[str, str]) -> str:
    """The job that a plan changes: `ownerJob`, else the job that the labels name; empty if neither is given."""
    return owner_job or next((labels[label] for label in JOB_LABELS if label in labels), "")


class ScalePlan(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """One change to the nodes of a running job, executed once."""

    metadata: Annotated[Metadata, rule(_check_metadata, properties={"name": _NAME_SCHEMA})]
    spec: Annotated[ScalePlanSpec, rule(_check_spec, anyOf=[{"required": [change]} for change in _CHANGES])]
    status: ScalePlanStatus = ScalePlanStatus()

    @property
    def job(self) -> str:
        return job_named(self.spec.owner_job, self.metadata.labels)

    @property
    def scale_type(self) -> ScaleType:
        """The type in the plan's label `scale-type`; `manual`, a user's plan, without the label."""
        return ScaleType(self.metadata.labels.get(SCALE_TYPE, ScaleType.MANUAL))
