"""The lines that tell of a recovery are seen in a script that says nothing about logging, and obey one that does."""

from __future__ import annotations

import subprocess
import sys
from typing import NamedTuple

import pytest

BEGIN = """
import logging
from resile.torch._support.log_setup import show_info_logs
log = logging.getLogger("resile.torch.elastic")
"""
ASKED = 'logging.basicConfig(level=logging.INFO, format="asked: %(message)s")\n'
WARNINGS = 'logging.basicConfig(format="asked: %(message)s")\n'
HEARD = "show_info_logs(); show_info_logs()\n"
LINES = 'log.info("round 2"); log.warning("careful"); log.info("round 3")\n'


class Case(NamedTuple):
    name: str
    script: str
    seen: list[str]


CASES = [
    Case("nobody configures", HEARD + LINES, ["[INFO] round 2", "[WARNING] careful", "[INFO] round 3"]),
    Case("before, for all", ASKED + HEARD + LINES, ["asked: round 2", "asked: careful", "asked: round 3"]),
    Case("later, for all", HEARD + ASKED + LINES, ["asked: round 2", "asked: careful", "asked: round 3"]),
    Case("before, for warnings", WARNINGS + HEARD + LINES, ["asked: careful"]),
    Case("later, for warnings", HEARD + WARNINGS + LINES, ["asked: careful"]),
    Case(
        "later, for warnings and ours",
        HEARD + WARNINGS + 'logging.getLogger("resile").setLevel(logging.INFO)\n' + LINES,
        ["asked: round 2", "asked: careful", "asked: round 3"],
    ),
    Case(
        "in between",
        HEARD + LINES + WARNINGS + LINES,
        ["[INFO] round 2", "[WARNING] careful", "[INFO] round 3", "asked: careful"],
    ),
    Case(
        "less of ours before",
        'logging.getLogger("resile").setLevel(logging.WARNING)\n' + HEARD + LINES,
        ["[WARNING] careful"],
    ),
    Case(
        "a handler of ours alone, later",
        HEARD + 'logging.getLogger("resile").addHandler(logging.StreamHandler())\n' + LINES,
        ["careful"],
    ),
    Case(
        "other libraries",
        HEARD + 'logging.getLogger("other").info("not this")\n' + 'log.info("round 2")',
        ["[INFO] round 2"],
    ),
]


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_lines_are_seen_once_and_only_where_they_are_wanted(case: Case) -> None:
    done = subprocess.run(
        [sys.executable, "-c", BEGIN + case.script], capture_output=True, text=True, timeout=60, check=True
    )
    seen = [line.partition("] ")[2] if line.startswith("[2") else line for line in done.stderr.splitlines()]
    assert seen == case.seen
    assert done.stdout == ""
