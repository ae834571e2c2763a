"""Rules of the whole suite: the long proofs run only when they are asked for, and signals are as in a terminal."""

from __future__ import annotations

import os
import signal
from collections import Counter

import pytest

from tests.support.paths import ROOT

SLOWEST_FILES = 20
LEAN = str(ROOT / "tests/support/lean")


def pytest_configure() -> None:
    """Let the processes that tests start leave torch's compiler out, and be ended by SIGHUP, also under nohup."""
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (LEAN, os.environ.get("PYTHONPATH"))))
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave `soak` tests out unless `-m` names them."""
    if "soak" in config.getoption("-m", default=""):
        return
    soak = [item for item in items if item.get_closest_marker("soak") is not None]
    if soak:
        config.hook.pytest_deselected(items=soak)
        items[:] = [item for item in items if item.get_closest_marker("soak") is None]


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
