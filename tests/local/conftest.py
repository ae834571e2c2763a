"""A place for real commands, cleared of every process afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.local.resile_run import Runs, opened


@pytest.fixture
def runs(tmp_path: Path) -> Iterator[Runs]:
    with opened(tmp_path) as runs:
        yield runs
