"""Reads manifests: text, or objects as a cluster returns them, into typed resources, telling every error at once."""

from __future__ import annotations

from typing import Any

from resile.api.kinds.elasticjob import KIND as ELASTIC_JOB
from resile.api.kinds.elasticjob import ElasticJob
from resile.api.kinds.scaleplan import KIND as SCALE_PLAN
from resile.api.kinds.scaleplan import ScalePlan
from resile.api.kinds.to_job_spec import to_job_spec
from resile.api.manifests.checks import read
from resile.api.manifests.errors import BadManifest, ManifestError, ManifestErrors, listed, shown
from resile.api.manifests.metadata import API_VERSION

Resource = ElasticJob | ScalePlan

KINDS = (ELASTIC_JOB, SCALE_PLAN)


def load_manifests(text: str | bytes) -> list[Resource]:
    """Read every document of a YAML text; empty documents between others are passed over, as by kubectl.

    Raises:
        BadManifest: with all errors of all documents; nothing of the text is to be used then.
    """
    from resile.api.manifests.documents import load_documents  # PyYAML takes 20 ms to import

    documents = load_documents(text)
    if not documents:
        raise BadManifest([ManifestError("", f"the manifest is empty; it must hold an {listed(KINDS)}")])
    resources: list[Resource] = []
    found: list[ManifestError] = []
    for number, document in enumerate(documents, start=1):
        errors = ManifestErrors(f"document {number}" if len(documents) > 1 else "")
        resource = _read(document, errors)
        found.extend(errors.found())
        if resource is not None:
            resources.append(resource)
    if found:
        raise BadManifest(found)
    return resources


def read_manifest(document: Any) -> Resource:
    """Read one object that is plain data already, such as a cluster's answer.

    Raises:
        BadManifest: with all its errors.
    """
    errors = ManifestErrors()
    resource = _read(document, errors)
    if resource is None:
        raise BadManifest(errors.found())
    return resource


def _read(document: Any, errors: ManifestErrors) -> Resource | None:
    if not isinstance(document, dict):
        errors.add("", f"a manifest must be a mapping with apiVersion, kind, metadata and spec, not {shown(document)}")
        return None
    version, kind = document.get("apiVersion"), document.get("kind")
    if version != API_VERSION:
        errors.add("apiVersion", f"must be {API_VERSION}, not {shown(version)}")
    if kind not in KINDS:
        errors.add("kind", f"must be {listed(KINDS)}, not {shown(kind)}")
        return None
    rest = {field: value for field, value in document.items() if field not in ("apiVersion", "kind")}
    if kind == ELASTIC_JOB:
        return _read_job(rest, errors)
    return _read_plan(rest, errors)


def _read_job(document: dict[Any, Any], errors: ManifestErrors) -> ElasticJob | None:
    job = read(ElasticJob, document, errors)
    if job is None:
        return None
    try:
        to_job_spec(job)
    except BadManifest as bad:
        for error in bad.errors:
            errors.add(error.path, error.problem)
    return None if errors else job


def _read_plan(document: dict[Any, Any], errors: ManifestErrors) -> ScalePlan | None:
    plan = read(ScalePlan, document, errors)
    if plan is not None:
        plan.check(errors)
    return None if errors else plan
