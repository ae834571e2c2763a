"""What breaks under a job on a real cluster, and what becomes of it: it trains on, or says what is wrong."""

from __future__ import annotations

import json
import re
import subprocess
import time
from typing import Any

import pytest

from tests.kube import fault_tools
from tests.kube.namespace import KubeNamespace, job, master, measured, training

pytestmark = pytest.mark.timeout(300)

PARTS = "pods,services,serviceaccounts,roles,rolebindings,configmaps,secrets"
SLOW = 180.0
"""For what takes a kubelet several turns: the pods of a deleted job to go, and others to come."""


def lasting(name: str, replicas: int = 2) -> dict[str, Any]:
    """A job that trains for ever; it asks for CPU, or the other pods of its machine would starve it."""
    return job(name, training(1_000_000), replicas, resources={"requests": {"cpu": "100m", "memory": "64Mi"}})


def steps(namespace: KubeNamespace, pod: str) -> int:
    """The newest step that a worker has told of, from the worker itself."""
    found = re.findall(r"step = (\d+)", namespace.kubectl("logs", pod, "--tail=20", check=False))
    return int(found[-1]) if found else -1


def until_more_steps(namespace: KubeNamespace, name: str) -> None:
    """Wait until every worker of a job has made a step more than it has now."""
    before = {pod: steps(namespace, pod) for pod in namespace.pods(name)}
    assert before
    for pod, step in before.items():
        namespace.until(f"a step of {pod} after {step}", lambda pod=pod, step=step: steps(namespace, pod) > step)


def uids(namespace: KubeNamespace, name: str) -> dict[str, str]:
    return {pod: found["metadata"]["uid"] for pod, found in namespace.pods(name).items()}


def at_rest(namespace: KubeNamespace, name: str) -> dict[str, Any]:
    """The job's progress once no round has begun or ended for longer than a status takes to be written."""
    last: list[tuple[float, Any]] = [(time.monotonic(), None)]

    def settled() -> dict[str, Any] | None:
        now = namespace.progress(name)
        if (now.get("round"), now.get("members")) != last[0][1]:
            last[0] = (time.monotonic(), (now.get("round"), now.get("members")))
        return now if now.get("round") and time.monotonic() - last[0][0] > 2.5 else None

    return dict(namespace.until("rest", settled))


def edit(namespace: KubeNamespace, name: str, **annotations: str | None) -> None:
    patch = json.dumps({"metadata": {"annotations": annotations}})
    namespace.kubectl("patch", "elasticjob", name, "--type=merge", "-p", patch)


def says(namespace: KubeNamespace, name: str, words: str) -> bool:
    return words in str(namespace.status(name).get("message", ""))


def force(namespace: KubeNamespace, pod: str) -> None:
    namespace.kubectl("delete", "pod", pod, "--grace-period=0", "--force", "--wait=false")


def kill(operator: subprocess.Popen[bytes]) -> None:
    operator.kill()
    operator.wait(10)


def until_returned(namespace: KubeNamespace, name: str, old: str) -> None:
    """Wait until another master than `old` has taken over from the journal."""
    namespace.replaced(name, old)
    namespace.running(name)
    namespace.until("its word", lambda: "MasterReturned" in namespace.logs(master(name)))


# the operator and the masters ---------------------------------------------------------------------------------------


def test_jobs_train_on_without_operator_and_master_and_the_next_operator_catches_up(namespace: KubeNamespace) -> None:
    first = namespace.operator("--no-leader-elect")
    namespace.apply(lasting("long"))
    namespace.until_members("long", 2)
    before, pods, old = at_rest(namespace, "long"), uids(namespace, "long"), namespace.running("long")
    kill(first)
    force(namespace, master("long"))
    namespace.until("no master", lambda: not namespace.uid("pod", master("long")))
    namespace.apply(job("new", training(10)))
    until_more_steps(namespace, "long")
    begun = time.monotonic()
    namespace.operator("--no-leader-elect")
    until_returned(namespace, "long", old)
    measured("new_operator_to_master_returned_seconds", time.monotonic() - begun)
    namespace.until_status("new", phase="Succeeded")
    until_more_steps(namespace, "long")
    assert uids(namespace, "long") == pods
    assert namespace.progress("long")["round"] == before["round"]


