"""Rules of the whole suite: the long proofs run only when they are asked for, and signals are as in a terminal."""

from __future__ import annotations

import signal

import pytest


def pytest_configure() -> None:
    """Let the processes that tests start be ended by SIGHUP, also when the suite itself runs under nohup."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave `soak` tests out unless `-m` names them."""
    if "soak" in config.getoption("-m", default=""):
        return
    soak = [item for item in items if item.get_closest_marker("soak") is not None]
    if soak:
        config.hook.pytest_deselected(items=soak)
        items[:] = [item for item in items if item.get_closest_marker("soak") is None]
