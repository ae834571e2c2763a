"""What failed is run once more by itself, and only that can turn a failed run into a good one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import ROOT

SUITE = ROOT / "hack/suite.py"
UNLUCKY = """
from pathlib import Path
def test_good(): pass
def test_unlucky():
    seen = Path("seen").exists()
    Path("seen").touch()
    assert seen
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return tmp_path


def suite(*words: str) -> tuple[int, str]:
    done = subprocess.run([sys.executable, SUITE, *words], capture_output=True, text=True, timeout=60, check=False)
    return done.returncode, done.stdout + done.stderr


def test_a_test_that_fails_once_passes_by_itself_and_is_named(folder: Path) -> None:
    (folder / "test_one.py").write_text(UNLUCKY)
    assert suite("run", "test_one.py")[0] == 1
    code, said = suite("again")
    assert code == 0
    assert "1 failed, each is run once more by itself:\n  test_one.py::test_unlucky\n" in said
    assert "1 passed" in said


def test_a_test_that_fails_again_fails_the_run(folder: Path) -> None:
    (folder / "test_one.py").write_text("def test_bad(): assert False")
    assert suite("run", "test_one.py")[0] == 1
    code, said = suite("again")
    assert code == 1
    assert "do not all pass when run by themselves either" in said
    assert suite("again")[0] == 1, "there is one second chance"


def test_a_run_that_could_not_collect_everything_has_no_second_chance(folder: Path) -> None:
    (folder / "test_one.py").write_text(UNLUCKY)
    (folder / "test_two.py").write_text("import nothing_of_this_name")
    assert suite("run")[0] == 2
    code, said = suite("again")
    assert code == 1
    assert "nothing is repeated" in said


def test_a_run_that_was_good_or_died_leaves_nothing_to_repeat(folder: Path) -> None:
    (folder / "test_one.py").write_text("def test_bad(): assert False")
    assert suite("run", "test_one.py")[0] == 1
    (folder / "test_one.py").write_text("import os\ndef test_dies(): os._exit(1)")
    assert suite("run", "test_one.py")[0] == 1
    assert suite("again")[0] == 1
    (folder / "test_one.py").write_text("def test_good(): pass")
    assert suite("run", "test_one.py")[0] == 0
    assert suite("again")[0] == 1
