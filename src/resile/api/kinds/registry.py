"""The list of all kinds of jobs and plans; a new kind is added here.

No other package names a kind: everything that differs between kinds is a method of the objects here (`base.py`).
"""

from __future__ import annotations

from typing import Any

from resile.api.job import JobSpec
from resile.api.kinds.base import BaseJobKind, JobKind, PlanKind, ResourceKind
from resile.api.kinds.elasticjob.kind import ELASTIC_JOB
from resile.api.kinds.run.kind import RUN
from resile.api.kinds.scaleplan.kind import SCALE_PLAN

JOB_KINDS: tuple[JobKind, ...] = (ELASTIC_JOB,)
"""The kinds of custom resources that describe jobs; the first is the default."""
PLAN_KINDS: tuple[PlanKind, ...] = (SCALE_PLAN,)
WITHOUT_RESOURCE: tuple[BaseJobKind, ...] = (RUN,)


def kinds() -> tuple[ResourceKind, ...]:
    return (*JOB_KINDS, *PLAN_KINDS)


def kind_of(item: dict[str, Any]) -> ResourceKind | None:
    """The kind of a manifest; None if no registered kind has its `apiVersion` and `kind`."""
    named = (item.get("apiVersion"), item.get("kind"))
    return next((one for one in kinds() if (one.definition.api_version, one.definition.kind) == named), None)


def job_kind_of(item: dict[str, Any]) -> JobKind:
    """The kind of the manifest of a job; raises `LookupError` for any other manifest."""
    kind = kind_of(item)
    if not isinstance(kind, JobKind):
        raise LookupError(f"{item.get('kind')} is no kind of job")
    return kind


def kind_of_resource(resource: Any) -> ResourceKind:
    return next(one for one in kinds() if one.definition.type is type(resource))


def kind_of_job(spec: JobSpec) -> BaseJobKind:
    """The kind of a job; raises `KeyError` if this version does not know the kind."""
    kinds: tuple[BaseJobKind, ...] = (*JOB_KINDS, *WITHOUT_RESOURCE)
    return {kind.name: kind for kind in kinds}[spec.kind]


def job_kind(name: str) -> JobKind:
    """The kind of job with this name; raises `KeyError` for `run`, whose jobs have no custom resource."""
    return {kind.name: kind for kind in JOB_KINDS}[name]


def node_name(spec: JobSpec, role: str, node_id: int) -> str:
    return kind_of_job(spec).node_name(spec.name, role, node_id)
