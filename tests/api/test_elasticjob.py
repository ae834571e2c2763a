"""From a right manifest to the job that runs."""

from typing import Any

import msgspec
import pytest

from resile.api.ids import GiB, MiB
from resile.api.job import JobSpec, Resources, Strategy
from resile.api.job_phase import JobPhase
from resile.api.kinds.elasticjob.master_options import FOREVER, read_options
from resile.api.kinds.elasticjob.names import MAX_JOB_NAME, master_name, node_of
from resile.api.kinds.elasticjob.resource import ElasticJob, OptimizeMode
from resile.api.kinds.elasticjob.to_job_spec import to_job_spec
from resile.api.kinds.registry import node_name
from resile.api.manifests.errors import BadManifest, ManifestErrors
from resile.api.manifests.reader import load_manifests, read_manifest
from resile.api.quantity import duration
from resile.api.timeouts import derive
from tests.api.manifests import Manifest, bent, job, pod

WORKER = "spec.replicaSpecs.worker"


def read_job(manifest: Manifest) -> ElasticJob:
    resource = read_manifest(manifest)
    assert isinstance(resource, ElasticJob)
    return resource


def spec_of(manifest: Manifest) -> JobSpec:
    return to_job_spec(read_job(manifest))


def ps_job(**roles: Any) -> Manifest:
    return job(distributionStrategy="ParameterServerStrategy", replicaSpecs=roles)


def counts(manifest: Manifest) -> dict[str, int]:
    return {role: spec.replicas for role, spec in spec_of(manifest).roles.items()}


EVERYTHING: Manifest = {
    "apiVersion": "elastic.iml.github.io/v1alpha1",
    "kind": "ElasticJob",
    "metadata": {
        "name": "all",
        "namespace": "dlrover",
        "uid": "u-1",
        "resourceVersion": "12",
        "generation": 2,
        "creationTimestamp": "2023-09-26T03:52:20Z",
        "finalizers": ["f"],
        "ownerReferences": [{"kind": "x"}],
        "managedFields": [{"manager": "kubectl"}],
        "labels": {"team": "a", "example.com/b": ""},
        "annotations": {"training_elastic_mode": "ucp", "kubectl.kubernetes.io/last-applied": "{}"},
    },
    "spec": {
        "distributionStrategy": "CustomStrategy",
        "resourceLimits": {"cpu": "15", "memory": "30000Mi", "gpu": "4"},
        "optimizeMode": "cluster",
        "brainService": "brain:50001",
        "envs": {"LEVEL": {"name": "LEVEL", "value": "debug"}},
        "suspend": True,
        "enableElasticScheduling": True,
        "enableDynamicSharding": True,
        "replicaSpecs": {
            role: {
                "replicas": 2,
                "template": pod("run"),
                "restartPolicy": "ExitCode",
                "restartCount": 9,
                "autoScale": False,
                "restartTimeout": 60,
                "priority": "0.5",
                "BatchScheduler": "volcano",
                "criticalNodes": "0:3,1:2",
            }
            for role in ("worker", "ps", "chief", "evaluator", "dlrover-master")
        },
    },
    "status": {
        "phase": "Running",
        "scalePlan": "plan-0",
        "status": {
            "startTime": "t0",
            "completionTime": "t1",
            "lastReconcileTime": "t2",
            "conditions": [
                {
                    "type": "Created",
                    "status": "True",
                    "reason": "JobCreated",
                    "message": "m",
                    "lastUpdateTime": "t",
                    "lastTransitionTime": "t",
                }
            ],
            "replicaStatuses": {
                "worker": {"initial": 1, "pending": 1, "active": 1, "succeeded": 1, "failed": 1, "labelSelector": "a=b"}
            },
        },
    },
}


def test_every_field_is_read_and_written_back_as_it_was() -> None:
    written = msgspec.json.decode(msgspec.json.encode(read_job(EVERYTHING)))
    assert {"apiVersion": EVERYTHING["apiVersion"], "kind": EVERYTHING["kind"], **written} == EVERYTHING


