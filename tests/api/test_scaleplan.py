import msgspec
import pytest

from resile.api.ids import GiB
from resile.api.job import Resources
from resile.api.kinds.scaleplan.resource import ScalePlan, ScaleType
from resile.api.manifests.pod_template import read_resources
from resile.api.manifests.reader import load_manifests, read_manifest
from tests.api.manifests import Manifest, bent, plan

EVERYTHING: Manifest = {
    "apiVersion": "elastic.iml.github.io/v1alpha1",
    "kind": "ScalePlan",
    "metadata": {
        "name": "a-scaleplan-7",
        "namespace": "dlrover",
        "labels": {"elasticjob-name": "a", "scale-type": "auto"},
    },
    "spec": {
        "ownerJob": "a",
        "replicaResourceSpecs": {"ps": {"replicas": 2, "resource": {"cpu": "2", "memory": "4Gi"}}},
        "createPods": [
            {"name": "a-edljob-ps-1", "id": 1, "type": "ps", "rankIndex": 1, "service": "a-edljob-ps-1:2222"}
        ],
        "removePods": [{"name": "a-edljob-worker-3"}],
        "migratePods": [{"name": "a-edljob-ps-0", "resource": {"cpu": 2, "memory": "4Gi", "nvidia.com/gpu": "1"}}],
        "psHosts": ["a-edljob-ps-0.dlrover.svc:2222"],
    },
    "status": {"phase": "Scaling", "createTime": "t0", "finishTime": "t1"},
}


def read_plan(manifest: Manifest) -> ScalePlan:
    resource = read_manifest(manifest)
    assert isinstance(resource, ScalePlan)
    return resource


def test_every_field_is_read_and_written_back_as_it_was() -> None:
    written = msgspec.json.decode(msgspec.json.encode(read_plan(EVERYTHING)))
    assert {"apiVersion": EVERYTHING["apiVersion"], "kind": EVERYTHING["kind"], **written} == EVERYTHING


def test_a_plan_names_nodes_and_numbers() -> None:
    read = read_plan(EVERYTHING)
    (migrated,) = read.spec.migrate_pods
    (removed,) = read.spec.remove_pods
    assert (str(migrated.node("a")), str(removed.node("a"))) == ("ps-0", "worker-3")
    assert read_resources(dict(migrated.resource)) == Resources(cpu=2.0, memory=4 * GiB, gpu=1)
    assert read_resources(dict(read.spec.replica_resource_specs["ps"].resource)) == Resources(cpu=2.0, memory=4 * GiB)


def test_a_pod_may_be_named_by_type_and_id() -> None:
    (pod,) = read_plan(plan(removePods=[{"type": "worker", "id": 4}])).spec.remove_pods
    assert str(pod.node("torch-mnist")) == "worker-4"


def test_a_pod_to_create_needs_no_name() -> None:
    (pod,) = read_plan(plan(createPods=[{"type": "worker"}])).spec.create_pods
    assert pod.node("torch-mnist") is None


@pytest.mark.parametrize("label", ["elasticjob-name", "elasticjob.dlrover/name"])
def test_the_job_may_be_named_by_a_label_of_either_generation(label: str) -> None:
    manifest = bent(bent(plan(), "spec.ownerJob", None), "metadata.labels", {})
    manifest["metadata"]["labels"] = {label: "torch-mnist"}
    assert read_plan(manifest).job == "torch-mnist"


def test_a_plan_that_does_not_say_whose_it_is_is_a_users() -> None:
    assert read_plan(bent(plan(), "metadata.labels", {})).scale_type is ScaleType.MANUAL
    assert read_plan(EVERYTHING).scale_type is ScaleType.AUTO


def test_replicas_that_are_not_given_stay_as_they_are() -> None:
    read = read_plan(plan(replicaResourceSpecs={"worker": {"resource": {"cpu": 1}}}))
    assert read.spec.replica_resource_specs["worker"].replicas is None


def test_a_plan_for_another_job_than_its_name_suggests_is_read() -> None:
    text = """
        apiVersion: elastic.iml.github.io/v1alpha1
        kind: ScalePlan
        metadata:
          namespace: dlrover
          name: deepctr-manual-scaling-plan-3
          labels: {elasticjob-name: deepctr-auto-scaling, scale-type: manual}
        spec:
          ownerJob: deepctr-auto-scaling
          migratePods:
            - name: deepctr-auto-scaling-edljob-ps-0
              resource: {cpu: "2", memory: 4Gi}
    """
    (read,) = load_manifests(text)
    assert isinstance(read, ScalePlan)
    assert str(read.spec.migrate_pods[0].node(read.job)) == "ps-0"
