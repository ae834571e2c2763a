"""The benchmarks of the cluster in their shortest forms: figures come out and make sense. Bars: `make bench-kube`."""

from __future__ import annotations

import importlib

import pytest
from benchmarks.harness import Row
from benchmarks.kube import training

from tests.kube.namespace import KUBECONFIG, kubectl
from tests.support.paths import LEAN

pytestmark = [pytest.mark.usefixtures("kubernetes"), pytest.mark.timeout(600)]


@pytest.fixture(autouse=True)
def kubeconfig(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBECONFIG", KUBECONFIG)
    monkeypatch.setitem(training.ENVIRONMENT, "PYTHONPATH", LEAN)  # pods start as quickly as other tests' processes


def run(name: str) -> list[Row]:
    rows: list[Row] = importlib.import_module(f"benchmarks.kube.{name}").run(quick=True)
    return rows


def test_the_parts_of_a_start_add_up() -> None:
    total, ours, *parts = run("time_to_first_step")
    assert 1.0 < total.value < 200.0
    assert 0.0 < ours.value < total.value
    assert sum(part.value for part in parts) == pytest.approx(total.value)


def test_a_deleted_worker_is_replaced_and_training_goes_on_with_and_without_room() -> None:
    replaced, stepped, without_room = (row.value for row in run("pod_loss"))
    assert 0.0 < replaced < stepped < 200.0
    assert 0.0 < without_room < 200.0


def test_elastic_workers_step_on_without_a_deleted_pod_and_a_killed_process() -> None:
    deleted, killed = (row.value for row in run("elastic_recovery"))
    assert 0.0 < deleted < 60.0
    assert 0.0 < killed < 60.0


@pytest.mark.alone
def test_a_crowd_of_pods_is_made_and_made_again_and_its_nodes_are_removed() -> None:
    before = kubectl("get", "nodes", "-o", "name")
    created, recreated = run("many_pods")
    assert 0.0 < created.value < 60.0
    assert 0.0 < recreated.value < 60.0
    assert kubectl("get", "nodes", "-o", "name") == before


def test_an_operator_at_rest_costs_little() -> None:
    _, cpu, memory = run("idle_operator")
    assert 0.0 <= cpu.value < 50.0
    assert 10.0 < memory.value < 500.0
