"""The operator as a process of its own against a real cluster: masters come, are kept, and go."""

from __future__ import annotations

import json
import re
import signal
import socket
import time
import urllib.request
from typing import Any

from tests.kube.namespace import GROUP, KubeNamespace, kubectl, master, measured, plan, until

FAIL_OVER = 40.0
"""15 s of a silent leader, the 2 s between two looks of the next, and what a busy machine adds."""
HANDED_OVER = 10.0
"""For the next to lead when the leader has let go: less than the 15 s of one that fell silent."""

STAND_IN = "trap 'exit 143' TERM; sleep 3600 & wait"
MASTER_PARTS = ("pod", "service", "serviceaccount", "role", "rolebinding", "configmap")


def manifest(
    name: str, script: str = STAND_IN, *, pod: dict[str, Any] | None = None, **metadata: Any
) -> dict[str, Any]:
    """A job whose master is a shell script in the place of the real one."""
    container = {"name": "main", "image": "busybox:latest", "command": ["sh", "-c", script]}
    template = {"spec": {"containers": [{"name": "main", "image": "busybox:latest", "command": ["sleep", "1"]}]}}
    return {
        "apiVersion": GROUP,
        "kind": "ElasticJob",
        "metadata": {"name": name, **metadata},
        "spec": {
            "distributionStrategy": "AllreduceStrategy",
            "replicaSpecs": {
                "dlrover-master": {"template": {"spec": {"containers": [container], **(pod or {})}}},
                "worker": {"replicas": 1, "template": template},
            },
        },
    }


def test_a_job_gets_its_master_and_all_that_belongs_to_it(operated: KubeNamespace) -> None:
    begun = time.monotonic()
    operated.apply(manifest("one", labels={"team": "red"}))
    until("the master's pod", lambda: operated.uid("pod", master("one")))
    measured("apply_to_pod_seconds", time.monotonic() - begun)
    operated.running("one")
    for kind in MASTER_PARTS:
        found = operated.get(kind, master("one"))
        assert found["metadata"]["ownerReferences"][0]["name"] == "one", kind
    assert operated.get("secret", "elasticjob-one-token")["data"]["token"]
    pods = operated.kubectl("get", "pods", "-l", "elasticjob-name=one", "-o", "name")
    assert pods.split() == [f"pod/{master('one')}"]
    until("Pending", lambda: operated.status("one").get("reason") == "JobPending")
    events = operated.kubectl("get", "events", "--field-selector=involvedObject.kind=ElasticJob")
    assert "MasterCreated" in events


def test_a_master_may_do_its_work_in_its_namespace_and_nothing_else(operated: KubeNamespace) -> None:
    operated.apply(manifest("one"))
    until("the binding", lambda: operated.uid("rolebinding", master("one")))
    user = f"--as=system:serviceaccount:{operated.name}:{master('one')}"

    def may(*words: str) -> bool:
        return kubectl("auth", "can-i", *words, user, check=False).strip().endswith("yes")

    here = ("-n", operated.name)
    assert may("create", "pods", *here)
    assert may("patch", f"configmaps/{master('one')}", *here)
    assert may("patch", "elasticjobs.elastic.iml.github.io/one", "--subresource=status", *here)
    assert not may("patch", "elasticjobs.elastic.iml.github.io/two", "--subresource=status", *here)
    assert not may("patch", "configmaps/other", *here)
    assert not may("get", "secrets", *here)
    assert not may("create", "pods", "--subresource=exec", *here)
    assert not may("list", "pods", "-n", "default")
    assert not may("list", "nodes")


def test_a_deleted_master_comes_back(operated: KubeNamespace) -> None:
    operated.apply(manifest("one"))
    old = operated.running("one")
    begun = time.monotonic()
    operated.kubectl("delete", "pod", master("one"), "--wait=false")
    operated.replaced("one", old)
    measured("deleted_to_new_pod_seconds", time.monotonic() - begun)
    operated.running("one")
    assert operated.get("pod", master("one"))["metadata"]["labels"]["replica-index"] == "1"
    assert "MasterRestarted" in operated.kubectl("get", "events")


