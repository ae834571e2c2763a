"""Priorities, what a job may use in all, and how often it may crash, on a real cluster."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from tests.kube.namespace import ROOT, KubeNamespace, job, kubectl, plan, training

RANK = "elasticjob.dlrover/rank-index"
PART_OF = "app.kubernetes.io/part-of=resile"


@pytest.fixture
def no_classes(kubernetes: None) -> Iterator[None]:
    """A cluster without the PriorityClasses of config/priority."""
    kubectl("delete", "priorityclass", "-l", PART_OF, "--ignore-not-found")
    yield
    kubectl("delete", "priorityclass", "-l", PART_OF, "--ignore-not-found")


def with_role(manifest: dict[str, Any], **fields: Any) -> dict[str, Any]:
    manifest["spec"]["replicaSpecs"]["worker"].update(fields)
    return manifest


def classes(namespace: KubeNamespace, name: str) -> dict[str, str]:
    """The PriorityClass of every pod that stays, by its rank."""
    return {pod["metadata"]["labels"][RANK]: pod["spec"]["priorityClassName"] for pod in namespace.pods(name).values()}


def test_priority_goes_by_place_and_a_class_that_is_missing_is_told(no_classes: None, cluster: KubeNamespace) -> None:
    cluster.apply(with_role(job("ranked", "sleep 600", 3), priority="0.5"))

    def says() -> str:
        message = str(cluster.status("ranked").get("message", ""))
        return message if message.endswith("no PriorityClass with name high was found") else ""

    sentence = cluster.until("the sentence", says)
    assert re.match(r"worker-\d (\(and \d more\) )?cannot start now: its pod was refused: ", sentence)
    kubectl("apply", "-k", str(ROOT / "config/priority"))
    cluster.until("the pods", lambda: classes(cluster, "ranked") == {"0": "high", "1": "high", "2": "low"})
    first, last = (
        next(name for name, pod in cluster.pods("ranked").items() if pod["metadata"]["labels"][RANK] == rank)
        for rank in ("0", "2")
    )
    cluster.kubectl("delete", "pod", first, last, "--wait=false", "--grace-period=1")
    cluster.until("replacements", lambda: len(cluster.pods("ranked")) == 3 and first not in cluster.pods("ranked"))
    cluster.until("replacements", lambda: classes(cluster, "ranked") == {"0": "high", "1": "high", "2": "low"})
    cluster.kubectl("delete", "elasticjob", "ranked")


def test_a_job_stays_within_its_resource_limits(cluster: KubeNamespace) -> None:
    manifest = job("bounded", training(100_000), resources={"requests": {"cpu": "10m", "memory": "100Mi"}})
    manifest["spec"]["resourceLimits"] = {"cpu": "1", "memory": "300Mi"}
    cluster.apply(manifest)
    cluster.until_members("bounded", 2)
    cluster.apply(plan("beyond", "bounded", replicaResourceSpecs={"worker": {"replicas": 4}}))
    beyond = "the nodes would take 400Mi memory together, and resourceLimits allows the job 300Mi"
    cluster.until("a refusal", lambda: cluster.status("beyond", "scaleplan").get("phase") == "Failed")
    assert cluster.status("beyond", "scaleplan")["message"] == beyond
    cluster.kubectl("scale", "elasticjob/bounded", "--replicas=4")
    status = cluster.until_status("bounded", reason="ScaleRefused")
    assert beyond in status["message"]
    assert len(cluster.pods("bounded")) == 2
    cluster.kubectl("scale", "elasticjob/bounded", "--replicas=3")
    cluster.until_members("bounded", 3)
    cluster.until_status("bounded", reason="JobRunning", phase="Running")
    cluster.kubectl("delete", "elasticjob", "bounded")


def test_memory_after_running_out_of_it_grows_no_further_than_the_limit(cluster: KubeNamespace) -> None:
    eat = "exec python3 -c 'x = bytearray(400 << 20); import time; time.sleep(600)'"
    amount = {"memory": "100Mi"}
    manifest = job("hungry", eat, 1, resources={"requests": amount, "limits": amount})
    manifest["spec"]["resourceLimits"] = {"memory": "150Mi"}
    cluster.apply(manifest)
    status = cluster.until_status("hungry", phase="Failed")
    assert status["lastFailure"]["reason"] == "OOMKilled"
    words = ["get", "pods", "-l", "elasticjob-name=hungry,replica-type=worker", "-o", "json"]
    pods = json.loads(cluster.kubectl(*words))["items"]
    limits = {pod["metadata"]["name"]: pod["spec"]["containers"][0]["resources"]["limits"]["memory"] for pod in pods}
    assert limits == {"hungry-edljob-worker-0": "100Mi", "hungry-edljob-worker-1": "150Mi"}


@pytest.mark.parametrize("budget", [0, 2])
def test_a_node_is_replaced_as_often_as_restart_count_says(cluster: KubeNamespace, budget: int) -> None:
    name = f"crash{budget}"
    cluster.apply(with_role(job(name, "exit 4", 1), restartCount=budget))
    status = cluster.until_status(name, phase="Failed")
    assert f"restartCount is {budget}" in status["message"]
    assert len(cluster.pods(name)) == budget + 1


def test_a_scale_below_the_minimum_is_refused_in_the_status(cluster: KubeNamespace) -> None:
    cluster.apply(job("least", training(100_000).replace("--nnodes=1:", "--nnodes=2:")))
    cluster.until_members("least", 2)
    cluster.kubectl("scale", "elasticjob/least", "--replicas=1")
    status = cluster.until_status("least", reason="ScaleRefused")
    assert "1 nodes are fewer than the 2 that the job needs (--nnodes)" in status["message"]
    assert cluster.progress("least")["members"] == 2
    assert "ScaleRefused" in cluster.events("least")
    cluster.kubectl("delete", "elasticjob", "least")
