"""What pods look like, and what is read from them: pure functions, no cluster needed."""

from __future__ import annotations

import json
from typing import Any, cast

import pytest

from resile.api.ids import Bytes, GiB, NodeId, NodeKey, Rank
from resile.api.job import JobSpec
from resile.api.kinds.elasticjob.resource import ElasticJob
from resile.api.kinds.elasticjob.to_job_spec import to_job_spec
from resile.api.manifests.reader import read_manifest
from resile.api.plan import NodeResources
from resile.kube.client import Client
from resile.kube.informer import Listed
from resile.kube.owner_references import is_owned_by
from resile.platform.base import Launch
from resile.platform.kubernetes.observation import gone, observation
from resile.platform.kubernetes.placement import held_back, released
from resile.platform.kubernetes.platform import KubernetesPlatform
from resile.platform.kubernetes.pods import master_address, pod_manifest, service_manifest
from resile.protocol.reports import NodeEnd, NodeStatus

NODE = NodeKey("worker", NodeId(4))
TEMPLATE = {
    "metadata": {"labels": {"team": "vision", "app": "mine"}, "annotations": {"note": "kept"}},
    "spec": {
        "restartPolicy": "Always",
        "nodeSelector": {"zone": "a"},
        "containers": [
            {"name": "side", "image": "proxy"},
            {
                "name": "main",
                "image": "train",
                "lifecycle": {"preStop": {"exec": {"command": ["save"]}}},
                "env": [{"name": "NODE_RANK", "value": "wrong"}, {"name": "MINE", "value": "$(NODE_RANK)"}],
                "resources": {"requests": {"cpu": "1", "memory": "1Gi"}, "limits": {"cpu": "2", "memory": "2Gi"}},
            },
        ],
    },
}


def job(template: dict[str, Any] | None = None, strategy: str = "AllreduceStrategy", **role: Any) -> JobSpec:
    document = {
        "apiVersion": "elastic.iml.github.io/v1alpha1",
        "kind": "ElasticJob",
        "metadata": {"name": "j", "namespace": "ns", "uid": "u-1"},
        "spec": {
            "distributionStrategy": strategy,
            "replicaSpecs": {"worker": {"replicas": 3, "template": template or TEMPLATE, **role}},
        },
    }
    read = read_manifest(document)
    assert isinstance(read, ElasticJob)
    return to_job_spec(read)


def pod_of(spec: JobSpec, rank: int = 1, **launch: Any) -> dict[str, Any]:
    wanted = Launch(node=NODE, rank=Rank(rank), replicas=3, **launch)
    return pod_manifest(spec, wanted, master_address(spec))


def main(pod: dict[str, Any]) -> dict[str, Any]:
    return next(c for c in pod["spec"]["containers"] if c["name"] == "main")


def env(pod: dict[str, Any]) -> dict[str, Any]:
    return {entry["name"]: entry.get("value", entry.get("valueFrom")) for entry in main(pod)["env"]}


def test_a_pod_carries_the_name_both_generations_of_labels_and_its_owner() -> None:
    metadata = pod_of(job(), relaunch_count=2)["metadata"]
    assert (metadata["name"], metadata["namespace"]) == ("j-edljob-worker-4", "ns")
    assert metadata["labels"] == {
        "team": "vision",
        "app": "dlrover",
        "elasticjob-name": "j",
        "replica-type": "worker",
        "replica-index": "4",
        "rank-index": "1",
        "restart-count": "2",
        "elasticjob.dlrover/name": "j",
        "elasticjob.dlrover/replica-type": "worker",
        "elasticjob.dlrover/replica-index": "4",
        "elasticjob.dlrover/rank-index": "1",
        "elasticjob.dlrover/relaunch-count": "2",
    }
    assert metadata["annotations"] == {"note": "kept"}
    assert is_owned_by({"metadata": metadata}, job().uid)


def test_what_the_user_wrote_stays_as_written() -> None:
    pod = pod_of(job())
    assert pod["spec"]["nodeSelector"] == {"zone": "a"}
    assert main(pod)["lifecycle"] == {"preStop": {"exec": {"command": ["save"]}}}
    assert main(pod)["resources"] == TEMPLATE["spec"]["containers"][1]["resources"]  # type: ignore[index]
    assert pod["spec"]["containers"][0] == {"name": "side", "image": "proxy"}
    assert pod["spec"]["restartPolicy"] == "Never"


