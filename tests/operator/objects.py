"""Jobs, pods and plans as an API server shows them, for the tests of this folder."""

from __future__ import annotations

from typing import Any

from resile.api.job import JobSpec
from resile.kube.manifests import read_job
from tests.support.kinds import ELASTIC_JOB

UID = "11111111-2222-3333-4444-555555555555"
NOW = 1_800_000_000.0
"""2027-01-15T08:00:00Z"""


def job(
    phase: str = "",
    reason: str = "",
    message: str = "",
    *,
    master: dict[str, Any] | None = None,
    inner: dict[str, Any] | None = None,
    **metadata: Any,
) -> dict[str, Any]:
    template = {"spec": {"containers": [{"name": "main", "image": "train:1", "command": ["train"]}]}}
    roles: dict[str, Any] = {"worker": {"replicas": 2, "template": template}}
    if master is not None:
        roles["dlrover-master"] = master
    status = {"phase": phase, "reason": reason, "message": message, "status": inner or {}}
    return {
        "apiVersion": "elastic.iml.github.io/v1alpha1",
        "kind": "ElasticJob",
        "metadata": {
            "name": "mnist",
            "namespace": "red",
            "uid": UID,
            "resourceVersion": "7",
            "generation": 1,
            "creationTimestamp": "2027-01-15T07:59:59Z",
            **metadata,
        },
        "spec": {"distributionStrategy": "AllreduceStrategy", "replicaSpecs": roles},
        "status": {key: value for key, value in status.items() if value},
    }


def read(item: dict[str, Any]) -> JobSpec:
    found = read_job(ELASTIC_JOB, item)
    assert isinstance(found, JobSpec)
    return found


def pod(phase: str = "Running", *, uid: str = "pod-0", owner: str = UID, **more: Any) -> dict[str, Any]:
    """A master's pod; `exit_code` and `words` of its container, `status` and `metadata` to lay over."""
    status: dict[str, Any] = {"phase": phase}
    if "exit_code" in more:
        ended = {"exitCode": more.pop("exit_code"), "message": more.pop("words", "")}
        status["containerStatuses"] = [{"name": "main", "state": {"terminated": ended}}]
    return {
        "metadata": {
            "name": "elasticjob-mnist-dlrover-master",
            "namespace": "red",
            "uid": uid,
            "creationTimestamp": "2027-01-15T07:59:59Z",
            "labels": {"replica-index": "0"},
            "ownerReferences": [{"uid": owner, "controller": True}],
            **more.pop("metadata", {}),
        },
        "status": {**status, **more.pop("status", {})},
    }


def plan(spec: dict[str, Any] | None = None, phase: str = "", **metadata: Any) -> dict[str, Any]:
    return {
        "apiVersion": "elastic.iml.github.io/v1alpha1",
        "kind": "ScalePlan",
        "metadata": {
            "name": "up",
            "namespace": "red",
            "uid": "plan-0",
            "resourceVersion": "3",
            "creationTimestamp": "2027-01-15T07:59:59Z",
            "labels": {"elasticjob-name": "mnist", "scale-type": "manual"},
            **metadata,
        },
        "spec": spec or {"ownerJob": "mnist", "replicaResourceSpecs": {"worker": {"replicas": 3}}},
        "status": {"phase": phase} if phase else {},
    }
