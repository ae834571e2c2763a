"""A master in a cluster ends if a task beside its queue breaks, since it would go on without what that task sees."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest

from resile.api.kinds.elasticjob.names import master_name
from resile.kube.kinds import CONFIG_MAPS, Kind, Object
from resile.master.app import Options
from resile.master.event_queue import EventQueue
from resile.master.kubernetes import app
from resile.wire.job_directory import JobDirectory
from tests.kube.namespace import job
from tests.support.fake_kube import FakeBlockingKube, FakeKube
from tests.support.kinds import ELASTIC_JOB, ELASTIC_JOBS, SCALE_PLANS


class BrokenWatch(FakeKube):
    """Its watch of plans breaks in a way that no caller expects."""

    async def watch(self, kind: Kind, *arguments: Any, **options: Any) -> AsyncGenerator[tuple[str, Object], None]:
        if kind == SCALE_PLANS:
            raise RuntimeError("a defect")
        async for change in super().watch(kind, *arguments, **options):
            yield change

    async def close(self) -> None:
        pass


async def test_a_watch_that_dies_of_a_defect_ends_the_master(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    api, blocking, died = BrokenWatch(), FakeBlockingKube(), asyncio.Event()
    blocking.objects, blocking._versions = api.objects, api._versions
    found = api.put(ELASTIC_JOBS, job("j", "true"))
    owner = {"uid": found["metadata"]["uid"]}
    api.put(CONFIG_MAPS, {"metadata": {"name": master_name("j"), "ownerReferences": [owner]}})
    monkeypatch.setattr(app, "from_environment", lambda: None)
    monkeypatch.setattr(app, "Client", lambda *_: api)
    monkeypatch.setattr(app, "BlockingClient", lambda *_: blocking)
    monkeypatch.setitem(EventQueue.__init__.__kwdefaults__, "die", died.set)
    (tmp_path / "token").write_text("secret")
    monkeypatch.setenv(app.TOKEN_FILE_VARIABLE, str(tmp_path / "token"))
    (tmp_path / "job").mkdir()
    where = app.ClusterOptions(namespace="red", job="j", kind=ELASTIC_JOB)
    serving = asyncio.create_task(app.serve_on_kubernetes(JobDirectory(tmp_path / "job"), Options(), where))
    try:
        async with asyncio.timeout(10):
            await died.wait()
    finally:
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