def test_the_environment_comes_before_the_users_own_which_may_refer_to_it() -> None:
    pod = pod_of(job())
    values = env(pod)
    assert values["NODE_RANK"] == values["WORKER_RANK"] == "1"
    assert values["NODE_ID"] == "4"
    assert values["POD_IP"] == {"fieldRef": {"fieldPath": "status.podIP"}}
    assert values["DLROVER_MASTER_ADDR"] == "elasticjob-j-dlrover-master.ns.svc:50001"
    assert values["RESILE_TOKEN_FILE"] == "/var/run/secrets/resile/token"
    names = [entry["name"] for entry in main(pod)["env"]]
    assert names.index("NODE_RANK") < names.index("MINE")
    assert len(names) == len(set(names))


def test_a_training_pod_has_the_jobs_token_and_none_for_the_api() -> None:
    pod = pod_of(job())
    assert pod["spec"]["automountServiceAccountToken"] is False
    assert pod["spec"]["enableServiceLinks"] is False
    volumes = {volume["name"]: volume for volume in pod["spec"]["volumes"]}
    assert volumes["resile-token"]["secret"] == {"secretName": "elasticjob-j-token", "defaultMode": 0o444}
    assert {"name": "resile-token", "mountPath": "/var/run/secrets/resile", "readOnly": True} in main(pod)[
        "volumeMounts"
    ]


def test_a_node_trusts_its_masters_certificate_alone_and_asks_for_its_name() -> None:
    values = env(pod_of(job()))
    assert values["RESILE_TLS_CA"] == "/var/run/secrets/resile/ca.crt"
    assert values["RESILE_TLS_NAME"] == "elasticjob-j-dlrover-master.ns.svc"
    assert "elasticjob-j-tls" not in json.dumps(pod_of(job())), "the key's Secret is for the master alone"
    wanted = Launch(node=NODE, rank=Rank(1), replicas=3)
    assert not any(name.startswith("RESILE_TLS") for name in env(pod_manifest(job(), wanted, "here:1", tls=False)))


def test_shared_memory_is_given_unless_the_template_has_some() -> None:
    assert {"name": "resile-shm", "emptyDir": {"medium": "Memory"}} in pod_of(job())["spec"]["volumes"]
    mounted = json.loads(json.dumps(TEMPLATE))
    mounted["spec"]["volumes"] = [{"name": "mine", "emptyDir": {"medium": "Memory", "sizeLimit": "1Gi"}}]
    mounted["spec"]["containers"][1]["volumeMounts"] = [{"name": "mine", "mountPath": "/dev/shm"}]
    names = [volume["name"] for volume in pod_of(job(mounted))["spec"]["volumes"]]
    assert names == ["mine", "resile-token"]


def test_more_memory_after_an_oom_is_asked_for_and_allowed() -> None:
    pod = pod_of(job(), resources=NodeResources(memory=Bytes(4 * GiB)))
    assert main(pod)["resources"] == {
        "requests": {"cpu": "1", "memory": "4Gi"},
        "limits": {"cpu": "2", "memory": "4Gi"},
    }


def test_a_number_of_gpus_is_asked_for_under_the_name_that_the_template_has() -> None:
    pod = pod_of(job(), resources=NodeResources(gpu=2))
    assert main(pod)["resources"]["limits"]["nvidia.com/gpu"] == "2"
    other = {"containers": [{"name": "main", "image": "i", "resources": {"limits": {"amd.com/gpu": 1}}}]}
    pod = pod_of(job({"spec": other}), resources=NodeResources(gpu=2))
    assert main(pod)["resources"] == {"requests": {"amd.com/gpu": "2"}, "limits": {"amd.com/gpu": "2"}}


def test_a_machine_without_contact_is_let_go_of_in_seconds_unless_the_user_says_otherwise() -> None:
    given = pod_of(job())["spec"]["tolerations"]
    assert {entry["key"]: entry["tolerationSeconds"] for entry in given} == {
        "node.kubernetes.io/not-ready": 10,
        "node.kubernetes.io/unreachable": 10,
    }
    patient = json.loads(json.dumps(TEMPLATE))
    patient["spec"]["tolerations"] = [{"operator": "Exists"}]
    assert pod_of(job(patient))["spec"]["tolerations"] == [{"operator": "Exists"}]


PRIORITIES = [
    ("high", 2, "high"),
    ("low", 0, "low"),
    ("0.5", 1, "high"),
    ("0.5", 2, "low"),
    ("0", 0, "low"),
    ("1", 2, "high"),
    (".34", 1, "high"),
    ("0.33", 1, "low"),
]


@pytest.mark.parametrize(("priority", "rank", "expected"), PRIORITIES)
def test_priority_is_a_class_or_the_share_of_the_first_places(priority: str, rank: int, expected: str) -> None:
    assert pod_of(job(priority=priority), rank)["spec"]["priorityClassName"] == expected