def test_a_master_removed_by_force_comes_back(operated: KubeNamespace) -> None:
    operated.apply(manifest("one"))
    old = operated.running("one")
    begun = time.monotonic()
    operated.kubectl("delete", "pod", master("one"), "--force", "--grace-period=0", "--wait=false")
    operated.replaced("one", old)
    measured("forced_to_new_pod_seconds", time.monotonic() - begun)


def test_a_killed_operator_catches_up_and_the_token_stays(namespace: KubeNamespace) -> None:
    first = namespace.operator("--no-leader-elect")
    namespace.apply(manifest("one"))
    old = namespace.running("one")
    token = namespace.get("secret", "elasticjob-one-token")
    first.kill()
    first.wait(10)
    namespace.kubectl("delete", "pod", master("one"), "--wait=true")
    namespace.kubectl("delete", "service", master("one"))
    namespace.apply(manifest("two"))
    namespace.operator("--no-leader-elect")
    namespace.replaced("one", old)
    namespace.running("two")
    until("the Service", lambda: namespace.uid("service", master("one")))
    assert namespace.get("secret", "elasticjob-one-token") == token


def test_a_service_that_somebody_deleted_comes_back(operated: KubeNamespace) -> None:
    operated.apply(manifest("one"))
    operated.running("one")
    old = operated.uid("service", master("one"))
    operated.kubectl("delete", "service", master("one"))
    until("the Service", lambda: operated.uid("service", master("one")) not in ("", old))


def test_one_operator_acts_and_another_follows_it(namespace: KubeNamespace) -> None:
    first = namespace.operator()
    namespace.apply(manifest("one"))
    namespace.running("one")
    second = namespace.operator()
    until("the second to wait", lambda: "waits" in namespace.log(1))
    assert "watching" not in namespace.log(1)
    begun = time.monotonic()
    first.kill()
    until("the second to lead", lambda: "watching" in namespace.log(1), FAIL_OVER)
    measured("fail_over_after_a_kill_seconds", time.monotonic() - begun)
    third = namespace.operator()
    until("the third to wait", lambda: "waits" in namespace.log(2))
    begun = time.monotonic()
    second.send_signal(signal.SIGTERM)
    assert second.wait(10) == 0
    until("the third to lead", lambda: "watching" in namespace.log(2), HANDED_OVER)
    measured("fail_over_after_sigterm_seconds", time.monotonic() - begun)
    old = namespace.uid("pod", master("one"))
    namespace.kubectl("delete", "pod", master("one"), "--force", "--grace-period=0", "--wait=false")
    namespace.replaced("one", old)
    assert third.poll() is None


def test_an_operator_whose_lease_is_taken_steps_down(namespace: KubeNamespace) -> None:
    first = namespace.operator()
    until("a leader", lambda: "watching" in namespace.log(0))
    patch = json.dumps({"spec": {"holderIdentity": "somebody"}})
    namespace.kubectl("patch", "lease", "resile-operator", "--type=merge", "-p", patch)
    assert first.wait(10) == 1
    assert "stepping down" in namespace.log(0)


def test_deleting_a_job_removes_everything(operated: KubeNamespace) -> None:
    operated.apply(manifest("one"))
    operated.running("one")
    operated.kubectl("delete", "elasticjob", "one")
    selector = "elasticjob.dlrover/name=one"
    kinds = f"{','.join(MASTER_PARTS)},secret"
    until("nothing to be left", lambda: not operated.kubectl("get", kinds, "-l", selector, "-o", "name").strip())


def test_a_job_of_the_same_name_gets_a_token_and_a_journal_of_its_own(operated: KubeNamespace) -> None:
    operated.apply(manifest("one"))
    old = operated.running("one")
    token = operated.get("secret", "elasticjob-one-token")["data"]
    operated.kubectl("delete", "elasticjob", "one")
    operated.apply(manifest("one"))
    operated.replaced("one", old)
    operated.running("one")
    assert operated.get("secret", "elasticjob-one-token")["data"] != token
    job = operated.uid("elasticjob", "one")
    for kind in MASTER_PARTS:
        owners = operated.get(kind, master("one"))["metadata"]["ownerReferences"]
        assert [owner["uid"] for owner in owners] == [job], kind


