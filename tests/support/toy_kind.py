"""A second kind of job, which only tests know: with other names, labels, roles and fields than the registered ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import pytest

from resile.api.ids import NodeId, NodeKey, Rank
from resile.api.job import JobSpec, Loss, RoleSpec
from resile.api.job_phase import JobPhase
from resile.api.job_report import JobReport
from resile.api.kinds import registry
from resile.api.kinds.base import Column, Definition, JobKind, Manifest, NodeSetting, Role, Sample
from resile.api.manifests.metadata import Metadata

TRAINER = Role(name="trainer", port=7000)
CACHE = Role(name="cache", trains=False, decides_end=False, loss=Loss.FATAL, failure="CacheError", port=7001)


class ToySpec(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """How large the toy is."""

    trainers: int
    """How many nodes train."""
    caches: int = 0
    """How many nodes hold data."""
    image: str = "toy"
    halted: bool = False


class ToyStatus(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, rename="camel"):
    """Where the toy is."""

    state: str = ""
    why: str = ""


class Toy(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """A job that is a toy."""

    metadata: Metadata
    spec: ToySpec
    status: ToyStatus = ToyStatus()


class ToyKind(JobKind):
    name = "toy"
    roles = (TRAINER, CACHE)
    scaled_role = "trainer"
    definition = Definition(
        group="toys.example.com",
        version="v1",
        kind="ToyJob",
        plural="toyjobs",
        short="tj",
        type=Toy,
        columns=(Column("State", ".status.state"),),
    )

    def to_job_spec(self, resource: Toy) -> JobSpec:
        spec, metadata = resource.spec, resource.metadata
        return JobSpec(
            name=metadata.name,
            namespace=metadata.namespace,
            uid=metadata.uid,
            kind=self.name,
            roles={
                role.name: self._declared(role, replicas, spec.image)
                for role, replicas in ((TRAINER, spec.trainers), (CACHE, spec.caches))
                if replicas
            },
            suspend=spec.halted,
        )

    def _declared(self, role: Role, replicas: int, image: str) -> RoleSpec:
        template = {"spec": {"containers": [{"name": "toy", "image": image, "command": ["play"]}]}}
        return role.declared(replicas=replicas, command=("play",), template=template)

    def masters_part(self, item: Manifest) -> JobSpec:
        metadata = item["metadata"]
        return JobSpec(name=metadata["name"], namespace=metadata["namespace"], uid=metadata["uid"], kind=self.name)

    def sample(self, image: str, namespace: str) -> Sample:
        return Sample(comment="A toy.", manifest=toy())

    def node_name(self, job: str, role: str, node_id: int) -> str:
        return f"{job}.{role}.{node_id}"

    def node_of(self, name: str, job: str) -> NodeKey | None:
        owner, _, rest = name.partition(".")
        role, _, number = rest.partition(".")
        return NodeKey(role, NodeId(int(number))) if owner == job and number.isdigit() else None

    def master_name(self, job: str) -> str:
        return f"{job}.master"

    def token_secret(self, job: str) -> str:
        return f"{job}.token"

    def tls_secret(self, job: str) -> str:
        return f"{job}.tls"

    def environment(self, spec: JobSpec, setting: NodeSetting) -> dict[str, str]:
        return {"TOY": spec.name, "TOY_RANK": str(setting.rank), "TOY_MASTER": setting.master_address}

    def is_found_by_address(self, spec: JobSpec, role: str) -> bool:
        return role == CACHE.name

    def node_labels(
        self, job: str, *, role: str, node_id: NodeId, rank: Rank, relaunch_count: int = 0
    ) -> dict[str, str]:
        return {"toy": job, "toy-role": role, "toy-rank": str(rank), "toy-again": str(relaunch_count)}

    def master_labels(self, job: str, index: int = 0) -> dict[str, str]:
        return {"toy": job, "toy-part": "master", "toy-index": str(index)}

    def master_index_of(self, labels: Mapping[str, str]) -> int:
        return int(labels.get("toy-index", 0))

    def master_object_labels(self, job: str) -> dict[str, str]:
        return self.master_selector(job)

    @property
    def masters(self) -> dict[str, str]:
        return {"toy-part": "master"}

    def master_selector(self, job: str) -> dict[str, str]:
        return {"toy": job, "toy-part": "master"}

    def job_selector(self, job: str) -> dict[str, str]:
        return {"toy": job}

    def rank_selector(self, job: str, role: str, rank: Rank) -> dict[str, str]:
        return {"toy": job, "toy-role": role, "toy-rank": str(rank)}

    def job_of(self, labels: Mapping[str, str]) -> str:
        return labels.get("toy", "")

    def rank_of(self, labels: Mapping[str, str]) -> int:
        return int(labels.get("toy-rank", 0))

    def relaunch_count_of(self, labels: Mapping[str, str]) -> int:
        return int(labels.get("toy-again", 0))

    def declared_roles(self, item: Manifest) -> list[str]:
        return ["trainer", "cache"]

    def scale_patch(self, sizes: Mapping[str, int]) -> Manifest:
        return {"spec": {f"{role}s": number for role, number in sizes.items()}}

    def is_suspended(self, item: Manifest) -> bool:
        return bool(item["spec"].get("halted"))

    def suspend_patch(self, suspend: bool) -> Manifest:
        return {"spec": {"halted": suspend}}

    def phase_of(self, item: Manifest) -> JobPhase | None:
        state = (item.get("status") or {}).get("state")
        return JobPhase(state) if state else None

    def report_of(self, item: Manifest) -> JobReport:
        status = item.get("status") or {}
        return JobReport(phase=self.phase_of(item) or JobPhase.CREATED, message=status.get("why", ""))

    def conditions_of(self, item: Manifest) -> list[Manifest]:
        return []

    def write_status(self, report: JobReport, job: str, before: Manifest, now: float) -> Manifest:
        return {"state": report.phase.value, "why": report.message}

    def phase_patch(self, item: Manifest, phase: JobPhase | None, reason: str, message: str, now: float) -> Manifest:
        return {"why": message, **({"state": phase.value} if phase else {})}


TOY = ToyKind()


def toy(**spec: Any) -> Manifest:
    return {
        "apiVersion": "toys.example.com/v1",
        "kind": "ToyJob",
        "metadata": {"name": "teddy", "namespace": "nursery", "uid": "uid-teddy"},
        "spec": {"trainers": 2, **spec},
    }


@pytest.fixture
def toys(monkeypatch: pytest.MonkeyPatch) -> ToyKind:
    """Register the kind: one more entry in the list is all that it takes."""
    monkeypatch.setattr(registry, "JOB_KINDS", (*registry.JOB_KINDS, TOY))
    return TOY
