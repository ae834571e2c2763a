"""Scripts written for torchrun, which know nothing of resile, behave the same under every launcher."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import ROOT

BIN = Path(sys.executable).parent
LAUNCHERS = {"torchrun": [str(BIN / "torchrun")], "resile run": [str(BIN / "resile"), "run"]}
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    # torchrun's own store outlives an attempt: processes of the next one may find the addresses of the last and then
    # fail or hang. With this it makes a new store each time.
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
}


def launch(launcher: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [*LAUNCHERS[launcher], "--standalone", "--nproc-per-node", "2", *arguments]
    return subprocess.run(
        command, cwd=ROOT, env=os.environ | ENVIRONMENT, capture_output=True, text=True, timeout=170, check=False
    )


each_launcher = pytest.mark.parametrize("launcher", LAUNCHERS)
each_launcher_at_length = pytest.mark.parametrize(
    "launcher", [pytest.param("torchrun", marks=pytest.mark.soak), "resile run"]
)
"""For scripts that import nothing of resile: under torchrun they tell of torch alone, whose version is pinned."""


@each_launcher_at_length
def test_ddp_ranks_end_with_the_same_weights(launcher):
    done = launch(launcher, "--max-restarts", "3", "examples/torchrun/ddp.py")
    assert done.returncode == 0, done.stderr
    lines = re.findall(r"ddp rank = (\d) of 2, loss = (\S+), checksum = (\S+)", done.stdout)
    assert sorted(rank for rank, _, _ in lines) == ["0", "1"]
    assert len({checksum for _, _, checksum in lines}) == 1
    assert all(float(loss) < 0.01 for _, loss, _ in lines)


@each_launcher
def test_elastic_ranks_end_with_the_same_weights(launcher):
    done = launch(launcher, "--max-restarts", "3", "examples/torchrun/elastic.py")
    assert done.returncode == 0, done.stderr
    lines = re.findall(r"elastic rank = (\d) of 2, steps = (\d+), loss = \S+, checksum = (\S+)", done.stdout)
    assert sorted(rank for rank, *_ in lines) == ["0", "1"]
    assert {(steps, checksum) for _, steps, checksum in lines} == {("100", lines[0][2])}
    assert sorted(re.findall(r"^rank = (\d), pid = \d+$", done.stdout, re.M)) == ["0", "1"], "whom to kill"


@each_launcher_at_length
def test_fsdp_ranks_hold_parts_of_one_model(launcher):
    done = launch(launcher, "examples/torchrun/fsdp.py")
    assert done.returncode == 0, done.stderr
    lines = re.findall(r"fsdp rank = (\d) of 2, holds (\d+) of (\d+), .* checksum = (\S+)", done.stdout)
    assert sorted(rank for rank, *_ in lines) == ["0", "1"]
    assert sum(int(own) for _, own, _, _ in lines) == int(lines[0][2])
    assert len({checksum for *_, checksum in lines}) == 1


@each_launcher_at_length
def test_a_recorded_error_is_shown_and_fails_the_run(launcher):
    done = launch(launcher, "examples/torchrun/recorded.py", "--fail-rank", "1")
    assert done.returncode != 0
    assert "rank 1 fails as it was told to, attempt = 0" in done.stderr + done.stdout
    assert "sum of ranks" not in done.stdout


@each_launcher_at_length
def test_a_failure_in_the_first_attempt_is_survived_with_a_restart(launcher):
    done = launch(launcher, "--max-restarts", "1", "examples/torchrun/recorded.py", "--fail-rank", "1", "--once")
    assert done.returncode == 0, done.stderr
    for rank in (0, 1):
        assert f"recorded rank = {rank}, sum of ranks = 1, attempt = 1" in done.stdout
