"""The experiments of seed 004, line by line: scale up, scale down, a process killed, a pod preempted.

The jobs have names of their own, so that the experiments can go on beside one another and beside seed 000.
The seed's cluster is short of room for the fourth worker. Here each worker takes a seat, a resource made for this
file alone: how many of them are held decides what is Pending, and no other test is the poorer for it.
"""

from __future__ import annotations

import datetime
import json
import re
import uuid
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from tests.kube.namespace import ROOT, job, kubectl, master, measured, patch_node, until
from tests.kube.seeds.seed_lines import line, pod_rows, wait
from tests.support.paths import LEAN

pytestmark = [pytest.mark.usefixtures("deployed"), pytest.mark.timeout(600)]

MNIST = ROOT / "examples/pytorch/mnist"
SEATS = 4
NO_WAIT = 30.0
"""The seed's job begins "after about 2 min"; ours when the third worker is there, whatever the load."""
BLOCK = re.compile(
    r"\[(?P<at>[^]]+)\] \[INFO\] \[\S+:\d+:\w+\] \[[\w-]+\] Rendezvous complete for workers\. Result:\n"
    r"  restart_count=(?P<restarts>\d+)\n"
    r"  master_addr=[\d.]+\n"
    r"  master_port=\d+\n"
    r"  group_rank=(?P<rank>\d+)\n"
    r"  group_world_size=(?P<size>\d+)\n"
    r"  local_ranks=\[0, 1\]\n"
    r"  role_ranks=\[\d+, \d+\]\n"
    r"  global_ranks=\[\d+, \d+\]\n"
    r"  role_world_sizes=\[(?P<world>\d+), (?P=world)\]\n"
    r"  global_world_sizes=\[(?P=world), (?P=world)\]\n"
)
LOADED = re.compile(
    r"\[INFO\] \[sampler\.py:\d+:load_state_dict\] Load epoch = (\d+), completed num = (\d+), num_samples = (\d+)"
)
STEP = re.compile(r"loss = [\d.]+, step = (\d+)")


@pytest.fixture(scope="module")
def seat(deployed: None) -> Iterator[str]:
    """The name of a resource of which the cluster has four."""
    name = f"resile.example/seat-{uuid.uuid4().hex[:8]}"
    found = json.loads(kubectl("get", "nodes", "-o", "json"))["items"]
    nodes = [node["metadata"]["name"] for node in found if node["status"]["nodeInfo"]["kubeletVersion"]]
    path = "/status/capacity/" + name.replace("/", "~1")
    try:
        for number, node in enumerate(nodes):
            share = SEATS // len(nodes) + (number < SEATS % len(nodes))
            patch_node(node, {"op": "add", "path": path, "value": str(share)})
        until("the seats", lambda: sum(int(_room(node, "allocatable").get(name, 0)) for node in nodes) == SEATS)
        yield name
    finally:
        for node in nodes:
            if name in _room(node, "capacity"):
                patch_node(node, {"op": "remove", "path": path})


def _room(node: str, kind: str) -> dict[str, str]:
    return dict(json.loads(kubectl("get", "node", node, "-o", "json"))["status"][kind])


def _example(name: str, file: str, seat: str, more: str) -> str:
    """An example as it is, with a seat for each worker and more to do, so that there is something left to interrupt.

    Nobody asks for much else, so that seats alone decide who starts: a node here has two cores for everything. So the
    pods leave the same parts of torch out as processes of other tests; those of seed 000 import it whole.
    """
    manifest = yaml.safe_load((MNIST / file).read_text())
    manifest["metadata"]["name"] = name
    container = manifest["spec"]["replicaSpecs"]["worker"]["template"]["spec"]["containers"][0]
    container["command"][-1] = container["command"][-1].replace("--num_epochs 5", more)
    container["resources"]["requests"].update({"cpu": "100m", "memory": "512Mi", seat: "1"})
    container["resources"]["limits"].update({"cpu": "2", seat: "1"})
    container["env"] = [{"name": "PYTHONPATH", "value": LEAN}]
    return json.dumps(manifest)


def _log(pod: str) -> str:
    return line(f"kubectl -n dlrover logs {pod} --tail=-1")


