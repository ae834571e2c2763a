"""The ScalePlan as a kind of plan: DLRover's resource, for ElasticJobs."""

from __future__ import annotations

from typing import Any

from resile.api.ids import Rank
from resile.api.kinds.base import Column, Definition, Manifest, PlanKind, PlanPhase, Rule, Sample
from resile.api.kinds.elasticjob.kind import ELASTIC_JOB
from resile.api.kinds.elasticjob.labels import JOB_LABELS, JOB_NAME, SCALE_TYPE
from resile.api.kinds.elasticjob.names import node_name
from resile.api.kinds.elasticjob.roles import PS, ROLE_NAMES, WORKER
from resile.api.kinds.scaleplan.resource import PodMeta, ScalePlan, ScaleType, job_named
from resile.api.manifests.errors import ManifestErrors, shown
from resile.api.manifests.pod_template import is_gpu, read_resources
from resile.api.plan import Migration, NewNode, NodeResources, Plan, RoleChange
from resile.api.timestamps import stamp

_SAMPLE = """\
A third worker for the job of elasticjob.yaml, while it trains. `kubectl scale elasticjob/sample --replicas=3` does the
same."""


class ScalePlanKind(PlanKind):
    job_kind = ELASTIC_JOB
    definition = Definition(
        group=ELASTIC_JOB.definition.group,
        version=ELASTIC_JOB.definition.version,
        kind="ScalePlan",
        plural="scaleplans",
        short="sp",
        type=ScalePlan,
        columns=(
            Column("Phase", ".status.phase"),
            Column("Age", ".metadata.creationTimestamp", type="date"),
            Column("Job", ".spec.ownerJob", wide=True, text="The job to change."),
            Column("Message", ".status.message", wide=True, text="Why it failed, or what it waits for."),
        ),
        rules=(
            Rule(("spec", "ownerJob"), "self == oldSelf", "cannot be changed; write another plan"),
            Rule(
                ("spec", "replicaResourceSpecs"),
                f"self.all(role, role in [{', '.join(map(repr, ROLE_NAMES))}])",
                f"the roles are {', '.join(ROLE_NAMES)}",
            ),
        ),
    )

    def check(self, resource: ScalePlan, errors: ManifestErrors) -> None:
        """Add errors about the plan as a whole: it names no job, or two jobs, or a pod of another job."""
        if not resource.job:
            errors.add("spec.ownerJob", "must be given")
            return
        for label in JOB_LABELS:
            job = resource.metadata.labels.get(label, resource.job)
            if job != resource.job:
                errors.add(f"metadata.labels.{label}", f"must be {resource.job} like spec.ownerJob, not {shown(job)}")
        for field, pods in (("removePods", resource.spec.remove_pods), ("migratePods", resource.spec.migrate_pods)):
            for at, pod in enumerate(pods):
                if pod.name and pod.node(resource.job) is None:
                    such = node_name(resource.job, PS.name, 0)
                    problem = f"must be a pod of the job such as {such}, not {shown(pod.name)}"
                    errors.add(f"spec.{field}[{at}].name", problem)

    def sample(self, image: str, namespace: str) -> Sample:
        labels = {JOB_NAME: "sample", SCALE_TYPE: ScaleType.MANUAL.value}
        manifest = {
            "apiVersion": self.definition.api_version,
            "kind": self.definition.kind,
            "metadata": {"name": "sample-plan", "namespace": namespace, "labels": labels},
            "spec": {"ownerJob": "sample", "replicaResourceSpecs": {WORKER.name: {"replicas": 3}}},
        }
        return Sample(comment=_SAMPLE, manifest=manifest)

    def job_of(self, item: Manifest) -> str:
        owner = (item.get("spec") or {}).get("ownerJob") or ""
        return str(job_named(owner, item["metadata"].get("labels") or {}))

    def to_plan(self, resource: ScalePlan, uid: str) -> Plan:
        """The plan that a checked resource describes; an entry that names no node of the job is left out."""
        spec, job = resource.spec, resource.job
        return Plan(
            name=resource.metadata.name,
            uid=uid,
            roles={
                role: RoleChange(replicas=one.replicas, resources=_resources(one.resource))
                for role, one in spec.replica_resource_specs.items()
            },
            create=tuple(_new_node(pod, job) for pod in spec.create_pods),
            remove=tuple(node for pod in spec.remove_pods if (node := pod.node(job)) is not None),
            migrate=tuple(
                Migration(node=node, resources=_resources(pod.resource))
                for pod in spec.migrate_pods
                if (node := pod.node(job)) is not None
            ),
        )

    def not_supported(self, resource: ScalePlan) -> str:
        if resource.spec.ps_hosts:
            return "spec.psHosts: parameter servers are moved in a later version; leave it out"
        return ""

    def is_order(self, resource: ScalePlan) -> bool:
        return resource.scale_type is ScaleType.MANUAL

    def roles_of(self, resource: ScalePlan) -> set[str]:
        spec = resource.spec
        named = {pod.node(resource.job) for pod in (*spec.remove_pods, *spec.migrate_pods)}
        return {
            *spec.replica_resource_specs,
            *(pod.type.value for pod in spec.create_pods if pod.type is not None),
            *(node.role for node in named if node is not None),
        }

    def phase_of(self, item: Manifest) -> PlanPhase | None:
        try:
            return PlanPhase((item.get("status") or {}).get("phase") or "")
        except ValueError:
            return None

    def write_status(self, item: Manifest, phase: PlanPhase, reason: str, message: str, now: float) -> Manifest:
        before = item.get("status") or {}
        told: Manifest = {"createTime": stamp(now), **before, "phase": phase.value, "reason": reason}
        told.pop("message", None)
        if message:
            told["message"] = message
        if phase.ended:
            told["finishTime"] = stamp(now)
        return told


def _new_node(pod: PodMeta, job: str) -> NewNode:
    """The `NewNode` for an entry of `createPods`. The entry's id is ignored, because every new node gets a new id."""
    named = pod.node(job)
    role = pod.type.value if pod.type is not None else named.role if named is not None else WORKER.name
    return NewNode(
        role=role, rank=None if pod.rank_index is None else Rank(pod.rank_index), resources=_resources(pod.resource)
    )


def _resources(given: dict[str, Any]) -> NodeResources:
    amounts = read_resources(given)
    gpu = amounts.gpu if any(is_gpu(name) for name in given) else None
    return NodeResources(memory=amounts.memory, cpu=amounts.cpu, gpu=gpu)


SCALE_PLAN = ScalePlanKind()