def test_every_field_of_a_role_reaches_the_spec() -> None:
    spec = spec_of(EVERYTHING)
    assert list(spec.roles) == ["chief", "worker", "ps", "evaluator"]
    for role in spec.roles.values():
        assert (role.replicas, role.command, role.crash_budget, role.auto_scale) == (2, ("run",), 9, False)
        assert (role.priority, role.batch_scheduler) == ("0.5", "volcano")
        assert (role.restart_policy, role.env) == ("ExitCode", {"LEVEL": "debug"})
    assert (spec.name, spec.namespace, spec.uid, spec.kind) == ("all", "dlrover", "u-1", "elasticjob")
    assert spec.strategy is Strategy.CUSTOM
    assert spec.resource_limits == Resources(cpu=15.0, memory=30000 * MiB, gpu=4)
    assert spec.suspend
    assert spec.labels["team"] == "a"
    assert spec.annotations["training_elastic_mode"] == "ucp"
    assert spec.master is not None
    assert spec.master.crash_budget == 9


def test_a_spec_survives_a_journal() -> None:
    spec = spec_of(EVERYTHING)
    assert msgspec.json.decode(msgspec.json.encode(spec), type=JobSpec) == spec
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(spec), type=JobSpec) == spec


def test_what_is_left_out_gets_its_default() -> None:
    spec = spec_of(job())
    worker = spec.roles["worker"]
    assert (worker.crash_budget, worker.auto_scale, worker.priority, worker.grace) == (3, True, "", None)
    assert (worker.requests, worker.limits) == (Resources(), Resources())
    assert (spec.suspend, spec.master, spec.timeouts) == (False, None, derive())


def test_nothing_written_after_a_field_is_the_same_as_no_field() -> None:
    empty = bent(bent(job(), f"{WORKER}.restartCount", None), "metadata.annotations", None)
    assert spec_of(empty) == spec_of(job())


def test_a_manifest_without_a_namespace_is_in_the_default_one() -> None:
    assert spec_of(bent(job(), "metadata.namespace", None)).namespace == "default"


def test_a_job_without_a_strategy_is_a_parameter_server_job() -> None:
    assert spec_of(bent(job(), "spec.distributionStrategy", None)).strategy is Strategy.PARAMETER_SERVER


def test_the_restart_count_is_not_capped() -> None:
    assert spec_of(bent(job(), f"{WORKER}.restartCount", 50)).roles["worker"].crash_budget == 50
    assert spec_of(bent(job(), f"{WORKER}.restartCount", 0)).roles["worker"].crash_budget == 0


@pytest.mark.parametrize("written", ["manual", "manunal"])
def test_the_manual_mode_may_be_misspelt_as_in_dlrover_and_switches_scaling_off(written: str) -> None:
    manifest = job(optimizeMode=written)
    assert read_job(manifest).spec.optimize_mode is OptimizeMode.MANUAL
    assert not spec_of(manifest).roles["worker"].auto_scale


def test_elastic_scheduling_switched_off_switches_scaling_off() -> None:
    assert not spec_of(job(enableElasticScheduling=False)).roles["worker"].auto_scale
    assert spec_of(job(enableElasticScheduling=True)).roles["worker"].auto_scale


@pytest.mark.parametrize("priority", ["high", "low", "0.5", "0", "1", ".25", "1.0"])
def test_a_priority_is_high_low_or_a_fraction(priority: str) -> None:
    assert spec_of(bent(job(), f"{WORKER}.priority", priority)).roles["worker"].priority == priority


@pytest.mark.parametrize("critical", ["", "all", "none", "0:3", "0:3,7:1"])
def test_critical_nodes_are_all_none_or_pairs(critical: str) -> None:
    read = read_job(bent(job(), f"{WORKER}.criticalNodes", critical))
    assert read.spec.replica_specs.worker.critical_nodes == critical


def test_a_parameter_server_job_makes_its_first_worker_the_chief() -> None:
    assert counts(ps_job(worker={"replicas": 2, "template": pod("w")}, ps={"replicas": 1, "template": pod("p")})) == {
        "chief": 1,
        "worker": 1,
        "ps": 1,
    }


def test_the_chief_made_of_a_worker_runs_what_a_worker_runs() -> None:
    spec = spec_of(ps_job(worker={"replicas": 1, "restartCount": 7, "template": pod("w")}))
    chief, worker = spec.roles["chief"], spec.roles["worker"]
    assert (chief.command, chief.crash_budget, chief.template) == (worker.command, 7, worker.template)
    assert worker.replicas == 0