def _rounds(log: str) -> list[tuple[int, int, int]]:
    """Of each group the log tells of: restart count, nodes, processes."""
    return [(int(b["restarts"]), int(b["size"]), int(b["world"])) for b in BLOCK.finditer(log)]


def _after(log: str, round: int) -> str:
    """What the log says after the block of a round, counted from 0; nothing before it is there."""
    found = list(BLOCK.finditer(log))
    return log[found[round].end() :] if len(found) > round else ""


def _steps(log: str, round: int) -> list[int]:
    return [int(step) for step in STEP.findall(_after(log, round))]


def _until_step(what: str, pod: str, round: int, step: int) -> None:
    wait(what, lambda: max(_steps(_log(pod), round), default=-1) >= step)


def _workers(name: str, *states: str) -> dict[str, str]:
    workers = {f"{name}-edljob-worker-{number}": state for number, state in enumerate(states) if state}
    return {master(name): "Running", **workers}


def _started(pod: str) -> datetime.datetime:
    status = json.loads(line(f"kubectl -n dlrover get pod {pod} -o json"))["status"]
    return datetime.datetime.fromisoformat(status["containerStatuses"][0]["state"]["running"]["startedAt"])


def _gone(name: str) -> None:
    line(f"kubectl -n dlrover delete elasticjob {name}")
    wait(f"the end of {name}", lambda: not pod_rows(name))


def test_scale_up_nodes(seat: str) -> None:
    other: dict[str, Any] = job("other", "sleep 3600", 1, resources={"limits": {seat: "1"}, "requests": {seat: "1"}})
    # A sleep that is a pod's first process hears no SIGTERM: it would keep its seat for all of the usual 30 s.
    other["spec"]["replicaSpecs"]["worker"]["template"]["spec"]["terminationGracePeriodSeconds"] = 1
    line("kubectl -n dlrover apply -f -", stdin=json.dumps(other))
    wait("another job", lambda: pod_rows("other").get("other-edljob-worker-0") == "Running")
    long = _example("mnist-up", "elastic_job.yaml", seat, "--num_epochs 1000 --step_delay 0.1")
    line("kubectl -n dlrover apply -f -", stdin=long)

    # At first, there are 3 running workers and 1 pending worker due to the insufficient resource.
    three = [*["Running"] * 3, "Pending"]
    wait("three of four", lambda: sorted(pod_rows("mnist-up").values()) == sorted(["Running", *three]))
    waiting = next(name for name, state in pod_rows("mnist-up").items() if state == "Pending")
    workers = sorted(set(pod_rows("mnist-up")) - {master("mnist-up"), waiting})
    first = workers[0]
    _until_step("training of three", first, 0, 20)
    log = _log(first)
    assert _rounds(log) == [(0, 3, 6)]
    assert re.search(r"rank \d is initialized local_rank = 1", log)
    agreed = datetime.datetime.strptime(BLOCK.search(log)["at"], "%Y-%m-%d %H:%M:%S,%f")  # type: ignore[index]
    there = max(_started(pod) for pod in workers)
    waited = (agreed.replace(tzinfo=datetime.UTC) - there).total_seconds()
    measured("third_worker_started_to_group_of_three_seconds", waited)
    assert waited < NO_WAIT
    told = line("kubectl -n dlrover get elasticjob mnist-up -o jsonpath={.status.message}")
    events = line(f"kubectl -n dlrover get events --field-selector involvedObject.name={waiting}")
    assert f"Insufficient {seat}" in events, told

    # Then, we kill another job to release resource and the worker-3 will start.
    before = max(_steps(_log(first), 0))
    line("kubectl -n dlrover delete elasticjob other")
    wait("all four", lambda: pod_rows("mnist-up") == _workers("mnist-up", *["Running"] * 4))
    _until_step("training of four", first, 1, before - 20)
    log = _log(first)
    assert _rounds(log) == [(0, 3, 6), (1, 4, 8)], "From the log of worker-0, the training starts with 4"
    assert LOADED.search(_after(log, 1)), "what three had learnt is not lost"
    assert _rounds(_log(waiting))[0][1:] == (4, 8)
    _gone("mnist-up")