def test_the_places_of_a_parameter_server_job_have_names_that_stay() -> None:
    spec = job(strategy="ParameterServerStrategy")
    service = service_manifest(spec, "worker", Rank(1))
    assert service["metadata"]["name"] == "j-edljob-worker-1"
    assert service["spec"]["ports"] == [{"port": 3333, "targetPort": 3333}]
    cluster = json.loads(env(pod_of(spec))["TF_CONFIG"])["cluster"]
    assert cluster["chief"] == ["j-edljob-chief-0.ns.svc:3333"]


def required(pod: dict[str, Any]) -> list[dict[str, Any]]:
    nodes = pod["spec"]["affinity"]["nodeAffinity"]
    return list(nodes["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"])


def test_a_pod_keeps_off_the_machines_that_fell_silent() -> None:
    pod = pod_of(job(), avoid=("n2", "n1"))
    rules = [{"key": "metadata.name", "operator": "NotIn", "values": [name]} for name in ("n1", "n2")]
    assert required(pod) == [{"matchFields": rules}]
    assert held_back(pod)
    assert not held_back({**pod, "spec": {**pod["spec"], "nodeName": "n3"}})
    assert "affinity" not in pod_of(job())["spec"]
    assert not held_back(pod_of(job()))


def test_what_the_user_asks_of_machines_holds_beside_it() -> None:
    picky = json.loads(json.dumps(TEMPLATE))
    asked = {"matchExpressions": [{"key": "gpu", "operator": "In", "values": ["a100"]}]}
    affinity = {
        "podAntiAffinity": {"kept": True},
        "nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [asked, asked]}},
    }
    picky["spec"]["affinity"] = affinity
    pod = pod_of(job(picky), avoid=("n1",))
    rule = {"key": "metadata.name", "operator": "NotIn", "values": ["n1"]}
    assert required(pod) == [{**asked, "matchFields": [rule]}] * 2
    assert released(pod)["spec"]["affinity"] == affinity
    assert released(pod)["metadata"]["annotations"] == {"note": "kept"}


def test_a_pod_that_was_let_go_is_what_it_would_have_been() -> None:
    plain, freed = pod_of(job()), released(pod_of(job(), avoid=("n1", "n2")))
    assert freed["spec"].pop("affinity") == {"nodeAffinity": {}}
    assert freed == plain


# what is read from pods ---------------------------------------------------------------------------------------------


def pod(phase: str, *, deleted: str = "", container: dict[str, Any] | None = None, **status: Any) -> dict[str, Any]:
    metadata: dict[str, Any] = {"name": "j-edljob-worker-4"}
    if deleted:
        metadata.update(deletionTimestamp=deleted, deletionGracePeriodSeconds=30)
    if container is not None:
        status["containerStatuses"] = [{"name": "main", "state": container}]
    return {"metadata": metadata, "spec": {"nodeName": "n1"}, "status": {"phase": phase, "podIP": "10.0.0.1", **status}}


def ended(code: int, reason: str = "Error", at: str = "2026-01-01T00:00:00Z") -> dict[str, Any]:
    return {"terminated": {"exitCode": code, "reason": reason, "finishedAt": at}}


def read(status: dict[str, Any]) -> tuple[NodeStatus, NodeEnd]:
    seen = observation(NODE, status)
    return seen.status, seen.end


UNSCHEDULABLE = {
    "type": "PodScheduled",
    "status": "False",
    "reason": "Unschedulable",
    "message": "0/3 nodes are available: 3 Insufficient cpu.",
}


def test_a_pod_without_room_is_pending_with_the_schedulers_sentence() -> None:
    expected = NodeEnd(message="0/3 nodes are available: 3 Insufficient cpu.")
    assert read(pod("Pending", conditions=[UNSCHEDULABLE])) == (NodeStatus.PENDING, expected)


@pytest.mark.parametrize("reason", ["SchedulingGated", "SchedulerError"])
def test_a_pod_that_waits_for_the_scheduler_and_not_for_room_is_starting(reason: str) -> None:
    assert read(pod("Pending", conditions=[{**UNSCHEDULABLE, "reason": reason}])) == (NodeStatus.STARTING, NodeEnd())


def test_a_pod_whose_image_cannot_be_pulled_is_pending() -> None:
    waiting = {"waiting": {"reason": "ErrImagePull", "message": "no such\nhost"}}
    assert read(pod("Pending", container=waiting)) == (
        NodeStatus.PENDING,
        NodeEnd(message="ErrImagePull: no such host"),
    )


