"""Each wrong field gets its own sentence, word for word."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from resile.api.manifests.errors import MAX_ERRORS, BadManifest
from resile.api.manifests.reader import read_manifest
from tests.api.manifests import bent, job, plan, pod

WORKER = "spec.replicaSpecs.worker"
CONTAINER = f"{WORKER}.template.spec.containers.0"
NAMED = f"{WORKER}.template.spec.containers[0]"
ENDS = "starting and ending with a letter or digit"
JOB_NAME = "must be lower-case letters, digits and '-', starting with a letter and ending with a letter or digit"
DNS_LABEL = f"must be at most 63 lower-case letters, digits and '-', {ENDS}"
WHOLE = "must be a whole number of 0 or more"
QUANTITY = "must be a quantity of 0 or more such as 500m, 2, 0.5 or 4Gi"


def sentences(manifest: Any) -> list[str]:
    with pytest.raises(BadManifest) as caught:
        read_manifest(manifest)
    return [str(error) for error in caught.value.errors]


@pytest.mark.parametrize(
    ("path", "value", "sentence"),
    [
        ("apiVersion", "v1", "apiVersion: must be elastic.iml.github.io/v1alpha1, not 'v1'"),
        ("kind", "Pod", "kind: must be ElasticJob or ScalePlan, not 'Pod'"),
        ("kind", None, "kind: must be ElasticJob or ScalePlan, not nothing"),
        ("spce", {}, "spce: unknown field; did you mean spec?"),
        ("apiversion", "v1", "apiversion: unknown field; did you mean apiVersion?"),
        ("colour", 1, "colour: unknown field; known are apiVersion, kind, metadata, spec, status"),
        ("metadata", [], "metadata: must be a mapping, not a list"),
        ("metadata", None, "metadata: must be given"),
        ("spec", None, "spec: must be given"),
        ("metadata.name", None, "metadata.name: must be given"),
        ("metadata.name", 7, "metadata.name: must be text, not 7; put it in quotes"),
        (
            "metadata.name",
            "Torch_Mnist",
            f"metadata.name: {JOB_NAME}, not 'Torch_Mnist'",
        ),
        (
            "metadata.name",
            "7b",
            f"metadata.name: {JOB_NAME}, not '7b'",
        ),
        (
            "metadata.name",
            "a" * 38,
            "metadata.name: must be at most 37 characters so that elasticjob-<name>-dlrover-master fits into 63, "
            "not 38",
        ),
        (
            "metadata.namespace",
            "a.b",
            f"metadata.namespace: {DNS_LABEL}, not 'a.b'",
        ),
        ("metadata.nmae", "x", "metadata.nmae: unknown field; did you mean name?"),
        (
            "metadata.labels.team",
            "a b",
            f"metadata.labels.team: must be at most 63 letters, digits, '-', '_' and '.', {ENDS}, not 'a b'",
        ),
        (
            "metadata.labels.a b",
            "x",
            "metadata.labels.a b: is not a label's key: letters, digits, '-', '_', '.', after an optional prefix/",
        ),
        (
            "metadata.annotations.pending_timeout",
            900,
            "metadata.annotations.pending_timeout: must be text, not 900; put it in quotes",
        ),
        (
            "metadata.annotations.pending_timeout",
            "soon",
            "metadata.annotations.pending_timeout: must be a whole number of seconds, 0 for no limit, not 'soon'",
        ),
        (
            "metadata.annotations.pending_fail_strategy",
            "3",
            "metadata.annotations.pending_fail_strategy: must be -1, 0, 1 or 2, not '3'",
        ),
        (
            "metadata.annotations.service_type",
            "ftp",
            "metadata.annotations.service_type: must be grpc or http, not 'ftp'",
        ),
        (
            "metadata.annotations.training_elastic_mode",
            "x",
            "metadata.annotations.training_elastic_mode: must be base or ucp, not 'x'",
        ),
        (
            "metadata.annotations.pre_check_bypass",
            "perhaps",
            "metadata.annotations.pre_check_bypass: must be true or false, not 'perhaps'",
        ),
        (
            "metadata.annotations.enable_dashboard",
            "yes",
            "metadata.annotations.enable_dashboard: must be true or false, not 'yes'",
        ),
        (
            "metadata.annotations.dashboard_port",
            "70000",
            "metadata.annotations.dashboard_port: must be a port from 1 to 65535, not '70000'",
        ),
        (
            "metadata.annotations.dashboard_port",
            "http",
            "metadata.annotations.dashboard_port: must be a port from 1 to 65535, not 'http'",
        ),
        (
            "metadata.annotations.recovery_budget",
            "ten",
            "metadata.annotations.recovery_budget: must be a duration such as 10s, 1m30s or 500ms, not 'ten'",
        ),
        (
            "metadata.annotations.recovery_budget",
            "500ms",
            "metadata.annotations.recovery_budget: must be between 1 and 3600 seconds, not 0.5",
        ),
        (
            "spec.distributionStrategy",
            "Allreduce",
            "spec.distributionStrategy: must be AllreduceStrategy, ParameterServerStrategy, CustomStrategy or Local, "
            "not 'Allreduce'",
        ),
        ("spec.optimizeMode", "auto", "spec.optimizeMode: must be manual, single-job or cluster, not 'auto'"),
        ("spec.brainService", 1, "spec.brainService: must be text, not 1; put it in quotes"),
        ("spec.suspend", "no", "spec.suspend: must be true or false, not 'no'"),
        ("spec.suspended", True, "spec.suspended: unknown field; did you mean suspend?"),
        ("spec.enableElasticScheduling", 1, "spec.enableElasticScheduling: must be true or false, not 1"),
        ("spec.enableDynamicSharding", "x", "spec.enableDynamicSharding: must be true or false, not 'x'"),
        ("spec.resourceLimits.cpu", "many", f"spec.resourceLimits.cpu: {QUANTITY}, not 'many'"),
        ("spec.resourceLimits.cpu", [1], "spec.resourceLimits.cpu: must be text or a number, not a list"),
        ("spec.resourceLimits.gpu", "0.5", "spec.resourceLimits.gpu: must be a whole number of 0 or more, not '0.5'"),
        ("spec.resourceLimits.disk", "1", "spec.resourceLimits.disk: unknown field; known are cpu, gpu, memory"),
        ("spec.envs", [{"name": "A", "value": "1"}], "spec.envs: must be a mapping, not a list"),
        ("spec.envs.A", {"value": 1}, "spec.envs.A.value: must be text, not 1; put it in quotes"),
        ("spec.envs.A", {"name": "B", "value": "1"}, "spec.envs.A.name: must be A like its key, not 'B'"),
        ("spec.envs.A", {"value": "1", "valueFrom": {}}, "spec.envs.A: must have either value or valueFrom, not both"),
        (
            "spec.envs.1A",
            {"value": "1"},
            "spec.envs.1A: must be letters, digits, '_', '-' and '.', not starting with a digit, not '1A'",
        ),
        ("spec.replicaSpecs", {}, "spec.replicaSpecs: must have at least one of chief, worker, ps and evaluator"),
        ("spec.replicaSpecs", [], "spec.replicaSpecs: must be a mapping, not a list"),
        ("spec.replicaSpecs", None, "spec.replicaSpecs: must be given"),
        ("spec.replicaSpecs.wroker", {}, "spec.replicaSpecs.wroker: unknown field; did you mean worker?"),
        (
            "spec.replicaSpecs.zzz",
            {},
            "spec.replicaSpecs.zzz: unknown field; known are chief, dlrover-master, evaluator, master, ps, worker",
        ),
        (f"{WORKER}.replicas", "three", f"{WORKER}.replicas: must be a whole number of 0 or more, not 'three'"),
        (f"{WORKER}.replicas", -1, f"{WORKER}.replicas: must be a whole number of 0 or more, not -1"),
        (f"{WORKER}.replicas", 1.5, f"{WORKER}.replicas: must be a whole number of 0 or more, not 1.5"),
        (f"{WORKER}.replicas", True, f"{WORKER}.replicas: must be a whole number of 0 or more, not true"),
        (f"{WORKER}.replicas", 10**9, f"{WORKER}.replicas: must be at most 10000, not 1000000000"),
        (f"{WORKER}.replicas", 0, "spec.replicaSpecs: must have a role with replicas of 1 or more"),
        (f"{WORKER}.replicas", None, "spec.replicaSpecs: must have a role with replicas of 1 or more"),
        (f"{WORKER}.restartcount", 1, f"{WORKER}.restartcount: unknown field; did you mean restartCount?"),
        (
            f"{WORKER}.batchScheduler",
            "volcano",
            f"{WORKER}.batchScheduler: unknown field; did you mean BatchScheduler?",
        ),
        (f"{WORKER}.restartCount", "1", f"{WORKER}.restartCount: must be a whole number of 0 or more, not '1'"),
        (
            f"{WORKER}.restartPolicy",
            "Sometimes",
            f"{WORKER}.restartPolicy: must be Always, OnFailure, Never or ExitCode, not 'Sometimes'",
        ),
        (f"{WORKER}.autoScale", "True", f"{WORKER}.autoScale: must be true or false, not 'True'"),
        (f"{WORKER}.restartTimeout", -5, f"{WORKER}.restartTimeout: must be a whole number of 0 or more, not -5"),
        (f"{WORKER}.priority", 0.5, f"{WORKER}.priority: must be text, not 0.5; put it in quotes"),
        (
            f"{WORKER}.priority",
            "1.5",
            f"{WORKER}.priority: must be high, low or a fraction from 0 to 1 such as '0.5', not '1.5'",
        ),
        (
            f"{WORKER}.criticalNodes",
            "0",
            f"{WORKER}.criticalNodes: must be all, none or pairs of index:count such as '0:3,1:3', not '0'",
        ),
        (f"{WORKER}.template", None, f"{WORKER}.template: must be given"),
        (f"{WORKER}.template", {}, f"{WORKER}.template.spec: must be given"),
        (f"{WORKER}.template.spec", "x", f"{WORKER}.template.spec: must be a mapping, not 'x'"),
        (
            f"{WORKER}.template.spec.containers",
            [],
            f"{WORKER}.template.spec.containers: must be a list with at least one container, not an empty one",
        ),
        (
            f"{WORKER}.template.spec.containers",
            None,
            f"{WORKER}.template.spec.containers: must be a list with at least one container, not nothing",
        ),
        (
            f"{WORKER}.template.spec.containers",
            {"name": "main"},
            f"{WORKER}.template.spec.containers: must be a list, not a mapping",
        ),
        (CONTAINER, "main", f"{NAMED}: must be a mapping, not 'main'"),
        (f"{CONTAINER}.name", None, f"{NAMED}.name: must be given"),
        (f"{CONTAINER}.name", 1, f"{NAMED}.name: must be text, not 1; put it in quotes"),
        (
            f"{CONTAINER}.name",
            "Main",
            f"{NAMED}.name: {DNS_LABEL}, not 'Main'",
        ),
        (
            f"{WORKER}.template.spec.initContainers",
            [{"name": "main"}],
            f"{WORKER}.template.spec.initContainers[0].name: must differ from the other containers' names, "
            "not 'main' again",
        ),
        (
            f"{WORKER}.template.spec.terminationGracePeriodSeconds",
            "30",
            f"{WORKER}.template.spec.terminationGracePeriodSeconds: must be a whole number of 0 or more, not '30'",
        ),
        (f"{CONTAINER}.comand", ["x"], f"{NAMED}.comand: unknown field; did you mean command?"),
        (f"{CONTAINER}.command", "dlrover-run", f"{NAMED}.command: must be a list, not 'dlrover-run'"),
        (f"{CONTAINER}.args", ["--n", 3], f"{NAMED}.args[1]: must be text, not 3; put it in quotes"),
        (f"{CONTAINER}.env", {"A": "1"}, f"{NAMED}.env: must be a list, not a mapping"),
        (f"{CONTAINER}.env", ["A=1"], f"{NAMED}.env[0]: must be a mapping, not 'A=1'"),
        (f"{CONTAINER}.env", [{"value": "1"}], f"{NAMED}.env[0].name: must be given"),
        (
            f"{CONTAINER}.env",
            [{"name": "A", "value": True}],
            f"{NAMED}.env[0].value: must be text, not true; put it in quotes",
        ),
        (
            f"{CONTAINER}.env",
            [{"name": "A", "valueFrom": "secret"}],
            f"{NAMED}.env[0].valueFrom: must be a mapping, not 'secret'",
        ),
        (f"{CONTAINER}.resources", ["cpu"], f"{NAMED}.resources: must be a mapping, not a list"),
        (f"{CONTAINER}.resources.limits.memory", "4GB", f"{NAMED}.resources.limits.memory: {QUANTITY}, not '4GB'"),
        (f"{CONTAINER}.resources.limits.cpu", {}, f"{NAMED}.resources.limits.cpu: {QUANTITY}, not a mapping"),
        (
            f"{CONTAINER}.resources.limits.nvidia/gpu",
            "0.5",
            f"{NAMED}.resources.limits.nvidia/gpu: must be a whole number of 0 or more, not '0.5'",
        ),
        (
            f"{CONTAINER}.resources",
            {"requests": {"cpu": "2"}, "limits": {"cpu": "1500m"}},
            f"{NAMED}.resources.requests.cpu: must be at most the limit of 1500m, not '2'",
        ),
        (
            f"{CONTAINER}.lifecycle",
            {"a": float("nan")},
            f"{NAMED}.lifecycle.a: must be plain text, a number, true or false, not nan",
        ),
        (f"{CONTAINER}.lifecycle", {1: "x"}, f"{NAMED}.lifecycle: every key must be text, not 1"),
        (
            "status.phase",
            "Dreaming",
            "status.phase: must be Created, Pending, Running, Restarting, Scaling, Suspended, Succeeded or Failed, "
            "not 'Dreaming'",
        ),
        ("status.status.conditions", {}, "status.status.conditions: must be a list, not a mapping"),
    ],
)
def test_a_wrong_field_of_a_job_gets_one_sentence(path: str, value: Any, sentence: str) -> None:
    assert sentences(bent(job(), path, value)) == [sentence]


@pytest.mark.parametrize(
    ("manifest", "sentence"),
    [
        (bent(plan(), "spec.ownerJob", 3), "spec.ownerJob: must be text, not 3; put it in quotes"),
        (
            plan(psHosts=[]),
            "spec: must ask for a change with replicaResourceSpecs, createPods, removePods, migratePods or psHosts",
        ),
        (
            plan(replicaResourceSpecs={"workers": {"replicas": 1}}),
            "spec.replicaResourceSpecs.workers: unknown role; known are chief, worker, ps or evaluator",
        ),
        (
            plan(replicaResourceSpecs={"ps": {"replicas": -1}}),
            f"spec.replicaResourceSpecs.ps.replicas: {WHOLE}, not -1",
        ),
        (
            plan(replicaResourceSpecs={"ps": {"resources": {}}}),
            "spec.replicaResourceSpecs.ps.resources: unknown field; did you mean resource?",
        ),
        (
            plan(replicaResourceSpecs={"ps": {"resource": {"cpu": "x"}}}),
            f"spec.replicaResourceSpecs.ps.resource.cpu: {QUANTITY}, not 'x'",
        ),
        (
            plan(migratePods=[{"resource": {"cpu": 2}}]),
            "spec.migratePods[0]: must name a pod by its name, or by its type and id",
        ),
        (
            plan(removePods=[{"type": "master", "id": 0}]),
            "spec.removePods[0].type: must be chief, worker, ps or evaluator, not 'master'",
        ),
        (
            plan(migratePods=[{"name": "other-edljob-ps-0"}]),
            "spec.migratePods[0].name: must be a pod of the job such as torch-mnist-edljob-ps-0, "
            "not 'other-edljob-ps-0'",
        ),
        (plan(createPods=[{"rankIndex": "0"}]), f"spec.createPods[0].rankIndex: {WHOLE}, not '0'"),
        (plan(psHosts=[1]), "spec.psHosts[0]: must be text, not 1; put it in quotes"),
        (
            bent(plan(), "metadata.labels.scale-type", "both"),
            "metadata.labels.scale-type: must be manual or auto, not 'both'",
        ),
        (
            bent(plan(), "metadata.labels.elasticjob-name", "x"),
            "metadata.labels.elasticjob-name: must be torch-mnist like spec.ownerJob, not 'x'",
        ),
        (bent(bent(plan(), "metadata.labels", {}), "spec.ownerJob", ""), "spec.ownerJob: must be given"),
        (
            bent(plan(), "status.phase", "Done"),
            "status.phase: must be Created, Pending, Scaling, Succeeded or Failed, not 'Done'",
        ),
        (
            bent(plan(), "metadata.name", "A"),
            f"metadata.name: must be at most 253 lower-case letters, digits, '-' and '.', {ENDS}, not 'A'",
        ),
    ],
)
def test_a_wrong_field_of_a_plan_gets_one_sentence(manifest: Any, sentence: str) -> None:
    assert sentences(manifest) == [sentence]


@pytest.mark.parametrize(("document", "kind"), [(3, "3"), ("text", "'text'"), ([], "a list"), (None, "nothing")])
def test_what_is_no_mapping_is_no_manifest(document: Any, kind: str) -> None:
    expected = f"a manifest must be a mapping with apiVersion, kind, metadata and spec, not {kind}"
    assert sentences(document) == [expected]


def test_a_field_whose_name_is_no_text_is_told() -> None:
    assert sentences({**job(), 1: 2}) == ["every field's name must be text, not 1"]


def test_a_master_under_both_its_names_is_told() -> None:
    manifest = bent(bent(job(), "spec.replicaSpecs.master", {}), "spec.replicaSpecs.dlrover-master", {})
    assert sentences(manifest) == [
        "spec.replicaSpecs.master: is the old name of dlrover-master, which is given as well"
    ]


def test_a_master_template_may_be_partial_but_what_it_has_is_checked() -> None:
    read_manifest(bent(job(), "spec.replicaSpecs.dlrover-master", {"template": {"spec": {"nodeName": "a"}}}))
    wrong = bent(job(), "spec.replicaSpecs.dlrover-master", {"template": pod(resources={"limits": {"cpu": "x"}})})
    at = "spec.replicaSpecs.dlrover-master.template.spec.containers[0].resources.limits.cpu"
    assert sentences(wrong) == [f"{at}: {QUANTITY}, not 'x'"]


def test_all_errors_are_told_at_once_and_each_on_its_own_line() -> None:
    manifest = job(optimizeMode="x", suspend=3)
    manifest = bent(bent(bent(manifest, "metadata.name", "A"), f"{WORKER}.replicas", "3"), f"{CONTAINER}.name", None)
    manifest = bent(bent(manifest, "apiVersion", "v1"), "metadata.annotations.service_type", "ftp")
    with pytest.raises(BadManifest) as caught:
        read_manifest(manifest)
    assert sorted(error.path for error in caught.value.errors) == [
        "apiVersion",
        "metadata.annotations.service_type",
        "metadata.name",
        "spec.optimizeMode",
        f"{WORKER}.replicas",
        f"{NAMED}.name",
        "spec.suspend",
    ]
    assert str(caught.value).splitlines() == [str(error) for error in caught.value.errors]


def test_garbage_by_the_thousand_is_counted_and_not_printed() -> None:
    found = sentences(bent(job(), f"{CONTAINER}.env", [3] * 1000))
    assert len(found) == MAX_ERRORS + 1
    assert found[-1] == f"and {1000 - MAX_ERRORS} more errors"


def test_a_long_value_or_name_is_shortened() -> None:
    (sentence,) = sentences(bent(job(), "spec.optimizeMode", "x" * 5000))
    assert len(sentence) < 200
    (sentence,) = sentences(bent(job(), "spec." + "y" * 5000, 1))
    assert len(sentence) < 400
    (sentence,) = sentences(bent(job(), f"{WORKER}.replicas", -(10**5000)))
    assert sentence.endswith("not a number of more than 60 digits")


def test_a_error_stays_on_one_line_whatever_the_value() -> None:
    for value in ("a\nb", "\x1b[31m", "\u2028"):
        for manifest in (bent(job(), "spec.optimizeMode", value), bent(job(), f"spec.{value}", 1)):
            (sentence,) = sentences(manifest)
            assert len(sentence.splitlines()) == 1
            assert "\x1b" not in sentence


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


PLACES = (
    "metadata metadata.labels metadata.annotations metadata.annotations.recovery_budget spec spec.envs spec.envs.A "
    "spec.resourceLimits spec.resourceLimits.cpu spec.replicaSpecs status "
    f"{WORKER} {WORKER}.template {WORKER}.template.spec {WORKER}.template.spec.containers {CONTAINER} "
    f"{CONTAINER}.command {CONTAINER}.env {CONTAINER}.resources {CONTAINER}.resources.limits"
).split()
PLAN_PLACES = [
    "metadata",
    "metadata.labels",
    "spec",
    "spec.replicaResourceSpecs",
    "spec.migratePods",
    "spec.createPods",
]


def errors_of(manifest: Any) -> tuple[str, ...]:
    try:
        read_manifest(manifest)
    except BadManifest as bad:
        return tuple(str(error) for error in bad.errors) or ("refused without an error\n",)
    return ()


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(PLACES), PLAIN, st.sampled_from(["AllreduceStrategy", "ParameterServerStrategy"]))
def test_anything_anywhere_in_a_job_is_read_or_refused_in_whole_sentences(
    place: str, value: Any, strategy: str
) -> None:
    told = errors_of(bent(job(distributionStrategy=strategy), place, value))
    assert all(len(sentence.splitlines()) == 1 for sentence in told)


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(PLAN_PLACES), PLAIN)
def test_anything_anywhere_in_a_plan_is_read_or_refused_in_whole_sentences(place: str, value: Any) -> None:
    assert all(len(sentence.splitlines()) == 1 for sentence in errors_of(bent(plan(), place, value)))
