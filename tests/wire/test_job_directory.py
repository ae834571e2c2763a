"""What a job's directory says when its files are damaged."""

from __future__ import annotations

from pathlib import Path

import pytest

from resile.wire.job_directory import DirectoryError, JobDirectory

NO_TEXT = b'{"name": "\x80"}'


def test_files_that_are_no_text_are_named_or_taken_for_missing(tmp_path: Path) -> None:
    for name in ("job.json", "master.json"):
        (tmp_path / name).write_bytes(NO_TEXT)
    with pytest.raises(DirectoryError, match=f"^the job in {tmp_path} cannot be read: "):
        JobDirectory(tmp_path).spec()
    assert JobDirectory(tmp_path).address() is None