def test_a_chief_that_is_given_stays_beside_all_the_workers() -> None:
    one = {"replicas": 1, "template": pod("c")}
    assert counts(ps_job(chief=one, worker={"replicas": 2, "template": pod("w")})) == {"chief": 1, "worker": 2}


def test_an_allreduce_job_has_no_chief() -> None:
    assert counts(job()) == {"worker": 2}


def test_a_job_that_scales_itself_starts_with_one_ps_and_one_chief() -> None:
    auto = {"autoScale": True, "template": pod("x")}
    assert counts(ps_job(ps=auto, worker=auto)) == {"chief": 1, "worker": 0, "ps": 1}


def test_a_role_that_does_not_scale_and_names_no_number_has_no_nodes() -> None:
    fixed = {"autoScale": False, "template": pod("x")}
    evaluator = {"template": pod("x")}
    assert counts(ps_job(ps=fixed, worker={"replicas": 1, "template": pod("x")}, evaluator=evaluator)) == {
        "chief": 1,
        "worker": 0,
        "ps": 0,
        "evaluator": 0,
    }


def test_the_main_container_is_the_one_called_main_else_the_first() -> None:
    two = {"spec": {"containers": [{"name": "side", "command": ["s"]}, {"name": "main", "command": ["m"]}]}}
    assert spec_of(bent(job(), f"{WORKER}.template", two)).roles["worker"].command == ("m",)
    two["spec"]["containers"][1]["name"] = "other"
    assert spec_of(bent(job(), f"{WORKER}.template", two)).roles["worker"].command == ("s",)


def test_the_command_is_command_then_args() -> None:
    spec = spec_of(bent(job(), f"{WORKER}.template", pod("bash", "-c", args=["dlrover-run x"])))
    assert spec.roles["worker"].command == ("bash", "-c", "dlrover-run x")


def test_requests_and_limits_are_kept_apart() -> None:
    resources = {
        "requests": {"cpu": "500m", "memory": "1Gi"},
        "limits": {"cpu": 2, "memory": "4Gi", "nvidia.com/gpu": 1, "ephemeral-storage": "1Gi"},
    }
    worker = spec_of(bent(job(), f"{WORKER}.template", pod(resources=resources))).roles["worker"]
    assert worker.requests == Resources(cpu=0.5, memory=GiB)
    assert worker.limits == Resources(cpu=2.0, memory=4 * GiB, gpu=1)
    assert worker.template["spec"]["containers"][0]["resources"] == resources


def test_grace_and_restart_policy_come_from_the_template() -> None:
    template = pod("x")
    template["spec"].update(terminationGracePeriodSeconds=45, restartPolicy="Always")
    worker = spec_of(bent(job(), f"{WORKER}.template", template)).roles["worker"]
    assert (worker.grace, worker.restart_policy) == (45, "Always")


def test_unknown_fields_of_a_template_are_kubernetes_own_business() -> None:
    template = pod("x", futureField={"a": [1, None, {"b": True}]})
    assert spec_of(bent(job(), f"{WORKER}.template", template)).roles["worker"].template == template


def test_the_environment_holds_literal_values_and_the_last_of_two() -> None:
    env = [
        {"name": "A", "value": "1"},
        {"name": "A", "value": "2"},
        {"name": "EMPTY"},
        {"name": "S", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}},
    ]
    worker = spec_of(bent(job(), f"{WORKER}.template", pod(env=env))).roles["worker"]
    assert worker.env == {"A": "2", "EMPTY": ""}


def test_envs_reach_every_role_unless_its_template_sets_the_name() -> None:
    secret = {"secretKeyRef": {"name": "s", "key": "k"}}
    manifest = ps_job(
        worker={"replicas": 1, "template": pod(env=[{"name": "LEVEL", "value": "own"}])},
        ps={"replicas": 1, "template": pod()},
    )
    manifest["spec"]["envs"] = {"LEVEL": {"value": "debug"}, "KEY": {"valueFrom": secret}}
    spec = spec_of(manifest)
    assert {role: spec.roles[role].env for role in spec.roles} == {
        "chief": {"LEVEL": "own"},
        "worker": {"LEVEL": "own"},
        "ps": {"LEVEL": "debug"},
    }
    assert spec.roles["ps"].template["spec"]["containers"][0]["env"] == [
        {"name": "LEVEL", "value": "debug"},
        {"name": "KEY", "valueFrom": secret},
    ]


