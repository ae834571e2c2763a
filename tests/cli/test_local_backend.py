"""Jobs of this machine that cannot be read or scaled: one sentence each, and a listing shows the others."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from resile.api.job import JobSpec, RoleSpec
from resile.client.base import Listable, Query
from resile.client.errors import CommandError
from resile.client.local.backend import LocalJobs
from resile.client.local.job_reader import JobReader
from resile.client.local.jobs import LocalJob


@pytest.fixture
def submitted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], LocalJob]:
    """Makes the directory of a job whose master has not started."""
    monkeypatch.setenv("RESILE_STATE_DIR", str(tmp_path))

    def make(name: str, kind: str) -> LocalJob:
        job = LocalJob("default", name)
        job.directory.path.mkdir(parents=True)
        spec = JobSpec(name=name, kind=kind, roles={"worker": RoleSpec(replicas=2)})
        (job.directory.path / "job.json").write_bytes(msgspec.json.encode(spec))
        return job

    return make


def jobs() -> LocalJobs:
    return LocalJobs(None, lambda _: None)


@pytest.mark.parametrize("what", [Listable.JOBS, Listable.NODES, Listable.EVENTS])
def test_a_listing_shows_the_other_jobs_beside_one_of_an_unknown_kind(
    submitted: Callable[[str, str], LocalJob], what: Listable
) -> None:
    submitted("known", "elasticjob")
    submitted("strange", "of-tomorrow")
    found = next(iter(jobs().watch(Query(what=what))))
    assert all(item.name.endswith("known-dlrover-master") or item.name == "known" for item in found.items)
    assert len(found.items) == (what is not Listable.EVENTS)
    assert found.unreadable == ["strange: this version of resile does not know jobs of kind 'of-tomorrow'"]


def test_a_job_of_an_unknown_kind_is_described_by_a_sentence(submitted: Callable[[str, str], LocalJob]) -> None:
    submitted("strange", "of-tomorrow")
    for read in (jobs().describe, jobs().spec, jobs().kind_of):
        with pytest.raises(CommandError, match="does not know jobs of kind 'of-tomorrow'"):
            read("strange")


@pytest.mark.parametrize("what", [Listable.JOBS, Listable.NODES, Listable.EVENTS])
def test_a_listing_shows_the_other_jobs_beside_one_that_is_deleted_meanwhile(
    submitted: Callable[[str, str], LocalJob], monkeypatch: pytest.MonkeyPatch, what: Listable
) -> None:
    submitted("known", "elasticjob")
    gone = submitted("gone", "elasticjob")
    status = JobReader.status

    def delete_after(reader: JobReader) -> object:
        view = status(reader)
        if reader.job == gone:
            (gone.directory.path / "job.json").unlink()
        return view

    monkeypatch.setattr(JobReader, "status", delete_after)
    found = next(iter(jobs().watch(Query(what=what))))
    assert len(found.items) == (what is not Listable.EVENTS)
    assert found.unreadable == [f"gone: there is no job in {gone.directory.path}"]


def test_a_job_is_not_scaled_if_it_lacks_one_of_several_roles(
    submitted: Callable[[str, str], LocalJob], monkeypatch: pytest.MonkeyPatch
) -> None:
    changes: list[object] = []
    monkeypatch.setattr(LocalJobs, "_ask", lambda _, __, change: changes.append(change))
    submitted("demo", "elasticjob")
    with pytest.raises(CommandError, match=r"^job demo has no role 'typo'; known are worker; nothing was changed$"):
        jobs().scale("demo", {"worker": 8, "typo": 1})
    assert changes == []
