"""The first two experiments of seed 004, line by line: scale up and scale down.

The seed's cluster is short of room for the fourth worker. Here each worker takes a seat, a resource made for this
file alone: how many of them are held decides what is Pending, and no other test is the poorer for it.
"""

from __future__ import annotations

import datetime
import json
import re
from typing import Any

import pytest

from tests.kube.namespace import ROOT, job, master, measured
from tests.kube.seeds.mnist_jobs import (
    BLOCK,
    LOADED,
    after,
    delete,
    example,
    listing,
    log_of,
    rounds_of,
    started_at,
    steps_of,
    until_step,
)
from tests.kube.seeds.seed_lines import line, pod_rows, wait

pytestmark = [pytest.mark.usefixtures("deployed"), pytest.mark.timeout(600)]

NO_WAIT = 30.0
"""The seed's job begins "after about 2 min"; ours when the third worker is there, whatever the load."""


def test_scale_up_nodes(seat: str) -> None:
    other: dict[str, Any] = job("other", "sleep 3600", 1, resources={"limits": {seat: "1"}, "requests": {seat: "1"}})
    # A sleep that is a pod's first process hears no SIGTERM: it would keep its seat for all of the usual 30 s.
    other["spec"]["replicaSpecs"]["worker"]["template"]["spec"]["terminationGracePeriodSeconds"] = 1
    line("kubectl -n dlrover apply -f -", stdin=json.dumps(other))
    wait("another job", lambda: pod_rows("other").get("other-edljob-worker-0") == "Running")
    long = example("mnist-up", "elastic_job.yaml", seat, "--num_epochs 1000 --step_delay 0.1")
    line("kubectl -n dlrover apply -f -", stdin=long)

    # At first, there are 3 running workers and 1 pending worker due to the insufficient resource.
    three = [*["Running"] * 3, "Pending"]
    wait("three of four", lambda: sorted(pod_rows("mnist-up").values()) == sorted(["Running", *three]))
    waiting = next(name for name, state in pod_rows("mnist-up").items() if state == "Pending")
    workers = sorted(set(pod_rows("mnist-up")) - {master("mnist-up"), waiting})
    first = workers[0]
    until_step("training of three", first, 0, 20)
    log = log_of(first)
    assert rounds_of(log) == [(0, 3, 6)]
    assert re.search(r"rank \d is initialized local_rank = 1", log)
    agreed = datetime.datetime.strptime(BLOCK.search(log)["at"], "%Y-%m-%d %H:%M:%S,%f")  # type: ignore[index]
    there = max(started_at(pod) for pod in workers)
    waited = (agreed.replace(tzinfo=datetime.UTC) - there).total_seconds()
    measured("third_worker_started_to_group_of_three_seconds", waited)
    assert waited < NO_WAIT
    told = line("kubectl -n dlrover get elasticjob mnist-up -o jsonpath={.status.message}")
    events = line(f"kubectl -n dlrover get events --field-selector involvedObject.name={waiting}")
    assert f"Insufficient {seat}" in events, told

    # Then, we kill another job to release resource and the worker-3 will start.
    before = max(steps_of(log_of(first), 0))
    line("kubectl -n dlrover delete elasticjob other")
    wait("all four", lambda: pod_rows("mnist-up") == listing("mnist-up", *["Running"] * 4))
    until_step("training of four", first, 1, before - 20)
    log = log_of(first)
    assert rounds_of(log) == [(0, 3, 6), (1, 4, 8)], "From the log of worker-0, the training starts with 4"
    assert LOADED.search(after(log, 1)), "what three had learnt is not lost"
    assert rounds_of(log_of(waiting))[0][1:] == (4, 8)
    delete("mnist-up")


def test_scale_down_nodes(seat: str) -> None:
    job = example("mnist-down", "elastic_job.yaml", seat, "--num_epochs 16 --step_delay 0.1")
    line("kubectl -n dlrover apply -f -", stdin=job)
    wait("four workers", lambda: pod_rows("mnist-down") == listing("mnist-down", *["Running"] * 4))
    worker = "mnist-down-edljob-worker-0"
    until_step("training of four", worker, 0, 20)
    assert rounds_of(log_of(worker))[0][1:] == (4, 8)
    rounds = len(rounds_of(log_of(worker)))

    # The seed kills the process named dlrover-run in worker-1 with signal 1.
    line("kubectl -n dlrover exec mnist-down-edljob-worker-1 -- bash -c 'kill -1 $(pgrep -o -f [d]lrover-run)'")
    left = listing("mnist-down", "Running", "Error", "Running", "Running")
    wait("worker-1 in Error", lambda: pod_rows("mnist-down") == left)
    until_step("training of three", worker, rounds, 21)
    log = log_of(worker)
    assert rounds_of(log)[rounds] == (rounds, 3, 6)
    assert len(rounds_of(log)) == rounds + 1
    loaded = LOADED.findall(after(log, rounds))
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
    assert re.search(r"training finished: epochs = 16, .* accuracy = 0\.9", log_of(worker))
    delete("mnist-down")