def test_jobs_end_as_their_masters_do(operated: KubeNamespace) -> None:
    operated.apply(
        manifest("good", "exit 0"), manifest("bad", "echo no worker is left; exit 10"), manifest("lost", "exit 78")
    )
    until("Succeeded", lambda: operated.status("good").get("phase") == "Succeeded")
    until("Failed", lambda: operated.status("bad").get("phase") == "Failed")
    until("Failed", lambda: operated.status("lost").get("phase") == "Failed")
    assert operated.status("bad")["message"].endswith("exit code 10 (no worker is left)")
    assert operated.status("good")["status"]["completionTime"]
    for job in ("good", "bad", "lost"):
        assert operated.get("pod", master(job))["metadata"]["labels"]["replica-index"] == "0"


def test_a_master_that_crashes_is_started_again_and_again_with_pauses(operated: KubeNamespace) -> None:
    operated.apply(manifest("one", "echo out of luck; exit 1"))
    said = re.compile(r"the master ended \d+ times in a row, the last time: exit code 1 \(out of luck\)")
    until("the pauses", lambda: said.match(operated.status("one").get("message", "")))
    assert operated.status("one")["phase"] in ("Created", "Pending")


def test_the_pods_of_an_ended_job_go_when_their_time_is_over(operated: KubeNamespace) -> None:
    operated.apply(manifest("one", "exit 0", annotations={"ttl_seconds_after_finished": "3"}))
    until("Succeeded", lambda: operated.status("one").get("phase") == "Succeeded")
    assert operated.uid("pod", master("one"))
    until("the pod to go", lambda: not operated.uid("pod", master("one")))
    assert operated.status("one")["phase"] == "Succeeded"


def test_a_manifest_that_cannot_be_run_says_why_and_runs_once_put_right(operated: KubeNamespace) -> None:
    operated.apply(manifest("one", annotations={"recovery_budget": "soon"}))
    until("Failed", lambda: operated.status("one").get("phase") == "Failed")
    status = operated.status("one")
    assert status["reason"] == "InvalidSpec"
    assert status["message"].startswith("metadata.annotations.recovery_budget: must be")
    assert status["status"]["conditions"][-1]["message"] == status["message"]
    assert not operated.uid("pod", master("one"))
    operated.apply(manifest("one", annotations={"recovery_budget": "10s"}))
    operated.running("one")


def test_a_master_without_room_or_image_says_so_in_one_sentence(operated: KubeNamespace) -> None:
    nowhere = manifest("nowhere", pod={"nodeSelector": {"no": "such-node"}})
    unknown = manifest("unknown")
    containers = unknown["spec"]["replicaSpecs"]["dlrover-master"]["template"]["spec"]["containers"]
    containers[0]["image"] = "registry.invalid/none:1"
    operated.apply(nowhere, unknown)

    def says(job: str, words: str) -> bool:
        status = operated.status(job)
        return status.get("phase") == "Pending" and words in status.get("message", "")

    until("the sentence", lambda: says("nowhere", "the master cannot be scheduled: 0/"))
    until("the sentence", lambda: says("unknown", "the master's image registry.invalid/none:1 cannot be pulled: "))
    operated.apply(manifest("small", pod={"priorityClassName": "no-such-class"}))
    until("the sentence", lambda: says("small", "the master's pod cannot be created: "))


def test_plans_for_nobody_are_refused(operated: KubeNamespace) -> None:
    def wish(name: str, job: str, role: str) -> dict[str, Any]:
        return plan(name, job, replicaResourceSpecs={role: {"replicas": 2}})

    operated.apply(wish("early", "one", "worker"), wish("nobody", "none", "worker"), manifest("one"))
    operated.apply(wish("role", "one", "ps"))

    def reason(name: str) -> str:
        return str(operated.status(name, "scaleplan").get("reason", ""))

    until("a refusal", lambda: reason("role") == "RoleNotFound")
    until("a refusal", lambda: reason("nobody") == "JobNotFound")
    assert "there is no ElasticJob none" in operated.status("nobody", "scaleplan")["message"]
    assert reason("early") == ""


def test_health_and_metrics_answer(namespace: KubeNamespace) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    namespace.operator("--no-leader-elect", port=port)
    namespace.apply(manifest("one"))
    namespace.running("one")

    def ask(path: str) -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5) as answer:
            return str(answer.read().decode())

    assert ask("/healthz") == ask("/readyz") == "ok\n"
    assert 'resile_operator_master_starts_total{which="first"} 1.0' in ask("/metrics")
