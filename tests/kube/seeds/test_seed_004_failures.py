"""The other experiments of seed 004, line by line: a training process is killed, a pod is preempted."""

from __future__ import annotations

import pytest

from tests.kube.seeds.mnist_jobs import delete, example, listing, log_of, rounds_of, until_step
from tests.kube.seeds.seed_lines import line, pod_rows, wait

pytestmark = [pytest.mark.usefixtures("deployed"), pytest.mark.timeout(600)]


def test_a_process_is_killed_and_a_pod_is_preempted(seat: str) -> None:
    job = example("chaos-test", "choas_test_job.yaml", seat, "--num_epochs 1000 --step_delay 0.1")
    line("kubectl -n dlrover apply -f -", stdin=job)
    everybody = listing("chaos-test", *["Running"] * 4)
    wait("four workers", lambda: pod_rows("chaos-test") == everybody)
    witness = "chaos-test-edljob-worker-1"
    until_step("training", witness, 0, 20)

    # Training Process Corruption: ps -aux | grep cnn_train.py, kill -9 ${PID}; all workers are still running.
    rounds = len(rounds_of(log_of(witness)))
    listed = line(f"kubectl -n dlrover exec {witness} -- bash -c 'ps -aux | grep cnn_train.py'")
    pid = next(row.split()[1] for row in listed.splitlines() if "dlrover-run" not in row and "grep" not in row)
    line(f"kubectl -n dlrover exec {witness} -- bash -c 'kill -9 {pid}'")
    until_step("training after the kill", witness, rounds, 21)
    assert pod_rows("chaos-test") == everybody
    assert rounds_of(log_of(witness))[rounds][1:] == (4, 8)

    # Pod is Preempted: worker-4 comes for worker-0, with its rank.
    rounds = len(rounds_of(log_of(witness)))
    rank = "-o jsonpath={.metadata.labels.rank-index}"
    place = line(f"kubectl -n dlrover get pod chaos-test-edljob-worker-0 {rank}")
    line("kubectl -n dlrover delete pod chaos-test-edljob-worker-0")
    replaced = listing("chaos-test", "", *["Running"] * 4)
    wait("the replacement", lambda: pod_rows("chaos-test") == replaced)
    assert line(f"kubectl -n dlrover get pod chaos-test-edljob-worker-4 {rank}") == place
    wait("a group of four", lambda: (4, 8) in [r[1:] for r in rounds_of(log_of(witness))[rounds:]])
    last = len(rounds_of(log_of(witness))) - 1
    until_step("training with the replacement", witness, last, 21)
    delete("chaos-test")