def test_a_job_deleted_without_an_operator_leaves_nothing_and_its_name_can_be_used_at_once(
    namespace: KubeNamespace,
) -> None:
    parts = ("get", PARTS, "-l", "elasticjob.dlrover/name=one", "-o")
    operator = namespace.operator("--no-leader-elect")
    namespace.apply(lasting("one"))
    namespace.until_members("one", 2)
    token = namespace.get("secret", "elasticjob-one-token")["data"]["token"]
    kill(operator)
    namespace.kubectl("delete", "elasticjob", "one")
    namespace.apply(lasting("one"))
    operator = namespace.operator("--no-leader-elect")
    namespace.until_members("one", 2, SLOW)
    assert set(namespace.pods("one")) == {"one-edljob-worker-0", "one-edljob-worker-1"}, "ids begin anew"
    assert namespace.get("secret", "elasticjob-one-token")["data"]["token"] != token
    mine = namespace.uid("elasticjob", "one")
    for item in json.loads(namespace.kubectl(*parts, "json"))["items"]:
        owners = {owner["uid"] for owner in item["metadata"]["ownerReferences"]}
        assert owners == {mine} or "deletionTimestamp" in item["metadata"], item["metadata"]["name"]

    kill(operator)
    namespace.kubectl("delete", "elasticjob", "one")
    namespace.until("nothing to be left", lambda: not namespace.kubectl(*parts, "name").strip(), SLOW)


# bad edits and lost journals ----------------------------------------------------------------------------------------


def test_a_bad_edit_ends_nothing_is_told_and_forgotten_when_it_is_put_right(operated: KubeNamespace) -> None:
    operated.apply(lasting("long"))
    operated.until_members("long", 2)
    before, pods, old = at_rest(operated, "long"), uids(operated, "long"), operated.running("long")
    edit(operated, "long", recovery_budget="soon")
    operated.until("the sentence", lambda: says(operated, "long", "recovery_budget: must be"))
    force(operated, master("long"))
    until_returned(operated, "long", old)
    operated.until("the sentence", lambda: says(operated, "long", "the job goes on as it was: "))
    assert operated.status("long")["reason"] == "InvalidSpec"
    until_more_steps(operated, "long")
    edit(operated, "long", recovery_budget=None)
    operated.until("good words", lambda: operated.status("long").get("reason") == "JobRunning")
    assert operated.status("long").get("message", "") == ""
    assert uids(operated, "long") == pods
    assert operated.progress("long")["round"] == before["round"]


def test_a_deleted_journal_is_written_again_by_its_master_and_refused_by_the_next(namespace: KubeNamespace) -> None:
    operator = namespace.operator("--no-leader-elect")
    namespace.apply(lasting("long"))
    namespace.until_members("long", 2)
    at_rest(namespace, "long")
    old = namespace.running("long")
    namespace.kubectl("delete", "configmap", master("long"))
    force(namespace, max(namespace.pods("long")))  # something to write down

    def written() -> bool:
        return "snapshot" in (namespace.get("configmap", master("long")).get("binaryData") or {})

    namespace.until("the journal", written)
    namespace.until("a third worker", lambda: "long-edljob-worker-2" in namespace.pods("long"))
    namespace.until_members("long", 2)
    namespace.until("good words", lambda: namespace.status("long").get("reason") == "JobRunning")
    assert namespace.uid("pod", master("long")) == old, "its master never noticed more than a pause"

    kill(operator)
    namespace.kubectl("delete", "pod", master("long"))
    namespace.kubectl("delete", "configmap", master("long"))
    namespace.operator("--no-leader-elect")
    status = namespace.until_status("long", SLOW, phase="Failed")
    assert f"the journal {master('long')} is empty, but the job's status tells of its nodes" in status["message"]
    namespace.until("no nodes", lambda: not namespace.pods("long"))


# the cluster itself -------------------------------------------------------------------------------------------------


