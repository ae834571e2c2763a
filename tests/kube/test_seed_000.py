"""The first hour of a user, line by line: deploy, grant, apply, look, delete a worker, see it restored, finish."""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.skipif(
        os.environ.get("RESILE_KUBE_TESTS") != "1",
        reason="needs a cluster: hack/cluster/cluster.py up, RESILE_KUBE_TESTS=1",
    ),
    pytest.mark.timeout(600),
]

ROOT = Path(__file__).resolve().parents[2]
STATE = Path(os.environ.get("RESILE_CLUSTER_STATE") or "/var/lib/resile-cluster")
KUBECONFIG = os.environ.get("KUBECONFIG") or str(STATE / "kubeconfig")
JOB = ROOT / "examples/torch_mnist_master_backend_job.yaml"
PATIENCE = 240.0
AGE = r"\d+(s|m\d*s?)"


def sh(*words: str, stdin: str | None = None) -> str:
    done = subprocess.run(
        words,
        input=stdin,
        env=os.environ | {"KUBECONFIG": KUBECONFIG},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode == 0, f"{' '.join(words)}: {done.stdout}{done.stderr}"
    return done.stdout


def kubectl(line: str) -> str:
    """One line of the seed."""
    return sh("kubectl", *line.split())


def until(what: str, look: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not look():
        assert time.monotonic() < deadline, f"{what} did not come; pods:\n{kubectl('-n dlrover get pods')}"
        time.sleep(0.1)


@pytest.fixture(scope="module", autouse=True)
def deployed() -> Iterator[None]:
    sh("make", "data")
    sh("hack/cluster/cluster.py", "image", "resile/mnist:0.1.0")
    sh("make", "deploy", "IMG=resile:dev")
    yield
    kubectl("-n dlrover delete elasticjob --all --wait=true")
    sh("make", "undeploy")


def phase() -> str:
    return kubectl("-n dlrover get elasticjob torch-mnist -o jsonpath={.status.phase}")


def rows() -> dict[str, str]:
    """Pods of the job with their status, as the seed lists them."""
    lines = kubectl("-n dlrover get pods -l elasticjob-name=torch-mnist --no-headers").splitlines()
    return {line.split()[0]: line.split()[2] for line in lines}


def test_seed_000_line_by_line() -> None:
    kubectl("-n dlrover apply -f config/rbac/default_role.yaml")
    # The seed's manifest, with more to do, so that there is something left to interrupt.
    longer = JOB.read_text().replace("--num_epochs 5", "--num_epochs 12 --step_delay 0.1")
    sh("kubectl", "-n", "dlrover", "apply", "-f", "-", stdin=longer)

    until("the workers", lambda: list(rows().values()) == ["Running"] * 3)
    until("training", lambda: "step = 20" in kubectl("-n dlrover logs -l replica-type=worker --tail=-1"))
    header, row = kubectl("-n dlrover get elasticjob torch-mnist").splitlines()
    assert header.split() == ["NAME", "PHASE", "AGE"]
    assert re.fullmatch(rf"torch-mnist +Running +{AGE}", row)
    assert rows() == {
        "elasticjob-torch-mnist-dlrover-master": "Running",
        "torch-mnist-edljob-worker-0": "Running",
        "torch-mnist-edljob-worker-1": "Running",
    }

    kubectl("-n dlrover delete pod torch-mnist-edljob-worker-1 --wait=false")
    until("the replacement", lambda: rows().get("torch-mnist-edljob-worker-2") == "Running")
    rank = kubectl("-n dlrover get pod torch-mnist-edljob-worker-2 -o jsonpath={.metadata.labels.rank-index}")
    assert rank == "1", "a new id, and the place of the deleted one"

    until("the end", lambda: phase() in ("Succeeded", "Failed"))
    assert phase() == "Succeeded", kubectl("-n dlrover describe elasticjob torch-mnist")
    until("quiet", lambda: "Running" not in rows().values())
    assert rows() == {
        "elasticjob-torch-mnist-dlrover-master": "Completed",
        "torch-mnist-edljob-worker-0": "Completed",
        "torch-mnist-edljob-worker-2": "Completed",
    }
    log = kubectl("-n dlrover logs torch-mnist-edljob-worker-0 --tail=-1")
    assert re.search(r"Load epoch = \d+, completed num = \d+, num_samples = \d+", log)
    accuracy = re.search(r"training finished: .* accuracy = (0\.\d+)", log)
    assert accuracy, log[-2000:]
    assert float(accuracy[1]) > 0.9

    kubectl("-n dlrover delete elasticjob torch-mnist")
    until("nothing", lambda: not rows())
