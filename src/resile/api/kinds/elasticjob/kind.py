"""The ElasticJob as a kind of job: DLRover's resource and all the conventions that its users rely on."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

from resile.api.ids import Rank
from resile.api.job import JobSpec, Strategy
from resile.api.kinds.base import Column, Definition, JobKind, Manifest, Rule, Sample
from resile.api.kinds.elasticjob import labels, names, status
from resile.api.kinds.elasticjob.environment import node_environment
from resile.api.kinds.elasticjob.resource import ElasticJob
from resile.api.kinds.elasticjob.roles import LEGACY_MASTER_ROLE, MASTER_ROLE, ROLE_NAMES, ROLES, WORKER
from resile.api.kinds.elasticjob.to_job_spec import NAME, to_job_spec
from resile.api.manifests.errors import ManifestErrors
from resile.api.manifests.pod_template import MAIN

_SAMPLE = """\
Two workers that step together for a quarter of an hour: kubectl apply -f config/samples/elasticjob.yaml"""

_HAS_NODES = " || ".join(
    f"(has(self.{role}) && (!has(self.{role}.replicas) || self.{role}.replicas > 0))" for role in ROLE_NAMES
)
_WORKERS = f".status.status.replicaStatuses.{WORKER.name}"


class ElasticJobKind(JobKind):
    name = NAME
    roles = ROLES
    scaled_role = WORKER.name
    masters = labels.MASTERS
    definition = Definition(
        group="elastic.iml.github.io",
        version="v1alpha1",
        kind="ElasticJob",
        plural="elasticjobs",
        short="ej",
        type=ElasticJob,
        columns=(
            Column("Phase", ".status.phase"),
            Column("Age", ".metadata.creationTimestamp", type="date"),
            Column("Workers", f"{_WORKERS}.active", "integer", wide=True, text="Running."),
            Column("Step", ".status.progress.step", "integer", wide=True, text="The number of steps completed."),
            Column(
                "Goodput", ".status.goodput", "number", wide=True, text="The share of time that went into training."
            ),
            Column(
                "Restarts", ".status.restarts", "integer", wide=True, text="Nodes replaced and processes restarted."
            ),
            Column("Reason", ".status.reason", wide=True, text="Why the job is in its phase."),
        ),
        rules=(
            Rule(("spec", "distributionStrategy"), "self == oldSelf", "cannot be changed; submit another job"),
            Rule(("spec", "replicaSpecs"), _HAS_NODES, "must have a role with replicas of 1 or more"),
            Rule(
                ("spec", "replicaSpecs"),
                "!(has(self.dlrover__dash__master) && has(self.master))",
                f"{LEGACY_MASTER_ROLE} is the old name of {MASTER_ROLE}; give one of the two",
            ),
        ),
        scale={
            "specReplicasPath": f".spec.replicaSpecs.{WORKER.name}.replicas",
            "statusReplicasPath": f"{_WORKERS}.active",
            "labelSelectorPath": f"{_WORKERS}.labelSelector",
        },
    )

    node_name = staticmethod(names.node_name)
    node_of = staticmethod(names.node_of)
    master_name = staticmethod(names.master_name)
    token_secret = staticmethod(names.token_secret)
    tls_secret = staticmethod(names.tls_secret)
    node_labels = staticmethod(labels.node_labels)
    master_labels = staticmethod(labels.master_labels)
    environment = staticmethod(node_environment)
    phase_of = staticmethod(status.phase_of)
    report_of = staticmethod(status.report_of)
    conditions_of = staticmethod(status.conditions_of)
    write_status = staticmethod(status.write_status)
    phase_patch = staticmethod(status.phase_patch)

    def to_job_spec(self, resource: Any) -> JobSpec:
        return to_job_spec(resource)

    def master_index_of(self, pod_labels: Mapping[str, str]) -> int:
        return _number(pod_labels.get(labels.REPLICA_INDEX))

    def master_object_labels(self, job: str) -> dict[str, str]:
        return {key: value for key, value in labels.master_labels(job).items() if "index" not in key}

    def master_selector(self, job: str) -> dict[str, str]:
        return labels.role_selector(job, MASTER_ROLE)

    def job_selector(self, job: str) -> dict[str, str]:
        return {labels.PREFIXED_JOB_NAME: job}

    def rank_selector(self, job: str, role: str, rank: Rank) -> dict[str, str]:
        return {**labels.role_selector(job, role), labels.PREFIXED_RANK_INDEX: str(rank)}

    def job_of(self, pod_labels: Mapping[str, str]) -> str:
        return pod_labels.get(labels.PREFIXED_JOB_NAME, "")

    def rank_of(self, pod_labels: Mapping[str, str]) -> int:
        return _number(pod_labels.get(labels.PREFIXED_RANK_INDEX))

    def relaunch_count_of(self, pod_labels: Mapping[str, str]) -> int:
        return _number(pod_labels.get(labels.PREFIXED_RELAUNCH_COUNT))

    def is_found_by_address(self, spec: JobSpec, role: str) -> bool:
        return spec.strategy is Strategy.PARAMETER_SERVER

    def declared_roles(self, item: Manifest) -> list[str]:
        given = (item.get("spec") or {}).get("replicaSpecs") or {}
        return [role for role in given if role in ROLE_NAMES]

    def scale_patch(self, sizes: Mapping[str, int]) -> Manifest:
        return {"spec": {"replicaSpecs": {role: {"replicas": number} for role, number in sizes.items()}}}

    def is_suspended(self, item: Manifest) -> bool:
        return bool((item.get("spec") or {}).get("suspend"))

    def suspend_patch(self, suspend: bool) -> Manifest:
        return {"spec": {"suspend": suspend}}

    def masters_part(self, item: Manifest) -> JobSpec:
        """Make a dummy job with one worker. It has the user's changes to the master's pod, unless they have errors."""
        master = None
        with contextlib.suppress(LookupError, TypeError):  # any part of the manifest may be missing, or something else
            master = item["spec"]["replicaSpecs"][MASTER_ROLE]
        metadata = {field: item["metadata"][field] for field in ("name", "namespace", "uid")}
        template = {"spec": {"containers": [{"name": MAIN, "image": "none", "command": ["true"]}]}}
        worker = {"replicas": 1, "template": template}
        for part in ({MASTER_ROLE: master}, {}):
            bare = {"distributionStrategy": Strategy.ALLREDUCE.value, "replicaSpecs": {**part, WORKER.name: worker}}
            read = self.read({"metadata": metadata, "spec": bare}, ManifestErrors())
            if read is not None:
                return self.to_job_spec(read)
        raise AssertionError("a job without anything of its user's cannot be wrong")

    def sample(self, image: str, namespace: str) -> Sample:
        container = {
            "name": MAIN,
            "image": image,
            "imagePullPolicy": "IfNotPresent",
            "command": ["/bin/bash", "-c", "dlrover-run --nnodes=1:$NODE_NUM examples/hello.py --steps 9000"],
        }
        worker = {"replicas": 2, "restartCount": 3, "template": {"spec": {"containers": [container]}}}
        manifest = {
            "apiVersion": self.definition.api_version,
            "kind": self.definition.kind,
            "metadata": {"name": "sample", "namespace": namespace},
            "spec": {"distributionStrategy": Strategy.ALLREDUCE.value, "replicaSpecs": {WORKER.name: worker}},
        }
        return Sample(comment=_SAMPLE, manifest=manifest)


def _number(text: Any) -> int:
    return int(text) if isinstance(text, str) and text.isdigit() else 0


ELASTIC_JOB = ElasticJobKind()
