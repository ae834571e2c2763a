"""What these tests see of a cluster is what its API server says; here a stand-in says it."""

from __future__ import annotations

import asyncio
import json
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.kube import namespace
from tests.kube.namespace import KubeNamespace
from tests.support.scripted_api_server import RESET, Scripted, answer, listed, refusal, scripted, thing


def looking(server: Scripted, place: Path, monkeypatch: pytest.MonkeyPatch) -> closing[KubeNamespace]:
    """A namespace of the cluster whose API server this is."""
    config = {
        "clusters": [{"name": "one", "cluster": {"server": server.config.cluster.server}}],
        "contexts": [{"name": "one", "context": {"cluster": "one", "user": "me"}}],
        "users": [{"name": "me", "user": {}}],
        "current-context": "one",
    }
    (place / "config").write_text(json.dumps(config))
    monkeypatch.setattr(namespace, "KUBECONFIG", str(place / "config"))
    return closing(KubeNamespace("red", place))


async def seen(look: Any) -> Any:
    return await asyncio.to_thread(look)


async def test_what_is_there_is_seen_and_what_is_not_is_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = {**thing("a", "2"), "status": {"phase": "Running", "progress": {"members": 2}}}
    answers = [answer(there), answer(there), refusal(404, "gone", name="b", kind="pods")]
    async with scripted(*answers) as server:
        with looking(server, tmp_path, monkeypatch) as red:
            assert await seen(lambda: red.get("pod", "a")) == there
            assert await seen(lambda: red.progress("a")) == {"members": 2}
            assert await seen(lambda: red.uid("pod", "b")) == ""
    assert [url.partition("red/")[2] for url in server.asked] == ["pods/a", "elasticjobs/a", "pods/b"]


async def test_a_server_that_refuses_is_not_taken_for_one_that_has_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with scripted(refusal(403, "forbidden")) as server:
        with looking(server, tmp_path, monkeypatch) as red, pytest.raises(namespace.ApiError):
            await seen(lambda: red.get("scaleplan", "a"))


async def test_pods_are_those_of_the_role_that_are_not_on_their_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    leaving = thing("job-edljob-worker-1", "3")
    leaving["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    async with scripted(listed("7", thing("job-edljob-worker-0", "2"), leaving)) as server:
        with looking(server, tmp_path, monkeypatch) as red:
            assert list(await seen(lambda: red.pods("job"))) == ["job-edljob-worker-0"]
    (asked,) = server.asked
    assert "/namespaces/red/pods?" in asked
    assert "labelSelector=elasticjob-name%3Djob%2Creplica-type%3Dworker" in asked


async def test_a_server_that_was_started_anew_is_asked_once_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with scripted(RESET, answer(thing("a", "2")), RESET) as server:
        with looking(server, tmp_path, monkeypatch) as red:
            assert await seen(lambda: red.uid("pod", "a")) == "a"
            with pytest.raises(namespace.httpx2.TransportError):
                await seen(lambda: red.uid("pod", "a"))
    assert len(server.asked) == 4
