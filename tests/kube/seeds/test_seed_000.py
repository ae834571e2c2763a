"""The first hour of a user, line by line: deploy, grant, apply, look, delete a worker, see it restored, finish."""

from __future__ import annotations

import re

import pytest

from tests.kube.namespace import ROOT
from tests.kube.seeds.seed_lines import AGE, line, phase, pod_rows, wait

pytestmark = [pytest.mark.usefixtures("deployed"), pytest.mark.timeout(600)]

JOB = ROOT / "examples/torch_mnist_master_backend_job.yaml"


def test_seed_000_line_by_line() -> None:
    line("kubectl -n dlrover apply -f config/rbac/default_role.yaml")
    # The seed's manifest, with more to do, so that there is something left to interrupt.
    longer = JOB.read_text().replace("--num_epochs 5", "--num_epochs 12 --step_delay 0.1")
    line("kubectl -n dlrover apply -f -", stdin=longer)

    wait("the workers", lambda: list(pod_rows("torch-mnist").values()) == ["Running"] * 3)
    logs = "kubectl -n dlrover logs -l elasticjob-name=torch-mnist,replica-type=worker --tail=-1"
    wait("training", lambda: "step = 20" in line(logs))
    header, row = line("kubectl -n dlrover get elasticjob torch-mnist").splitlines()
    assert header.split() == ["NAME", "PHASE", "AGE"]
    assert re.fullmatch(rf"torch-mnist +Running +{AGE}", row)
    assert pod_rows("torch-mnist") == {
        "elasticjob-torch-mnist-dlrover-master": "Running",
        "torch-mnist-edljob-worker-0": "Running",
        "torch-mnist-edljob-worker-1": "Running",
    }

    line("kubectl -n dlrover delete pod torch-mnist-edljob-worker-1 --wait=false")
    wait("the replacement", lambda: pod_rows("torch-mnist").get("torch-mnist-edljob-worker-2") == "Running")
    rank = line("kubectl -n dlrover get pod torch-mnist-edljob-worker-2 -o jsonpath={.metadata.labels.rank-index}")
    assert rank == "1", "a new id, and the place of the deleted one"

    wait("the end", lambda: phase("torch-mnist") in ("Succeeded", "Failed"))
    assert phase("torch-mnist") == "Succeeded", line("kubectl -n dlrover describe elasticjob torch-mnist")
    wait("quiet", lambda: "Running" not in pod_rows("torch-mnist").values())
    assert pod_rows("torch-mnist") == {
        "elasticjob-torch-mnist-dlrover-master": "Completed",
        "torch-mnist-edljob-worker-0": "Completed",
        "torch-mnist-edljob-worker-2": "Completed",
    }
    log = line("kubectl -n dlrover logs torch-mnist-edljob-worker-0 --tail=-1")
    assert re.search(r"Load epoch = \d+, completed num = \d+, num_samples = \d+", log)
    accuracy = re.search(r"training finished: .* accuracy = (0\.\d+)", log)
    assert accuracy, log[-2000:]
    assert float(accuracy[1]) > 0.9

    line("kubectl -n dlrover delete elasticjob torch-mnist")
    wait("nothing", lambda: not pod_rows("torch-mnist"))
