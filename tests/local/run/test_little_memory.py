"""Checkpoints where memory is scarce: a pod's default /dev/shm, and a container with a limit that is too small."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.local.resile_run import RESILE, Runs

SLOW = 120.0
pytestmark = [
    pytest.mark.usefixtures("whole_torch"),
    pytest.mark.timeout(300),
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root"),
]

TRAIN = """
from probe import *
import logging
logging.basicConfig(format="%(message)s")
import torch
from resile.torch import Checkpointer
checkpointer = Checkpointer(os.path.join(HERE, "storage"), store_every=2)
state = {"tensor": torch.zeros(50_000_000)}  # 200 MB
step = checkpointer.restore(state)
shm = os.statvfs("/dev/shm")
values = [float(state["tensor"].min()), float(state["tensor"].max())]
note("start", step=step, values=values, shm=shm.f_blocks * shm.f_frsize)
if step is None:
    for step in (1, 2, 3):
        state["tensor"].fill_(step)
        note("saved", step=step, kept=checkpointer.save(step, state))
    os.kill(os.getpid(), 9)
"""


def test_a_small_dev_shm_does_not_bound_checkpoints(runs: Runs) -> None:
    if subprocess.run(["unshare", "-m", "true"], capture_output=True).returncode:
        pytest.skip("no mount namespace can be made here")
    script = runs.script(TRAIN)
    words = f"mount -t tmpfs -o size=64m tmpfs /dev/shm && exec {RESILE} run --max-restarts=1 {script}"
    environ = os.environ | {"RESILE_STATE_DIR": str(runs.state), "TMPDIR": str(runs.temp)}
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", words], env=environ, capture_output=True, text=True, timeout=SLOW
    )
    assert done.returncode == 0, done.stderr
    first, second = runs.notes("start")
    assert first["shm"] == second["shm"] == 64 << 20, "it ran with a pod's default"
    assert [note["kept"] for note in runs.notes("saved")] == [True] * 3
    assert (second["step"], second["values"]) == (3, [3.0, 3.0]), "from memory, which holds three times as much"


@pytest.fixture
def small_container() -> Iterator[Path]:
    """A cgroup with room for the process and its state, but not for two copies of it."""
    v1, v2 = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")
    top, limit = (v1, "memory.limit_in_bytes") if v1.is_dir() else (v2, "memory.max")
    group = top / f"resile-test-{os.getpid()}"
    try:
        group.mkdir()
        (group / limit).write_text(str(1000 << 20))
    except OSError as error:
        pytest.skip(f"no cgroup can be made here: {error}")
    yield group
    group.rmdir()


def test_a_container_that_is_too_small_is_one_sentence_at_the_start_and_storage_is_used(
    runs: Runs, small_container: Path
) -> None:
    script = runs.script(TRAIN)
    enter = f"open('{small_container}/cgroup.procs', 'w').write(str(os.getpid()))"
    code = f"import os; {enter}; os.execv('{RESILE}', ['{RESILE}', 'run', '--max-restarts=1', '{script}'])"
    environ = os.environ | {"RESILE_STATE_DIR": str(runs.state), "TMPDIR": str(runs.temp)}
    done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, timeout=SLOW)
    runs.nothing_is_left()
    assert done.returncode == 0, done.stderr
    said = [line for line in done.stderr.splitlines() if "checkpoints go to storage alone" in line]
    assert len(said) == 2, "once for each process, at its start"
    assert "of memory are needed for checkpoints, this container has" in said[0]
    assert [note["kept"] for note in runs.notes("saved")] == [False, True, False]
    starts = [(note["step"], note["values"]) for note in runs.notes("start")]
    assert starts == [(None, [0.0, 0.0]), (2, [2.0, 2.0])]
