"""Rules and fixtures of the tests that need a cluster.

A test that asks for any of these fixtures is left out unless `RESILE_KUBE_TESTS=1` says that there is a cluster. Tests
have a namespace each, and `make test-kube` runs them in three parts: tests with a namespace of their own, three at a
time; tests of a deployed operator, three at a time; and one at a time tests that break or change the cluster itself,
which have the mark `alone`. A deployed operator serves every namespace, and the tests that bring an operator of their
own and kill it must not find another in its place.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import pytest

from tests.kube.namespace import IMAGE, JOBS, KUBECONFIG, ROOT, KubeNamespace, in_the_way, kubectl, new_namespace, run
from tests.kube.seeds.seed_lines import PATIENCE


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the files that use the fixture `deployed`; leave out what needs a missing cluster."""

    def uses(item: pytest.Item, fixture: str) -> bool:
        return fixture in getattr(item, "fixturenames", ())

    if os.environ.get("RESILE_KUBE_TESTS") != "1":
        config.hook.pytest_deselected(items=[item for item in items if uses(item, "kubernetes")])
        items[:] = [item for item in items if not uses(item, "kubernetes")]
    files = {item.path for item in items if uses(item, "deployed")}
    for item in items:
        if item.path in files:
            item.add_marker("deployed")


@contextlib.contextmanager
def turn(factory: pytest.TempPathFactory, name: str) -> Iterator[IO[str]]:
    """Hold up the other workers of this run that ask for a turn of this name; yields a file that they share."""
    folder = factory.getbasetemp().parent if "PYTEST_XDIST_WORKER" in os.environ else factory.getbasetemp()
    with (folder / name).open("a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        yield file


def count(file: IO[str], change: int) -> int:
    """Change the number in a file, which is 0 at first, and return it."""
    number = int(file.read() or "0") + change
    file.seek(0)
    file.truncate()
    file.write(str(number))
    return number


@pytest.fixture(scope="session")
def kubernetes(tmp_path_factory: pytest.TempPathFactory) -> None:
    """A cluster that is free for tests, and the CRDs of this checkout on it."""
    assert Path(KUBECONFIG).exists(), "the cluster is not up: run `make cluster`"
    with turn(tmp_path_factory, "looked") as file:
        if count(file, 1) == 1 and (why_not := in_the_way()):
            pytest.fail(why_not, pytrace=False)
        kubectl("apply", "-k", str(ROOT / "config/crd"))
        kubectl("wait", "--for=condition=Established", f"crd/{JOBS}", "--timeout=30s")


@pytest.fixture
def namespace(kubernetes: None, tmp_path: Path) -> Iterator[KubeNamespace]:
    """A namespace for one test, which starts operators in it as it needs them."""
    with new_namespace("test", tmp_path, KubeNamespace) as made:
        yield made


@pytest.fixture
def operated(namespace: KubeNamespace) -> KubeNamespace:
    """A namespace for one test, with an operator."""
    namespace.operator("--no-leader-elect")
    return namespace


@pytest.fixture(scope="module")
def cluster(kubernetes: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[KubeNamespace]:
    """A namespace for all tests of a file, with an operator."""
    with new_namespace("tests", tmp_path_factory.mktemp("operator"), KubeNamespace) as made:
        made.operator("--no-leader-elect")
        yield made


@pytest.fixture(scope="session")
def deployed(kubernetes: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """resile as `make deploy` installs it, for the whole cluster; the seeds' images and data are there.

    The first worker that needs it deploys it, and the last that has it removes it.
    """
    try:
        with turn(tmp_path_factory, "deployed") as file:
            if count(file, 1) == 1:
                run("make", "data", deadline=PATIENCE)
                run("hack/cluster/cluster.py", "image", "resile/mnist:0.1.0", deadline=PATIENCE)
                run("make", "deploy", f"IMG={IMAGE}", deadline=PATIENCE)
        yield
    finally:
        with turn(tmp_path_factory, "deployed") as file:
            if count(file, -1) == 0:
                kubectl("-n", "dlrover", "delete", "elasticjob", "--all", "--wait=true", deadline=PATIENCE)
                run("make", "undeploy", deadline=PATIENCE)
