"""The CRDs: valid for an API server, as strict as the reading of manifests but never stricter, and self-explaining."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any

import msgspec
import pytest
import yaml

from resile.api.crd.generate import cel_patch, crd
from resile.api.crd.openapi import schema_of
from resile.api.defaults import MAX_REPLICAS
from resile.api.job_phase import JobPhase
from resile.api.kinds import registry
from resile.api.kinds.base import Definition, PlanPhase
from resile.api.kinds.elasticjob import kind as elasticjob
from resile.api.kinds.elasticjob.resource import (
    Condition,
    ElasticJobStatus,
    JobProgress,
    LastFailure,
    ReplicaStatus,
    StepProgress,
)
from resile.api.kinds.elasticjob.roles import ROLE_NAMES
from resile.api.kinds.scaleplan import kind as scaleplan
from resile.api.kinds.scaleplan.resource import ScalePlanStatus
from resile.api.manifests.errors import BadManifest
from resile.api.manifests.reader import read_manifest
from tests.api.manifests import bent, job, plan, pod
from tests.api.structural import CEL, fields, problems, refusals, root
from tests.support.paths import ROOT

DEFINITIONS = [kind.definition for kind in registry.kinds()]
ELASTIC_JOB, SCALE_PLAN = elasticjob.ELASTIC_JOB.definition, scaleplan.SCALE_PLAN.definition
REPOSITORY = ROOT
MANIFESTS = sorted(
    path
    for folder in ("examples", "config/samples")
    for path in (REPOSITORY / folder).rglob("*.yaml")
    if path.name != "kustomization.yaml"
)
NOW = "2026-01-31T12:00:00Z"

STATUS = ElasticJobStatus(
    phase=JobPhase.RUNNING,
    reason="JobRunning",
    message="3 of 4 workers train; torch-mnist-edljob-worker-3 waits for room",
    status=JobProgress(
        conditions=(
            Condition(
                type=JobPhase.RUNNING,
                status="True",
                reason=JobPhase.RUNNING.reason,
                message="the first step was taken",
                last_update_time=NOW,
                last_transition_time=NOW,
            ),
        ),
        replica_statuses={
            "worker": ReplicaStatus(initial=1, pending=1, active=3, succeeded=1, failed=1, label_selector="a=b")
        },
        start_time=NOW,
        completion_time=NOW,
        last_reconcile_time=NOW,
    ),
    scale_plan="plan-0",
    progress=StepProgress(step=0, total=600, speed=9.5, round=2, members=3),
    goodput=0.953,
    restarts=2,
    last_failure=LastFailure(
        node="torch-mnist-edljob-worker-1", reason="OOMKilled", message="out of memory", time=NOW, exit_code=137
    ),
    observed_generation=2,
)


def definition_of(manifest: dict[str, Any]) -> Definition:
    return {one.kind: one for one in DEFINITIONS}[manifest["kind"]]


def refused(manifest: dict[str, Any]) -> list[str]:
    return refusals(crd(definition_of(manifest)), manifest)


def at(schema: dict[str, Any], path: str) -> dict[str, Any]:
    """The schema of a field; a key of a mapping is any key."""
    for field in path.strip(".").split("."):
        schema = schema["properties"][field] if "properties" in schema else schema["additionalProperties"]
    return schema


# valid for an API server --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("definition", DEFINITIONS, ids=lambda one: one.kind)
def test_the_schema_is_structural(definition):
    assert list(problems(root(crd(definition)))) == []


@pytest.mark.parametrize("definition", DEFINITIONS, ids=lambda one: one.kind)
def test_of_the_metadata_nothing_but_the_name_is_restricted(definition):
    metadata = root(crd(definition))["properties"]["metadata"]
    assert metadata.keys() == {"type", "properties"}  # a description is refused as well
    assert metadata["properties"].keys() == {"name"}


@pytest.mark.parametrize("definition", DEFINITIONS, ids=lambda one: one.kind)
def test_nothing_is_there_that_old_clusters_do_not_know(definition):
    assert CEL not in yaml.safe_dump(crd(definition))
    assert CEL in yaml.safe_dump(crd(definition, cel=True))


def test_a_patch_brings_the_rules_in_cel_to_the_fields_they_speak_of():
    for definition in DEFINITIONS:
        patched = crd(definition)
        for operation in cel_patch(definition):
            assert operation["op"] == "add"
            *way, last = operation["path"].strip("/").split("/")
            target: Any = patched
            for step in way:
                target = target[int(step)] if isinstance(target, list) else target[step]
            target[last] = operation["value"]
        assert patched == crd(definition, cel=True)
        assert patched != crd(definition)


def test_the_rules_in_cel_speak_of_fields_that_exist():
    for definition in DEFINITIONS:
        for rule in definition.rules:
            schema = at(root(crd(definition)), ".".join(rule.path))
            for name in re.findall(r"has\(self\.([a-zA-Z_]+)", rule.expression):
                assert name.replace("__dash__", "-") in schema["properties"]
    roles = SCALE_PLAN.rules[-1]
    assert re.findall(r"'([a-z]+)'", roles.expression) == list(ROLE_NAMES)
    bounded = at(root(crd(SCALE_PLAN)), ".".join(roles.path))
    assert bounded["maxProperties"] == len(ROLE_NAMES)  # or an API server may find the rule too expensive


def test_a_type_that_no_schema_can_express_is_told():
    class Odd(msgspec.Struct):
        """One field of two types."""

        field: Annotated[int | bool, msgspec.Meta()]

    with pytest.raises(TypeError, match="structural schemas do not have"):
        schema_of(Odd)


# what kubectl shows -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("definition", DEFINITIONS, ids=lambda one: one.kind)
def test_every_field_is_explained_in_plain_sentences(definition):
    told = {path: field.get("description", "") for path, field in fields(root(crd(definition)))}
    mute = [path for path, text in told.items() if not text.endswith((".", "…")) and not path.startswith(".metadata")]
    assert mute == []
    assert not [path for path, text in told.items() if "`" in text or "\n" in text]


def test_jobs_are_listed_with_the_columns_of_the_tutorials_and_more_if_wide():
    for definition in DEFINITIONS:
        (version,) = crd(definition)["spec"]["versions"]
        columns = version["additionalPrinterColumns"]
        assert [one["name"] for one in columns if not one.get("priority")] == ["Phase", "Age"]
        assert columns[0] == {"name": "Phase", "type": "string", "jsonPath": ".status.phase"}
        assert columns[1] == {"name": "Age", "type": "date", "jsonPath": ".metadata.creationTimestamp"}
        for column in columns[2:]:
            assert column["priority"] == 1
            assert at(root(crd(definition)), column["jsonPath"])["type"] == column["type"]


def test_both_kinds_have_their_names():
    names = {one.kind: crd(one)["spec"]["names"] for one in DEFINITIONS}
    assert names["ElasticJob"] == {
        "kind": "ElasticJob",
        "listKind": "ElasticJobList",
        "plural": "elasticjobs",
        "singular": "elasticjob",
        "shortNames": ["ej"],
        "categories": ["resile"],
    }
    assert names["ScalePlan"]["plural"] == "scaleplans"
    assert crd(ELASTIC_JOB)["metadata"]["name"] == "elasticjobs.elastic.iml.github.io"


def test_kubectl_scale_finds_the_workers():
    (version,) = crd(ELASTIC_JOB)["spec"]["versions"]
    scale, schema = version["subresources"]["scale"], root(crd(ELASTIC_JOB))
    assert version["subresources"]["status"] == {}
    assert at(schema, scale["specReplicasPath"])["type"] == "integer"
    assert at(schema, scale["statusReplicasPath"])["type"] == "integer"
    assert at(schema, scale["labelSelectorPath"])["type"] == "string"


# what is let in, dropped and refused --------------------------------------------------------------------------------


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: str(path.relative_to(REPOSITORY)))
def test_every_example_is_accepted(path: Path):
    for document in yaml.safe_load_all(path.read_text()):
        assert refused(document) == []


@pytest.mark.parametrize(
    "manifest",
    [
        bent(job(), "spec.optimizeMode", "manunal"),
        bent(job(), "spec.resourceLimits", {"cpu": 15, "memory": "30000Mi", "gpu": "2"}),
        bent(job(), "spec.envs", {"A": {"value": "1"}, "B": {"valueFrom": {"fieldRef": {"fieldPath": "x"}}}}),
        *[bent(job(), "spec.replicaSpecs.worker.priority", text) for text in ("", "high", "low", "0.5", ".25", "1.0")],
        *[bent(job(), "spec.replicaSpecs.worker.criticalNodes", text) for text in ("", "all", "none", "0:3,1:3")],
        bent(job(), "spec.replicaSpecs.worker.BatchScheduler", "volcano"),
        bent(job(), "spec.replicaSpecs.dlrover-master", {"template": {"spec": {"containers": [{"name": "main"}]}}}),
        bent(job(), "spec.replicaSpecs.dlrover-master", {"template": {}}),
        bent(job(), "spec.replicaSpecs.worker.template", {**pod("x"), "metadata": {"annotations": {"a": "b"}}}),
        bent(job(), "metadata.name", "a" * 37),
        bent(job(), "metadata.finalizers", ["x/y"]),
        plan(removePods=[{"type": "worker", "id": 1}]),
        plan(createPods=[{}], psHosts=["a:1"]),
        plan(migratePods=[{"name": "torch-mnist-edljob-worker-1", "resource": {"cpu": 2, "nvidia.com/gpu": "1"}}]),
    ],
)
def test_what_reading_lets_pass_the_cluster_lets_pass(manifest):
    read_manifest(manifest)
    assert refused(manifest) == []


@pytest.mark.parametrize(
    ("manifest", "field"),
    [
        (bent(job(), "metadata.name", "a" * 38), "metadata.name"),
        (bent(job(), "metadata.name", "9a"), "metadata.name"),
        (bent(job(), "spec.optimizeMode", "nonsense"), "spec.optimizeMode"),
        (bent(job(), "spec.distributionStrategy", "Ring"), "spec.distributionStrategy"),
        (bent(job(), "spec.suspend", "yes"), "spec.suspend"),
        (bent(job(), "spec.replicaSpecs", {}), "spec.replicaSpecs"),
        (bent(job(), "spec.replicaSpecs", {"dlrover-master": {}}), "spec.replicaSpecs"),
        (job(replicaSpecs={"worker": {"template": pod()}, "dlrover-master": {}, "master": {}}), "spec.replicaSpecs"),
        (bent(job(), "spec.replicaSpecs.worker.replicas", -1), "spec.replicaSpecs.worker.replicas"),
        (bent(job(), "spec.replicaSpecs.worker.replicas", MAX_REPLICAS + 1), "spec.replicaSpecs.worker.replicas"),
        (bent(job(), "spec.replicaSpecs.worker.replicas", "2"), "spec.replicaSpecs.worker.replicas"),
        (bent(job(), "spec.replicaSpecs.worker.replica", 2), "spec.replicaSpecs.worker"),
        (bent(job(), "spec.replicaSpecs.worker.priority", "1.5"), "spec.replicaSpecs.worker.priority"),
        (bent(job(), "spec.replicaSpecs.worker.criticalNodes", "0-3"), "spec.replicaSpecs.worker.criticalNodes"),
        (bent(job(), "spec.replicaSpecs.worker.template", {}), "spec.replicaSpecs.worker.template"),
        (
            bent(job(), "spec.replicaSpecs.worker.template.spec.containers", []),
            "spec.replicaSpecs.worker.template.spec.containers",
        ),
        (bent(job(), "spec.resourceLimits", {"memory": "3 GB"}), "spec.resourceLimits.memory"),
        (plan(replicaResourceSpecs={"worker": {"replicas": -1}}), "spec.replicaResourceSpecs.worker.replicas"),
        (bent(plan(), "spec", {"ownerJob": "torch-mnist"}), "spec"),
        (plan(removePods=[{"id": 1}]), "spec.removePods.0"),
        (plan(createPods=[{"type": "boss"}]), "spec.createPods.0.type"),
    ],
)
def test_what_the_cluster_refuses_reading_refuses_as_well(manifest, field):
    assert [problem.partition(": ")[0] for problem in refused(manifest)] == [field]
    with pytest.raises(BadManifest):
        read_manifest(manifest)


def test_a_bare_fraction_must_be_quoted_on_a_cluster():
    manifest = bent(job(), "spec.resourceLimits", {"cpu": 0.5})
    read_manifest(manifest)
    assert refused(manifest) == ["spec.resourceLimits.cpu: 0.5 is not of type 'integer', 'string'"]
    assert refused(bent(manifest, "spec.resourceLimits.cpu", "0.5")) == []


def test_of_a_full_status_nothing_is_dropped():
    written = {**job(), "status": msgspec.json.decode(msgspec.json.encode(STATUS))}
    assert set(written["status"]) == {field.encode_name for field in msgspec.structs.fields(ElasticJobStatus)}
    assert refused(written) == []
    read = read_manifest(written)
    assert read.status == STATUS


def test_of_a_plans_status_nothing_is_dropped():
    status = ScalePlanStatus(
        phase=PlanPhase.FAILED, reason="UnknownJob", message="no job x", create_time=NOW, finish_time=NOW
    )
    written = {**plan(), "status": msgspec.json.decode(msgspec.json.encode(status))}
    assert set(written["status"]) == {field.encode_name for field in msgspec.structs.fields(ScalePlanStatus)}
    assert refused(written) == []
    assert read_manifest(written).status == status


def test_an_unknown_phase_is_refused():
    (problem,) = refused({**job(), "status": {"phase": "Sleeping"}})
    assert problem.startswith("status.phase: 'Sleeping' is not one of")


def test_only_defaults_that_say_something_are_stored():
    spec = root(crd(ELASTIC_JOB))["properties"]["spec"]["properties"]
    assert {name: field["default"] for name, field in spec.items() if "default" in field} == {
        "distributionStrategy": "ParameterServerStrategy",
        "optimizeMode": "single-job",
        "suspend": False,
    }
    assert not [path for path, field in fields(root(crd(SCALE_PLAN))) if "default" in field]
