"""Rules of the whole suite: the long proofs run only when they are asked for, and signals are as in a terminal."""

from __future__ import annotations

import os
import signal
from collections import Counter

import pytest

from tests.support.paths import LEAN

SLOWEST_FILES = 20
LONGEST = (
    "tests/local/trainers",
    "tests/local/elastic/test_kill_schedules.py",
    "tests/local/elastic/test_elastic.py",
    "tests/test_docs.py",
    "tests/local/elastic/test_elastic_sharded.py",
    "tests/local/examples/test_demo.py",
    "tests/local/elastic/test_elastic_loops.py",
    "tests/local/elastic",
    "tests/local/examples",
    "tests/cli/test_commands.py",
    "tests/torch/trainers",
    "tests/sim",
    "tests/test_benchmarks.py",
    "tests/torch/loop/test_group.py",
    "tests/local/run",
    "tests/torch/data",
    "tests/agent/test_standbys.py",
    "tests/cli/test_submit.py",
    "tests/torch",
    "tests/agent",
    "tests/master",
    "tests/cli",
    "tests/kube/seeds/test_seed_004_failures.py",
    "tests/kube/seeds/test_seed_000.py",
    "tests/kube/seeds/test_seed_004_scaling.py",
    "tests/kube/setup/test_rights.py",
    "tests/kube/commands/test_docs_page.py",
    "tests/kube/commands/test_cli.py",
    "tests/kube/jobs/test_operator.py",
    "tests/kube/commands",
    "tests/kube/jobs/test_faults.py",
    "tests/kube/jobs/test_master_on_cluster.py",
    "tests/kube/jobs/test_scaleplans.py",
    "tests/kube/setup/test_features.py",
    "tests/kube/setup/test_tls.py",
)
"""Where the time goes, by the durations of a whole run."""
KUBE = ("tests", "tests/kube")
"""Arguments of a run that has tests on a cluster in it."""


def pytest_configure(config: pytest.Config) -> None:
    """Let the processes that tests start be ended by SIGHUP, also under nohup, and leave parts of torch out (`lean`).

    The long proofs import them as every training does, and so do the processes in which tests run.
    """
    starts_workers = config.getoption("numprocesses", default=None) and not hasattr(config, "workerinput")
    if "soak" not in config.getoption("-m", default="") and not starts_workers:
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (LEAN, os.environ.get("PYTHONPATH"))))
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.fixture
def whole_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the processes that this test starts import all of torch, as every training does."""
    others = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path and path != LEAN]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(others))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Put the files that take longest first, and leave `soak` tests out unless `-m` names them.

    Workers share the files in this order: whichever is through takes the next, and short ones come last, so that none
    has to wait for another for long.
    """
    items.sort(key=_turn)
    if "soak" in config.getoption("-m", default=""):
        return
    soak = [item for item in items if item.get_closest_marker("soak") is not None]
    if soak:
        config.hook.pytest_deselected(items=soak)
        items[:] = [item for item in items if item.get_closest_marker("soak") is None]


def _turn(item: pytest.Item) -> int:
    return next((turn for turn, path in enumerate(LONGEST) if item.nodeid.startswith(path)), len(LONGEST))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Show which files took the time, after the tests that `--durations` shows."""
    seconds: Counter[str] = Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                seconds[report.nodeid.partition("::")[0]] += report.duration
    if terminalreporter.config.getoption("durations"):
        terminalreporter.section("slowest files")
        for path, each in seconds.most_common(SLOWEST_FILES):
            terminalreporter.write_line(f"{each:7.1f} s  {path}")
    if os.environ.get("RESILE_KUBE_TESTS") != "1" and terminalreporter.config.args[0] in KUBE:
        terminalreporter.write_line("not run: what needs a cluster (make cluster, then make test-kube)")
