"""A run of the suite ends as its tests do, and says where its time went."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import LEAN, ROOT

SUITE = ROOT / "hack/suite.py"
CONFTEST = ROOT / "tests/conftest.py"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "pytest.ini").write_text(f"[pytest]\npythonpath = {ROOT}\nmarkers = soak: long\n")
    (tmp_path / "conftest.py").write_text(CONFTEST.read_text())
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return tmp_path


def suite(*words: str) -> tuple[int, str]:
    command = [sys.executable, SUITE, "run", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    return done.returncode, done.stdout + done.stderr


def test_a_good_run_shows_its_time_and_leaves_nothing_behind(folder: Path) -> None:
    (folder / "test_one.py").write_text("import time\ndef test_slow(): time.sleep(0.1)")
    (folder / "test_two.py").write_text("import time\ndef test_slower(): time.sleep(0.2)")
    code, said = suite("--budget", "30", "-n", "2")
    assert code == 0
    assert "s call     test_two.py::test_slower" in said
    assert said.index("0.2 s  test_two.py") < said.index("0.1 s  test_one.py"), "the files, the slowest first"
    assert "s of the 30 s that it may take" in said
    assert not list(folder.glob("rs-*"))


def test_one_failed_test_fails_the_run_and_what_it_wrote_is_kept(folder: Path) -> None:
    (folder / "test_one.py").write_text("def test_bad(tmp_path): (tmp_path / 'note').touch(); assert False")
    assert suite()[0] == 1
    assert list(folder.glob("rs-*/*/note"))


STUBBED = """
import sys, torch
parts = "torch._dynamo", "torch._meta_registrations"
model = torch.nn.Linear(2, 2)
torch.optim.SGD(model.parameters(), 0.1).step()
torch.randperm(4, generator=torch.Generator())
print([type(sys.modules[name]).__module__ for name in parts])
import torch._refs, torch._dynamo.convert_frame
print([type(sys.modules[name]).__module__ for name in parts])
print(torch._refs.add(torch.ones(2, device="meta"), 1).shape, torch.Generator().initial_seed() > 0)
print(torch.compile(model, backend="eager")(torch.ones(3, 2)).shape)
"""


def test_parts_of_torch_that_are_left_out_come_when_they_are_asked_for() -> None:
    words = [sys.executable, "-c", STUBBED]
    done = subprocess.run(words, env=os.environ | {"PYTHONPATH": LEAN}, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [
        "['sitecustomize', 'sitecustomize']",
        "['builtins', 'builtins']",
        "torch.Size([2]) True",
        "torch.Size([3, 2])",
    ]
