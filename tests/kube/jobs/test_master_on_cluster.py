"""One job's life on a real cluster: its pods, its journal, what people ask of it, and what they are told."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import pytest

from resile.kube.client import Client
from resile.kube.config import from_environment
from resile.kube.errors import INVALID, KubeError
from resile.kube.kinds import Kind
from tests.kube.namespace import KUBECONFIG, KubeNamespace, job, plan, training
from tests.support.kinds import ELASTIC_JOBS, SCALE_PLANS

LEAVES = 180.0
"""For a job whose name is taken by the pods of one before: those are given their grace, and the collector its time."""


@pytest.fixture(scope="module")
def long(cluster: KubeNamespace) -> str:
    """A job of two workers that trains all the time; whatever is done to it, the next test finds two again."""
    cluster.apply(job("long", training(100_000)))
    cluster.until_members("long", 2)
    return "long"


def test_a_job_runs_to_its_end_and_its_pods_stay(cluster: KubeNamespace) -> None:
    cluster.apply(job("short", training(20)))
    status = cluster.until_status("short", phase="Succeeded")
    assert status["progress"]["step"] == 20
    cluster.until(
        "their end", lambda: [p["status"]["phase"] for p in cluster.pods("short").values()] == ["Succeeded"] * 2
    )


def _runs(pod: dict[str, Any]) -> bool:
    return bool(pod["status"].get("phase") == "Running")


def _lost(cluster: KubeNamespace, name: str) -> str:
    last = cluster.get("elasticjob", name)["status"].get("lastFailure") or {}
    return str(last.get("node"))


def _at_rest(cluster: KubeNamespace, name: str) -> dict[str, Any] | None:
    """The job's progress, once there is a step and its round has lasted longer than a status takes to be written."""
    before = cluster.get("elasticjob", name)["status"]["progress"]
    time.sleep(2.5)
    now: dict[str, Any] = cluster.get("elasticjob", name)["status"]["progress"]
    return now if now.get("step") and now.get("round") == before.get("round") else None


def test_a_deleted_pod_is_replaced_and_the_loss_is_told(cluster: KubeNamespace, long: str) -> None:
    before = cluster.pods(long)
    victim = max(before)
    cluster.kubectl("delete", "pod", victim, "--wait=false")
    new = cluster.until("a replacement", lambda: set(cluster.pods(long)) - set(before))
    rank = "elasticjob.dlrover/rank-index"
    replacement = cluster.get("pod", next(iter(new)))
    assert replacement["metadata"]["labels"][rank] == before[victim]["metadata"]["labels"][rank]
    cluster.until_members(long, 2)
    cluster.until("the loss", lambda: _lost(cluster, long) == victim)
    assert "NodeRelaunched" in cluster.kubectl("get", "events", "--field-selector", f"involvedObject.name={long}")


def test_a_new_master_goes_on_from_the_config_map_and_disturbs_nobody(cluster: KubeNamespace, long: str) -> None:
    before, pods = cluster.until("rest", lambda: _at_rest(cluster, long)), cluster.pods(long)
    master = f"elasticjob-{long}-dlrover-master"
    old = cluster.get("pod", master)["metadata"]["uid"]
    cluster.kubectl("delete", "pod", master, "--grace-period=0", "--force")

    def newer() -> bool:
        found = json.loads(cluster.kubectl("get", "pods", "-o", "json", "--field-selector", f"metadata.name={master}"))
        return any(i["metadata"]["uid"] != old and i["status"]["phase"] == "Running" for i in found["items"])

    cluster.until("another master", newer)
    cluster.until("its word", lambda: "MasterReturned" in cluster.kubectl("logs", master))
    step = before["step"]
    cluster.until("more steps", lambda: cluster.progress(long).get("step", 0) > step)
    assert cluster.get("elasticjob", long)["status"]["progress"]["round"] == before["round"]
    assert set(cluster.pods(long)) == set(pods)


def _phase(cluster: KubeNamespace, name: str) -> str:
    return str((cluster.get("scaleplan", name).get("status") or {}).get("phase"))


def test_scaling_by_kubectl_and_by_plan(cluster: KubeNamespace, long: str) -> None:
    cluster.kubectl("scale", f"elasticjob/{long}", "--replicas=3")
    cluster.until_members(long, 3)
    cluster.apply(plan("fewer", long, replicaResourceSpecs={"worker": {"replicas": 2}}))
    cluster.until("the plan", lambda: _phase(cluster, "fewer") == "Succeeded")
    cluster.until_members(long, 2)