def test_a_pod_whose_container_beside_the_trainer_keeps_crashing_is_pending() -> None:
    """A native sidecar is an init container that Kubernetes restarts."""
    waiting = {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off 10s restarting failed container"}}
    crashing = pod("Pending", initContainerStatuses=[{"name": "proxy", "state": waiting}])
    expected = NodeEnd(message="CrashLoopBackOff: back-off 10s restarting failed container")
    assert read(crashing) == (NodeStatus.PENDING, expected)


def test_a_pod_on_its_way_is_starting() -> None:
    assert read(pod("Pending"))[0] is NodeStatus.STARTING
    assert read(pod("Pending", container={"waiting": {"reason": "ContainerCreating"}}))[0] is NodeStatus.STARTING
    assert read({"metadata": {"name": "x"}})[0] is NodeStatus.STARTING


def test_a_running_pod_tells_where_it_runs() -> None:
    seen = observation(NODE, pod("Running", container={"running": {}}))
    assert (seen.status, seen.host, seen.address) == (NodeStatus.RUNNING, "n1", "10.0.0.1")


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        (pod("Succeeded", container=ended(0, "Completed")), (NodeStatus.SUCCEEDED, NodeEnd(exit_code=0))),
        (pod("Failed", container=ended(3)), (NodeStatus.FAILED, NodeEnd(exit_code=3))),
        (
            pod("Failed", container=ended(137, "OOMKilled")),
            (NodeStatus.FAILED, NodeEnd(exit_code=137, reason="OOMKilled")),
        ),
        (
            pod("Failed", reason="Evicted", message="The node was low on memory."),
            (NodeStatus.FAILED, NodeEnd(reason="Evicted", message="The node was low on memory.")),
        ),
        (
            pod(
                "Failed",
                container=ended(143),
                conditions=[{"type": "DisruptionTarget", "status": "True", "reason": "TerminationByKubelet"}],
            ),
            (NodeStatus.FAILED, NodeEnd(exit_code=143, reason="Terminated")),
        ),
        (
            pod("Failed", initContainerStatuses=[{"name": "get", "state": ended(7)}]),
            (NodeStatus.FAILED, NodeEnd(exit_code=7)),
        ),
    ],
)
def test_how_a_pod_ended(state: dict[str, Any], expected: tuple[NodeStatus, NodeEnd]) -> None:
    assert read(state) == expected


def test_a_pod_whose_trainer_ended_has_ended_whatever_runs_beside_it() -> None:
    assert read(pod("Running", container=ended(0, "Completed")))[0] is NodeStatus.SUCCEEDED
    assert read(pod("Running", container=ended(1)))[0] is NodeStatus.FAILED


def test_a_pod_that_is_being_deleted_is_gone_at_once() -> None:
    running = pod("Running", deleted="2026-01-01T00:01:00Z", container={"running": {}})
    assert read(running) == (NodeStatus.DELETED, NodeEnd())


def test_a_preempted_pod_says_so() -> None:
    condition = {"type": "DisruptionTarget", "status": "True", "reason": "PreemptionByScheduler"}
    seen = read(pod("Running", deleted="2026-01-01T00:01:00Z", conditions=[condition]))
    assert seen == (NodeStatus.DELETED, NodeEnd(reason="Preempted"))


def test_what_ended_before_it_was_deleted_keeps_its_reason() -> None:
    asked = "2026-01-01T00:01:00Z"  # with its grace of 30 s: deleted at 00:00:30
    assert read(pod("Running", deleted=asked, container=ended(3, at="2026-01-01T00:00:20Z")))[1].exit_code == 3
    assert read(pod("Running", deleted=asked, container=ended(3, at="2026-01-01T00:00:40Z")))[0] is NodeStatus.DELETED
    assert read(pod("Running", deleted=asked, container=ended(143, at="2026-01-01T00:00:30Z")))[0] is NodeStatus.DELETED
    assert read(pod("Running", deleted=asked, container=ended(3, at="2026-01-01T00:00:30Z")))[0] is NodeStatus.FAILED
    assert read(pod("Running", deleted=asked, container=ended(137, "OOMKilled")))[1].reason == "OOMKilled"


def test_a_pod_that_is_not_there_any_more_was_deleted_unless_it_had_ended() -> None:
    assert gone(NODE, pod("Running")).status is NodeStatus.DELETED
    assert gone(NODE, None).status is NodeStatus.DELETED
    assert gone(NODE, pod("Failed", container=ended(3))).status is NodeStatus.FAILED


async def test_a_list_says_nothing_about_pods_that_are_younger() -> None:
    """It was asked for before the pod was made, and answered after: the pod is not gone, the watch will show it."""
    told: list[NodeStatus] = []
    platform = KubernetesPlatform(job(), cast(Client, None))
    platform._observe = lambda seen: told.append(seen.status)
    made = pod("Running", container={"running": {}})
    made["metadata"]["resourceVersion"] = "20"
    platform._on_answer(NODE, made)
    platform._on_list(Listed([], "19"))
    assert told == [NodeStatus.RUNNING]
    platform._on_list(Listed([], "20"))
    assert told == [NodeStatus.RUNNING, NodeStatus.DELETED]
