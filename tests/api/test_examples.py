"""Every example manifest is read and becomes the job that its comment promises."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from resile.api.ids import GiB, MiB, NodeId, NodeKey, Rank
from resile.api.job import JobSpec, Resources, Strategy
from resile.api.kinds.base import NodeSetting
from resile.api.kinds.elasticjob.environment import tf_config
from resile.api.kinds.elasticjob.kind import ELASTIC_JOB
from resile.api.kinds.elasticjob.resource import ElasticJob
from resile.api.kinds.elasticjob.to_job_spec import to_job_spec
from resile.api.kinds.registry import node_name
from resile.api.kinds.scaleplan.resource import ScalePlan, ScaleType
from resile.api.manifests.pod_template import read_resources
from resile.api.manifests.reader import load_manifests
from tests.support.paths import ROOT

EXAMPLES = ROOT / "examples"
MNIST = "pytorch/mnist"
ARGUMENTS = (
    "examples/pytorch/mnist/cnn_train.py --num_epochs 5 --training_data /data/mnist_png/training/ "
    "--validation_data /data/mnist_png/testing/"
)


def example_job(path: str) -> JobSpec:
    (job,) = load_manifests((EXAMPLES / path).read_bytes())
    assert isinstance(job, ElasticJob)
    return to_job_spec(job)


def example_plan(number: int) -> ScalePlan:
    (plan,) = load_manifests((EXAMPLES / f"deepctr-manual-scaling-plan-{number}.yaml").read_bytes())
    assert isinstance(plan, ScalePlan)
    return plan


def pods(spec: JobSpec) -> list[str]:
    return [node_name(spec, role, place) for role in spec.roles for place in range(spec.roles[role].replicas)]


@pytest.mark.parametrize("path", sorted(EXAMPLES.rglob("*.yaml")), ids=lambda path: path.name)
def test_every_example_is_read_and_pulls_images_only_if_it_must(path: Path) -> None:
    for resource in load_manifests(path.read_bytes()):
        ours = path.name in ("hello_job.yaml", "demo_job.yaml")  # the others are the seeds'
        assert resource.metadata.namespace == ("default" if ours else "dlrover")
        if isinstance(resource, ElasticJob):
            for role in to_job_spec(resource).roles.values():
                policies = {one["imagePullPolicy"] for one in role.template["spec"]["containers"]}
                assert policies == {"IfNotPresent"}


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("torch_mnist_master_backend_job.yaml", [f"torch-mnist-edljob-worker-{n}" for n in range(2)]),
        (f"{MNIST}/elastic_job.yaml", [f"torch-mnist-edljob-worker-{n}" for n in range(4)]),
        (f"{MNIST}/choas_test_job.yaml", [f"chaos-test-edljob-worker-{n}" for n in range(4)]),
        (
            "deepctr_auto_scale_job.yaml",
            ["deepctr-auto-scaling-job-edljob-chief-0", "deepctr-auto-scaling-job-edljob-ps-0"],
        ),
        (
            "deepctr-manual-scaling-job.yaml",
            ["deepctr-manual-scaling-edljob-chief-0", "deepctr-manual-scaling-edljob-ps-0"],
        ),
        (
            "tensorflow/criteo_deeprec/manual_job.yaml",
            [f"deepctr-manual-scale-edljob-{node}" for node in ("chief-0", "worker-0", "ps-0")],
        ),
    ],
)
def test_a_job_starts_with_the_pods_that_its_tutorial_lists(path: str, expected: list[str]) -> None:
    assert pods(example_job(path)) == expected


@pytest.mark.parametrize(
    ("path", "flags", "budget"),
    [
        ("torch_mnist_master_backend_job.yaml", "--nnodes=1:$WORKER_NUM --nproc_per_node=1 --max_restarts=3", 3),
        (
            f"{MNIST}/elastic_job.yaml",
            "--network-check --nnodes=3:$WORKER_NUM --nproc_per_node=2 --max_restarts=3",
            0,
        ),
        (
            f"{MNIST}/choas_test_job.yaml",
            "--network-check --exclude-straggler --nnodes=3:$WORKER_NUM --nproc_per_node=2 --max_restarts=3 "
            "--rdzv_conf pend_timeout=600",
            1,
        ),
    ],
)
def test_a_torch_job_runs_dlrover_run_in_a_shell(path: str, flags: str, budget: int) -> None:
    spec = example_job(path)
    worker = spec.roles["worker"]
    assert spec.strategy is Strategy.ALLREDUCE
    assert worker.command == ("/bin/bash", "-c", f"dlrover-run {flags} {ARGUMENTS}")
    assert worker.crash_budget == budget


def test_the_auto_scaling_job_says_nothing_of_resources_but_the_limit() -> None:
    spec = example_job("deepctr_auto_scale_job.yaml")
    assert spec.strategy is Strategy.PARAMETER_SERVER
    assert spec.resource_limits == Resources(cpu=15.0, memory=30000 * MiB)
    assert all(role.auto_scale and role.requests == Resources() for role in spec.roles.values())


@pytest.mark.parametrize("path", ["deepctr-manual-scaling-job.yaml", "tensorflow/criteo_deeprec/manual_job.yaml"])
def test_the_manual_jobs_do_not_scale_and_the_chief_has_the_memory_of_a_worker(path: str) -> None:
    spec = example_job(path)
    assert not any(role.auto_scale for role in spec.roles.values())
    assert spec.roles["chief"].requests == spec.roles["chief"].limits == Resources(cpu=2.0, memory=4 * GiB)
    assert spec.roles["ps"].requests == spec.roles["ps"].limits == Resources(cpu=2.0, memory=3 * GiB)


def test_the_plans_scale_and_migrate_the_manual_job() -> None:
    plans = [example_plan(number) for number in range(4)]
    job = example_job("deepctr-manual-scaling-job.yaml")
    assert all((plan.job, plan.scale_type) == (job.name, ScaleType.MANUAL) for plan in plans)
    replicas = [{role: wanted.replicas for role, wanted in plan.spec.replica_resource_specs.items()} for plan in plans]
    assert replicas == [{"worker": 3}, {"ps": 2}, {"ps": 1}, {}]
    (migrated,) = plans[3].spec.migrate_pods
    assert str(migrated.node(job.name)) == "ps-0"
    assert read_resources(dict(migrated.resource)) == Resources(cpu=2.0, memory=4 * GiB)


def test_a_worker_gets_the_environment_of_both_generations() -> None:
    spec = example_job(f"{MNIST}/choas_test_job.yaml")
    assert ELASTIC_JOB.environment(
        spec,
        NodeSetting(
            node=NodeKey("worker", NodeId(4)),
            rank=Rank(1),
            replicas=4,
            address="10.0.0.7",
            host_address="192.168.0.7",
            master_address="elasticjob-chaos-test-dlrover-master.dlrover.svc:50001",
            relaunch_count=1,
        ),
    ) == {
        "POD_NAME": "chaos-test-edljob-worker-4",
        "POD_IP": "10.0.0.7",
        "NODE_IP": "192.168.0.7",
        "ELASTIC_JOB_NAME": "chaos-test",
        "JOB_UID": "",
        "NODE_TYPE": "worker",
        "NODE_ID": "4",
        "NODE_NUM": "4",
        "NODE_RANK": "1",
        "WORKER_TYPE": "worker",
        "WORKER_ID": "4",
        "WORKER_NUM": "4",
        "WORKER_RANK": "1",
        "RANK": "1",
        "WORLD_SIZE": "4",
        "DLROVER_MASTER_ADDR": "elasticjob-chaos-test-dlrover-master.dlrover.svc:50001",
        "DLROVER_MASTER_SERVICE_TYPE": "grpc",
        "DLROVER_TRAINING_ELASTIC_MODE": "base",
        "GRPC_ENABLE_FORK_SUPPORT": "false",
        "MONITOR_ENABLED": "true",
        "RELAUNCHED_POD": "true",
    }


def test_a_parameter_server_job_has_no_rank_and_leaves_unknown_addresses_to_the_platform() -> None:
    spec = example_job("tensorflow/criteo_deeprec/manual_job.yaml")
    env = ELASTIC_JOB.environment(
        spec,
        NodeSetting(
            node=NodeKey("ps", NodeId(0)),
            rank=Rank(0),
            replicas=1,
            master_address="m:50001",
        ),
    )
    assert not {"RANK", "WORLD_SIZE", "POD_IP", "NODE_IP"} & set(env)
    assert env["RELAUNCHED_POD"] == "false"


def test_switches_that_the_user_has_set_are_left_alone() -> None:
    text = (EXAMPLES / "torch_mnist_master_backend_job.yaml").read_text()
    (job,) = load_manifests(text + "  envs:\n    MONITOR_ENABLED: {value: 'false'}\n")
    assert isinstance(job, ElasticJob)
    spec = to_job_spec(job)
    env = ELASTIC_JOB.environment(
        spec,
        NodeSetting(
            node=NodeKey("worker", NodeId(0)),
            rank=Rank(0),
            replicas=2,
            master_address="m:50001",
        ),
    )
    assert "MONITOR_ENABLED" not in env
    assert env["GRPC_ENABLE_FORK_SUPPORT"] == "false"


def test_tf_config_names_the_service_of_every_place() -> None:
    spec = example_job("tensorflow/criteo_deeprec/manual_job.yaml")
    assert json.loads(tf_config(ELASTIC_JOB.service_addresses(spec, {}), role="worker", rank=Rank(0))) == {
        "cluster": {
            "chief": ["deepctr-manual-scale-edljob-chief-0.dlrover.svc:3333"],
            "worker": ["deepctr-manual-scale-edljob-worker-0.dlrover.svc:3333"],
            "ps": ["deepctr-manual-scale-edljob-ps-0.dlrover.svc:2222"],
        },
        "task": {"type": "worker", "index": 0},
    }


def test_tf_config_leaves_out_roles_without_nodes() -> None:
    config = json.loads(tf_config({"chief": ["a:1"], "worker": []}, role="chief", rank=Rank(0)))
    assert config["cluster"] == {"chief": ["a:1"]}


def test_a_node_carries_the_labels_of_both_generations() -> None:
    labels = ELASTIC_JOB.node_labels("torch-mnist", role="worker", node_id=NodeId(4), rank=Rank(1), relaunch_count=1)
    assert labels == {
        "app": "dlrover",
        "elasticjob-name": "torch-mnist",
        "replica-type": "worker",
        "replica-index": "4",
        "rank-index": "1",
        "restart-count": "1",
        "elasticjob.dlrover/name": "torch-mnist",
        "elasticjob.dlrover/replica-type": "worker",
        "elasticjob.dlrover/replica-index": "4",
        "elasticjob.dlrover/rank-index": "1",
        "elasticjob.dlrover/relaunch-count": "1",
    }


def test_a_master_is_found_by_the_same_selectors_as_its_nodes() -> None:
    labels = ELASTIC_JOB.master_labels("torch-mnist")
    assert ELASTIC_JOB.job_selector("torch-mnist").items() <= labels.items()
    assert ELASTIC_JOB.master_selector("torch-mnist").items() <= labels.items()
    assert ELASTIC_JOB.job_of(labels) == "torch-mnist" == labels["elasticjob-name"]
    assert labels["app.kubernetes.io/name"] == "elasticjob"
    assert labels["replica-type"] == labels["elasticjob.dlrover/replica-type"] == "dlrover-master"


def test_importing_the_api_does_not_import_yaml() -> None:
    program = "import sys, resile.api.job, resile.api.manifests.reader; sys.exit('yaml' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
