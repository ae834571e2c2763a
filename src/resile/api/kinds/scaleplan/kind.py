"""The ScalePlan as a kind of plan: DLRover's resource, for ElasticJobs."""

from __future__ import annotations

from typing import Any

from resile.api.kinds.base import Column, Definition, Manifest, PlanKind, PlanPhase, Rule, Sample
from resile.api.kinds.elasticjob.kind import ELASTIC_JOB
from resile.api.kinds.elasticjob.labels import JOB_NAME, SCALE_TYPE
from resile.api.kinds.elasticjob.resource import GROUP, VERSION
from resile.api.kinds.elasticjob.roles import ROLE_NAMES, WORKER
from resile.api.kinds.scaleplan.resource import KIND, ScalePlan, ScaleType, job_named
from resile.api.kinds.scaleplan.to_plan import plan_of
from resile.api.manifests.errors import ManifestErrors
from resile.api.plan import Plan
from resile.api.timestamps import stamp

_SAMPLE = """\
A third worker for the job of elasticjob.yaml, while it trains. `kubectl scale elasticjob/sample --replicas=3` does the
same."""


class ScalePlanKind(PlanKind):
    job_kind = ELASTIC_JOB
    definition = Definition(
        group=GROUP,
        version=VERSION,
        kind=KIND,
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
        resource.check(errors)

    def sample(self, image: str, namespace: str) -> Sample:
        labels = {JOB_NAME: "sample", SCALE_TYPE: ScaleType.MANUAL.value}
        manifest = {
            "apiVersion": self.definition.api_version,
            "kind": KIND,
            "metadata": {"name": "sample-plan", "namespace": namespace, "labels": labels},
            "spec": {"ownerJob": "sample", "replicaResourceSpecs": {WORKER.name: {"replicas": 3}}},
        }
        return Sample(comment=_SAMPLE, manifest=manifest)

    def job_of(self, item: Manifest) -> str:
        owner = (item.get("spec") or {}).get("ownerJob") or ""
        return str(job_named(owner, item["metadata"].get("labels") or {}))

    def to_plan(self, resource: Any, uid: str) -> Plan:
        return plan_of(resource, uid)

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


SCALE_PLAN = ScalePlanKind()
