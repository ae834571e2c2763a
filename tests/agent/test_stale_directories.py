"""What killed agents and ended runs left is found, kept for a while and removed; what a process holds is not."""

from __future__ import annotations

import fcntl
import os
import threading
import time
from pathlib import Path

import pytest

from resile.agent import stale_directories


def test_what_an_ended_run_left_is_removed_an_hour_after_it_was_found(tmp_path: Path) -> None:
    for name in ("over", "held", "starting", "fresh"):
        (tmp_path / name).mkdir()
        (tmp_path / f"{name}.launch").touch()
        (tmp_path / f"{name}.present").touch()
    everything = {path.name for path in tmp_path.iterdir()}
    stale_directories.sweep_runs(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == everything, "a person may want to look at it"
    for name in ("over", "held", "starting"):
        os.utime(tmp_path / f"{name}.launch", (0, 0))
    with (tmp_path / "held.present").open() as agent, (tmp_path / "starting.launch").open() as launcher:
        fcntl.flock(agent, fcntl.LOCK_SH)
        fcntl.flock(launcher, fcntl.LOCK_EX)
        stale_directories.sweep_runs(tmp_path)
    left = {path.name for path in tmp_path.iterdir()}
    assert left == everything - {"over", "over.launch", "over.present"}


def test_what_a_killed_agent_left_is_removed_an_hour_after_it_was_found(tmp_path: Path) -> None:
    for name in ("resile-held", "resile-left", "resile-other", "other"):
        (tmp_path / name / "logs").mkdir(parents=True)
        (tmp_path / name / "logs" / "out").write_text("words")
        if name != "resile-other":
            os.close(stale_directories.hold(tmp_path / name))
    (tmp_path / "resile-link").symlink_to(tmp_path / "other")
    held = stale_directories.hold(tmp_path / "resile-held")
    everything = {path.name for path in tmp_path.iterdir()}
    stale_directories.sweep_agents(tmp_path)
    stale_directories.sweep_agents(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == everything, "a person may want to look at it"
    long_ago = time.time() - stale_directories.KEPT_SECONDS
    for name in ("resile-held", "resile-left", "other"):
        os.utime(tmp_path / name / stale_directories.LOCK, (long_ago, long_ago))
    stale_directories.sweep_agents(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == everything - {"resile-left"}
    assert (tmp_path / "other" / "logs" / "out").exists(), "a link is not followed"
    os.close(held)
    stale_directories.sweep_agents(tmp_path)
    assert (tmp_path / "resile-held").exists(), "a long run that has just been killed"


def test_an_agent_waits_for_one_that_is_just_marking_its_new_directory(tmp_path: Path) -> None:
    lock = tmp_path / stale_directories.LOCK
    marking = os.open(lock, os.O_RDWR | os.O_CREAT)
    fcntl.flock(marking, fcntl.LOCK_EX)
    os.write(marking, b"it will be removed")
    threading.Timer(0.1, os.close, [marking]).start()
    held = stale_directories.hold(tmp_path)
    assert lock.read_bytes() == b"", "the mark would have it removed an hour after a later look"
    with lock.open() as other, pytest.raises(BlockingIOError):
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(held)
