"""A supervisor that cannot be written down is not left running: nobody could find it again."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from resile.api.job import JobSpec
from resile.client.errors import CommandError
from resile.client.local.master_process import start_master
from resile.wire.job_directory import JobDirectory


def _running_in(path: Path) -> list[str]:
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # gone in the meantime
            words = entry.read_bytes().decode(errors="replace")
            found += [words] if str(path) in words else []
    return found


def test_a_supervisor_that_cannot_be_recorded_is_ended_and_the_reason_named(tmp_path: Path) -> None:
    directory = JobDirectory(tmp_path / "job")
    directory.create(JobSpec(name="j", kind="elasticjob"), None)
    (directory.path / "supervisor.json").mkdir()
    with pytest.raises(CommandError, match=f"cannot start a master in {directory.path}: Is a directory"):
        start_master(directory, tmp_path, [])
    assert _running_in(directory.path) == []
    assert not directory.master_lives()


def test_a_log_that_cannot_be_written_is_a_sentence(tmp_path: Path) -> None:
    directory = JobDirectory(tmp_path / "job")
    directory.create(JobSpec(name="j", kind="elasticjob"), None)
    directory.log.mkdir()
    with pytest.raises(CommandError, match=r"cannot start a master in .*: Is a directory"):
        start_master(directory, tmp_path, [])
    assert _running_in(directory.path) == []
