"""`make demo`, as a newcomer sees it."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tests.support.paths import ROOT


@pytest.mark.timeout(400)
def test_the_demo_survives_a_killed_process_and_a_killed_node_and_ends_with_a_table() -> None:
    data = ROOT / ".cache" / "mnist_png"
    maker = ROOT / "examples" / "pytorch" / "mnist" / "make_mnist_png.py"
    subprocess.run([sys.executable, str(maker), "--output", str(data)], cwd=ROOT, check=True, timeout=120)
    demo = subprocess.run(
        [sys.executable, "examples/demo.py"], cwd=ROOT, capture_output=True, text=True, timeout=360, check=False
    )
    assert demo.returncode == 0, demo.stdout[-3000:] + demo.stderr[-3000:]
    accuracy = re.search(r"accuracy\D+(0\.\d+)", demo.stdout)
    assert accuracy, demo.stdout[-3000:]
    assert float(accuracy[1]) > 0.9
    assert "goodput" in demo.stdout.lower()
