from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.cli.cli_runner import CliRunner


@pytest.fixture
def bench(tmp_path) -> Iterator[CliRunner]:
    bench = CliRunner(tmp_path)
    try:
        yield bench
    finally:
        bench.clear()


@pytest.fixture(scope="module")
def steady(tmp_path_factory) -> Iterator[CliRunner]:
    """A job of two nodes that runs, in the seeds' namespace. Tests only look at it."""
    bench = CliRunner(tmp_path_factory.mktemp("steady"))
    try:
        bench.submit("for i in 1 2 3; do echo line $i; done; sleep 1000", name="torch-mnist", namespace="dlrover")
        yield bench
    finally:
        bench.clear()