@pytest.mark.alone
def test_an_api_server_that_is_killed_under_load_costs_no_job_anything(operated: KubeNamespace) -> None:
    names = ("red", "green", "blue")
    operated.apply(*(lasting(name) for name in names))
    for name in names:
        operated.until_members(name, 2)
    before = {name: at_rest(operated, name) for name in names}
    pods = {name: {**uids(operated, name), "master": operated.running(name)} for name in names}
    begun = time.monotonic()
    fault_tools.restart("kube-apiserver")
    measured("api_server_away_seconds", time.monotonic() - begun)
    for name in names:
        until_more_steps(operated, name)
        step = before[name].get("step") or 0
        operated.until("the status", lambda name=name, step=step: (operated.progress(name).get("step") or 0) > step)
        assert {**uids(operated, name), "master": operated.running(name)} == pods[name]
        assert operated.progress(name)["round"] == before[name]["round"]
        assert operated.status(name)["phase"] == "Running"
    victim = max(operated.pods("red"))
    force(operated, victim)
    operated.until("a replacement", lambda: "red-edljob-worker-2" in operated.pods("red"))
    operated.until_members("red", 2)


def scattered(name: str, replicas: int) -> dict[str, Any]:
    """A job whose master is on the first machine, and whose workers are on the others."""
    made = lasting(name, replicas)
    roles = made["spec"]["replicaSpecs"]
    host = "kubernetes.io/hostname"
    roles["dlrover-master"] = {"template": {"spec": {"nodeSelector": {host: fault_tools.NODES[0]}}}}
    others = {"key": host, "operator": "In", "values": list(fault_tools.NODES[1:])}
    wanted = {"nodeSelectorTerms": [{"matchExpressions": [others]}]}
    pod = roles["worker"]["template"]["spec"]
    pod["affinity"] = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": wanted}}
    return made


def machines(namespace: KubeNamespace, name: str) -> dict[str, str]:
    return {pod: str(found["spec"].get("nodeName")) for pod, found in namespace.pods(name).items()}


def all_pods(namespace: KubeNamespace, name: str) -> list[str]:
    """The workers that have not ended, those on their way out included."""
    words = ("get", "pods", "-l", f"elasticjob-name={name},replica-type=worker", "-o", "json")
    items = json.loads(namespace.kubectl(*words))["items"]
    return [item["metadata"]["name"] for item in items if item["status"]["phase"] not in ("Failed", "Succeeded")]


def until_alone(namespace: KubeNamespace, name: str, number: int) -> None:
    """Wait until a job has so many workers, and nothing of others is left; then see that it stays so."""
    namespace.until("the old ones to go", lambda: len(all_pods(namespace, name)) == number, fault_tools.NOTICED)
    namespace.until_members(name, number)
    settled = at_rest(namespace, name)
    assert (settled["members"], len(all_pods(namespace, name))) == (number, number), "nothing is doubled"
    until_more_steps(namespace, name)


@pytest.mark.alone
def test_workers_of_a_machine_that_stands_still_are_replaced_elsewhere_and_not_doubled(operated: KubeNamespace) -> None:
    operated.apply(scattered("job", 4))
    operated.until_members("job", 4)
    at_rest(operated, "job")
    before = machines(operated, "job")
    machine = before[max(before)]
    lost = {pod for pod, where in before.items() if where == machine}
    begun = time.monotonic()
    with fault_tools.frozen(machine):
        new = operated.until(
            "the replacements",
            lambda: (now := machines(operated, "job")) and len(now) == 4 and not lost & now.keys() and now,
        )
        measured("machine_lost_to_replacements_seconds", time.monotonic() - begun)
        operated.until_members("job", 4)
        measured("machine_lost_to_full_round_seconds", time.monotonic() - begun)
        assert machine not in machines(operated, "job").values()
        assert set(before) - lost <= set(new), "who is well stays"
    until_alone(operated, "job", 4)
    operated.until_status("job", phase="Running")


@pytest.mark.alone
def test_workers_of_a_machine_without_a_kubelet_are_replaced_elsewhere_and_not_doubled(operated: KubeNamespace) -> None:
    operated.apply(scattered("job", 2))
    operated.until_members("job", 2)
    at_rest(operated, "job")
    before = machines(operated, "job")
    machine = before[max(before)]
    lost = {pod for pod, where in before.items() if where == machine}
    with fault_tools.without_kubelet(machine):
        fault_tools.until_given_up(machine)
        operated.until(
            "the replacements",
            lambda: len(now := operated.pods("job")) == 2 and not lost & now.keys(),
            fault_tools.NOTICED,
        )
        operated.until_members("job", 2)
        assert machine not in machines(operated, "job").values()
        until_more_steps(operated, "job")
    until_alone(operated, "job", 2)