@pytest.mark.parametrize(
    ("name", "spec", "sentence"),
    [
        ("hosts", {"psHosts": ["somewhere:3333"]}, "later version"),
        ("unknown", {"replicaResourceSpecs": {"ps": {"replicas": 1}}}, "has no role"),
    ],
)
def test_a_plan_that_cannot_be_done_says_why(
    cluster: KubeNamespace, long: str, name: str, spec: dict[str, Any], sentence: str
) -> None:
    cluster.apply(plan(name, long, **spec))
    status = cluster.until(
        "an answer", lambda: (s := cluster.get("scaleplan", name).get("status") or {}).get("phase") == "Failed" and s
    )
    assert sentence in status["message"]


def test_a_suspended_job_lets_go_of_its_pods_and_takes_others_later(cluster: KubeNamespace, long: str) -> None:
    cluster.kubectl("patch", "elasticjob", long, "--type=merge", "-p", '{"spec": {"suspend": true}}')
    cluster.until_status(long, phase="Suspended")
    cluster.until("no pods", lambda: not cluster.pods(long))
    cluster.kubectl("patch", "elasticjob", long, "--type=merge", "-p", '{"spec": {"suspend": false}}')
    cluster.until_members(long, 2)


@pytest.mark.parametrize("kind", [ELASTIC_JOBS, SCALE_PLANS], ids=["job", "plan"])
def test_a_status_meant_for_an_earlier_object_of_the_same_name_is_refused(
    namespace: KubeNamespace, kind: Kind, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = job("same", "true") if kind is ELASTIC_JOBS else plan("same", "no", removePods=[{"type": "worker", "id": 0}])

    async def write(uid: str) -> None:
        client = Client(from_environment(), "test")
        try:
            await client.replace_status(kind, namespace.name, "same", uid, {"phase": "Failed"})
        finally:
            await client.close()

    monkeypatch.setenv("KUBECONFIG", KUBECONFIG)
    namespace.apply(made)
    earlier = namespace.uid(made["kind"], "same")
    asyncio.run(write(earlier))
    assert namespace.status("same", made["kind"]) == {"phase": "Failed"}
    namespace.kubectl("replace", "--force", "-f", "-", stdin=json.dumps(made))
    with pytest.raises(KubeError) as refused:
        asyncio.run(write(earlier))
    assert refused.value.code == INVALID
    assert namespace.status("same", made["kind"]) == {}
    namespace.kubectl("delete", made["kind"], "same")
    with pytest.raises(KubeError) as refused:
        asyncio.run(write(earlier))
    assert refused.value.is_absent


def test_a_job_made_again_at_once_is_left_alone_by_the_master_of_the_one_before(cluster: KubeNamespace) -> None:
    again = job("again", "sleep 1000", 1)
    # A sleep that is a pod's first process hears no SIGTERM: its name, and so the next job, waits for all of this.
    again["spec"]["replicaSpecs"]["worker"]["template"]["spec"]["terminationGracePeriodSeconds"] = 5
    cluster.apply(again)
    cluster.until_status("again", phase="Running")
    cluster.kubectl("replace", "--force", "-f", "-", stdin=json.dumps(again))
    cluster.apply(plan("more", "again", replicaResourceSpecs={"worker": {"replicas": 2}}))
    cluster.until("the plan's end", lambda: _phase(cluster, "more") == "Succeeded", LEAVES)
    status = cluster.until_status("again", phase="Running")
    assert "Failed" not in [entry["type"] for entry in status["status"]["conditions"]]
    assert "completionTime" not in status["status"]


@pytest.mark.parametrize(
    ("name", "container", "sentence"),
    [
        ("noroom", {"resources": {"requests": {"cpu": "1000"}}}, "Insufficient cpu"),
        ("noimage", {"image": "nosuch.example/image:1"}, "nosuch.example/image:1"),
    ],
)
def test_what_cannot_start_is_told_in_the_status(
    cluster: KubeNamespace, name: str, container: dict[str, Any], sentence: str
) -> None:
    cluster.apply(job(name, "true", 1, **container))
    cluster.until(
        "the sentence", lambda: sentence in (cluster.get("elasticjob", name).get("status") or {}).get("message", "")
    )


def test_a_command_that_fails_again_and_again_fails_the_job(cluster: KubeNamespace) -> None:
    cluster.apply(job("crash", "exit 3", 1))
    status = cluster.until_status("crash", phase="Failed")
    assert "exit code 3" in status["message"]
    assert status["lastFailure"]["exitCode"] == 3


def test_a_training_pod_can_do_nothing_at_the_api(cluster: KubeNamespace, long: str) -> None:
    pods = cluster.until("a worker", lambda: [n for n, p in cluster.pods(long).items() if _runs(p)])
    pod = pods[0]
    look = "ls /var/run/secrets/kubernetes.io/serviceaccount 2>&1; ls -l /var/run/secrets/resile/"
    seen = cluster.kubectl("exec", pod, "--", "/bin/bash", "-c", look)
    assert "No such file" in seen
    assert "token" in seen
