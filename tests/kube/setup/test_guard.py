"""On which clusters these tests may be run: the one of hack/cluster, and others where no user's jobs are at stake.

No cluster is asked here; a script in kubectl's place says what there is.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.kube import namespace

OPERATOR = "deployment.apps/resile-operator"
KUBECTL = """#!/bin/sh
case "$*" in
*deployments*) echo "{operator}" ;;
*crd*) echo "{crd}" ;;
*json*) echo '{jobs}' ;;
esac
"""

Cluster = Callable[..., None]


def kubeconfig(path: Path, server: str) -> Path:
    config = {
        "clusters": [{"name": "one", "cluster": {"server": server}}],
        "contexts": [{"name": "one", "context": {"cluster": "one", "user": "me"}}],
        "users": [{"name": "me", "user": {}}],
        "current-context": "one",
    }
    path.write_text(json.dumps(config))
    return path


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    """Makes a cluster with these things on it, which is `ours` or a user's."""

    def make(*, operator: str = "", crd: str = "", jobs: tuple[str, ...] = (), ours: bool = False) -> None:
        items = [{"metadata": {"namespace": name.split("/")[0], "name": name.split("/")[1]}} for name in jobs]
        script = tmp_path / "kubectl"
        script.write_text(KUBECTL.format(operator=operator, crd=crd, jobs=json.dumps({"items": items})))
        script.chmod(0o755)
        kubeconfig(tmp_path / "kubeconfig", "https://10.77.0.1:6443")
        server = "https://10.77.0.1:6443" if ours else "https://work.example:6443"
        monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
        monkeypatch.setattr(namespace, "STATE", tmp_path)
        monkeypatch.setattr(namespace, "KUBECONFIG", str(kubeconfig(tmp_path / "chosen", server)))

    return make


def test_a_users_operator_is_not_removed(cluster: Cluster) -> None:
    cluster(operator=OPERATOR)
    assert "an operator of resile is deployed there" in namespace.in_the_way()


def test_a_users_jobs_are_not_deleted(cluster: Cluster) -> None:
    cluster(crd="a definition", jobs=("dlrover/night",))
    assert "there are ElasticJobs (dlrover/night)" in namespace.in_the_way()


def test_a_cluster_without_jobs_or_without_the_kind_may_be_used(cluster: Cluster) -> None:
    cluster()
    assert not namespace.in_the_way()
    cluster(crd="a definition")
    assert not namespace.in_the_way()


def test_what_an_earlier_run_left_on_the_tests_own_cluster_is_no_hindrance(cluster: Cluster) -> None:
    cluster(operator=OPERATOR, crd="a definition", jobs=("dlrover/left",), ours=True)
    assert not namespace.in_the_way()