def test_scale_down_nodes(seat: str) -> None:
    job = _example("mnist-down", "elastic_job.yaml", seat, "--num_epochs 24 --step_delay 0.1")
    line("kubectl -n dlrover apply -f -", stdin=job)
    wait("four workers", lambda: pod_rows("mnist-down") == _workers("mnist-down", *["Running"] * 4))
    worker = "mnist-down-edljob-worker-0"
    _until_step("training of four", worker, 0, 20)
    assert _rounds(_log(worker))[0][1:] == (4, 8)
    rounds = len(_rounds(_log(worker)))

    # The seed kills the process named dlrover-run in worker-1 with signal 1.
    line("kubectl -n dlrover exec mnist-down-edljob-worker-1 -- bash -c 'kill -1 $(pgrep -o -f [d]lrover-run)'")
    left = _workers("mnist-down", "Running", "Error", "Running", "Running")
    wait("worker-1 in Error", lambda: pod_rows("mnist-down") == left)
    _until_step("training of three", worker, rounds, 21)
    log = _log(worker)
    assert _rounds(log)[rounds] == (rounds, 3, 6)
    assert len(_rounds(log)) == rounds + 1
    loaded = LOADED.findall(_after(log, rounds))
    assert len(loaded) == 2, "the model and data sampler are restored, by both processes of the worker"
    assert loaded[0] == loaded[1]
    _, completed, samples = map(int, loaded[0])
    total = len(list((ROOT / ".cache/mnist_png/training").glob("*/*.png")))
    assert 0 < completed <= total
    assert samples == -(-(total - completed) // 6), "what is left of the epoch, dealt to six processes"

    # The three go on to the end, and worker-1 is not replaced: its job allows no restart of a node that crashed.
    wait("the end", lambda: "Running" not in pod_rows("mnist-down").values())
    states = {name: state for name, state in pod_rows("mnist-down").items() if state != "Completed"}
    assert states == {"mnist-down-edljob-worker-1": "Error"}
    assert line("kubectl -n dlrover get elasticjob mnist-down -o jsonpath={.status.phase}") == "Succeeded"
    assert re.search(r"training finished: epochs = 24, .* accuracy = 0\.9", _log(worker))
    _gone("mnist-down")


def test_a_process_is_killed_and_a_pod_is_preempted(seat: str) -> None:
    job = _example("chaos-test", "choas_test_job.yaml", seat, "--num_epochs 1000 --step_delay 0.1")
    line("kubectl -n dlrover apply -f -", stdin=job)
    everybody = _workers("chaos-test", *["Running"] * 4)
    wait("four workers", lambda: pod_rows("chaos-test") == everybody)
    witness = "chaos-test-edljob-worker-1"
    _until_step("training", witness, 0, 20)

    # Training Process Corruption: ps -aux | grep cnn_train.py, kill -9 ${PID}; all workers are still running.
    rounds = len(_rounds(_log(witness)))
    listed = line(f"kubectl -n dlrover exec {witness} -- bash -c 'ps -aux | grep cnn_train.py'")
    pid = next(row.split()[1] for row in listed.splitlines() if "dlrover-run" not in row and "grep" not in row)
    line(f"kubectl -n dlrover exec {witness} -- bash -c 'kill -9 {pid}'")
    _until_step("training after the kill", witness, rounds, 21)
    assert pod_rows("chaos-test") == everybody
    assert _rounds(_log(witness))[rounds][1:] == (4, 8)

    # Pod is Preempted: worker-4 comes for worker-0, with its rank.
    rounds = len(_rounds(_log(witness)))
    rank = "-o jsonpath={.metadata.labels.rank-index}"
    place = line(f"kubectl -n dlrover get pod chaos-test-edljob-worker-0 {rank}")
    line("kubectl -n dlrover delete pod chaos-test-edljob-worker-0")
    replaced = _workers("chaos-test", "", *["Running"] * 4)
    wait("the replacement", lambda: pod_rows("chaos-test") == replaced)
    assert line(f"kubectl -n dlrover get pod chaos-test-edljob-worker-4 {rank}") == place
    wait("a group of four", lambda: (4, 8) in [r[1:] for r in _rounds(_log(witness))[rounds:]])
    last = len(_rounds(_log(witness))) - 1
    _until_step("training with the replacement", witness, last, 21)
    _gone("chaos-test")