def test_a_spec_shares_nothing_with_its_manifest() -> None:
    manifest = job(envs={"A": {"value": "1"}})
    read = read_job(manifest)
    to_job_spec(read).roles["worker"].template["spec"]["containers"].clear()
    assert read.spec.replica_specs.worker.template == pod("train.sh")
    assert manifest["spec"]["replicaSpecs"]["worker"]["template"] == pod("train.sh")


@pytest.mark.parametrize("name", ["dlrover-master", "master"])
def test_the_master_may_have_a_partial_template_under_its_present_or_old_name(name: str) -> None:
    template = {"spec": {"containers": [{"name": "main", "imagePullPolicy": "Always"}]}}
    spec = spec_of(bent(job(), f"spec.replicaSpecs.{name}", {"restartCount": 2, "template": template}))
    assert spec.master is not None
    assert (spec.master.template, spec.master.crash_budget) == (template, 2)
    assert list(spec.roles) == ["worker"]


def test_annotations_set_the_time_outs() -> None:
    annotations = {"recovery_budget": "30s", "pending_timeout": "120"}
    assert spec_of(bent(job(), "metadata.annotations", annotations)).timeouts == derive(30.0, pend=120.0)


@pytest.mark.parametrize(
    "annotations", [{"pending_timeout": "0"}, {"pending_timeout": "-1"}, {"pending_fail_strategy": "0"}]
)
def test_a_job_can_wait_for_pending_nodes_without_limit(annotations: dict[str, str]) -> None:
    assert spec_of(bent(job(), "metadata.annotations", annotations)).timeouts.pend == FOREVER


def test_every_master_option_is_read() -> None:
    annotations = {
        "recovery_budget": "1m",
        "pending_timeout": "600",
        "pending_fail_strategy": "2",
        "service_type": "http",
        "training_elastic_mode": "ucp",
        "pre_check_ops": "[('a', 'b', True)]",
        "pre_check_bypass": "True",
        "enable_dashboard": "true",
        "dashboard_port": "8080",
    }
    errors = ManifestErrors()
    timeouts = read_options(annotations, "metadata.annotations", errors)
    assert (timeouts.recovery_budget, timeouts.pend, errors.found()) == (60.0, 600.0, [])


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("10s", 10), ("10", 10), ("1m30s", 90), ("500ms", 0.5), ("0.5h", 1800), ("1.5", 1.5), ("1h1m1s", 3661)],
)
def test_durations_are_read(text: str, seconds: float) -> None:
    assert duration(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "s", "10 s", "-1s", "1d", "1..5s", "1e3s", "10s5"])
def test_what_is_no_duration_is_none(text: str) -> None:
    assert duration(text) is None


def test_the_longest_job_name_leaves_room_for_every_derived_name() -> None:
    name = "a" * MAX_JOB_NAME
    spec = spec_of(bent(job(), "metadata.name", name))
    assert len(master_name(name)) == 63
    assert len(node_name(spec, "evaluator", 99999)) <= 63


def test_a_pod_name_tells_its_node() -> None:
    node = node_of("torch-mnist-edljob-worker-12", "torch-mnist")
    assert str(node) == "worker-12"
    assert node_of("torch-mnist-edljob-worker-12", "mnist") is None
    assert node_of("torch-mnist-edljob-worker-012", "torch-mnist") is None
    assert node_of("torch-mnist-edljob-master-0", "torch-mnist") is None


def test_a_phase_carries_the_reason_of_its_condition() -> None:
    assert JobPhase.RUNNING.reason == "JobRunning"
    assert [phase for phase in JobPhase if phase.ended] == [JobPhase.SUCCEEDED, JobPhase.FAILED]


def test_a_job_made_by_hand_is_checked_when_it_is_translated() -> None:
    read = read_job(job())
    broken = msgspec.structs.replace(
        read, metadata=msgspec.structs.replace(read.metadata, annotations={"recovery_budget": "never"})
    )
    with pytest.raises(BadManifest, match=r"^metadata\.annotations\.recovery_budget: must be a duration"):
        to_job_spec(broken)


def test_yaml_and_plain_data_give_the_same_job() -> None:
    assert load_manifests(msgspec.yaml.encode(EVERYTHING)) == [read_job(EVERYTHING)]
