"""A watch of the cluster outlives whatever the API server, or something before it, does to it; no change is lost."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx2
import pytest
from lightkube import AsyncClient

from resile.platform.kubernetes import client as kube
from tests.support.scripted_api_server import RESET, answer, listed, refusal, scripted, thing, watched

DEADLINE = 20.0
GONE = ("ERROR", {"kind": "Status", "code": 410, "message": "too old resource version"})


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kube, "FIRST_PAUSE", 0.01)
    monkeypatch.setattr(kube, "LONGEST_PAUSE", 0.05)


async def followed(number: int, *answers: bytes) -> tuple[list[str], list[str]]:
    """The first so many changes after version 1, as words, and where each watch began."""
    seen: list[str] = []
    async with scripted(*answers) as server, asyncio.timeout(DEADLINE):
        client = AsyncClient(config=server.config, namespace="red", timeout=httpx2.Timeout(5.0))
        changes = kube.follow(client, kube.PODS, "1")
        async for change, item in changes:
            named: list[dict[str, Any]] = item["items"] if change == "LISTED" else [item]
            seen.append(" ".join([change, *(one["metadata"]["name"] for one in named)]))
            if len(seen) == number:
                break
        await changes.aclose()  # type: ignore[attr-defined]  # it is a generator
        await client.close()
    began = [url.partition("resourceVersion=")[2].partition("&")[0] for url in server.asked if "watch=" in url]
    return seen, began


FIRST = ("ADDED", thing("a", "2"))
SECOND = ("ADDED", thing("b", "3"))


@pytest.mark.parametrize(
    "breaks",
    [
        [refusal(429, "too many requests")] * 4,
        [refusal(500, "etcd leader changed")],
        [answer("service unavailable", 503, "text/plain")],
        [answer("bad gateway", 502, "")],
        [RESET, RESET, RESET],
        [refusal(404, "the server could not find the requested resource")],
        [refusal(403, "forbidden")],
    ],
    ids=["429", "500", "503 as text", "502 without a type", "resets", "404 of a kind", "403"],
)
async def test_a_watch_goes_on_from_where_it_was(breaks: list[bytes]) -> None:
    seen, began = await followed(2, watched(FIRST, then=RESET), *breaks, watched(SECOND))
    assert seen == ["ADDED a", "ADDED b"]
    assert began == ["1", "2", *["2"] * len(breaks)]


@pytest.mark.parametrize(
    "gone",
    [watched(GONE), refusal(410, "too old"), watched("<html>"), answer("<html>", 200, "text/html"), watched("{}")],
    ids=["410 in the stream", "410 as an answer", "no JSON", "a page", "an empty event"],
)
async def test_a_watch_that_lost_its_place_begins_with_everything_there_is(gone: bytes) -> None:
    there, later = listed("7", thing("a", "2"), thing("b", "3")), watched(("DELETED", thing("a", "8")))
    seen, began = await followed(2, gone, there, later)
    assert seen == ["LISTED a b", "DELETED a"]
    assert began == ["1", "7"]


async def test_a_list_that_cannot_be_had_is_asked_for_again() -> None:
    gone, there = watched(GONE), listed("7", thing("a", "2"))
    seen, _ = await followed(1, gone, answer({"items": []}), gone, answer("", 502, ""), gone, refusal(500), gone, there)
    assert seen == ["LISTED a"]


async def test_a_server_that_always_says_no_is_not_asked_all_the_time() -> None:
    async with scripted(refusal(500)) as server:
        client = AsyncClient(config=server.config, namespace="red", timeout=httpx2.Timeout(5.0))
        following = asyncio.ensure_future(anext(kube.follow(client, kube.PODS, "1")))
        await asyncio.wait([following], timeout=1.0)
        assert not following.done()
        following.cancel()
        await asyncio.wait([following])
        await client.close()
    assert 2 <= len(server.asked) <= 30


def test_pauses_grow_up_to_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert [kube.pause(attempt) for attempt in (1, 2, 3)] == [0.1, 0.2, 0.4]
    assert kube.pause(1000) == kube.LONGEST_PAUSE


async def test_an_object_is_absent_only_if_the_server_names_it() -> None:
    for said, expected in (
        (refusal(404, "gone", name="a", kind="pods"), True),
        (refusal(404, "the server could not find the requested resource"), False),
        (answer("404 page not found", 404, "text/plain"), False),
    ):
        async with scripted(said) as server:
            client = AsyncClient(config=server.config, namespace="red", timeout=httpx2.Timeout(5.0))
            with pytest.raises(httpx2.HTTPStatusError) as raised:
                await client.get(kube.PODS, "a")
            await client.close()
            assert kube.absent(raised.value) is expected


async def test_a_server_that_closes_watches_at_once_is_asked_with_pauses(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pauses: list[int] = []
    monkeypatch.setattr(kube, "pause", lambda attempt: pauses.append(attempt) or 0.0)
    async with scripted(*[answer("")] * 4, watched(FIRST)) as server, asyncio.timeout(DEADLINE):
        config = {
            "clusters": [{"name": "one", "cluster": {"server": server.config.cluster.server}}],
            "contexts": [{"name": "one", "context": {"cluster": "one", "user": "me"}}],
            "users": [{"name": "me", "user": {}}],
            "current-context": "one",
        }
        (tmp_path / "config").write_text(json.dumps(config))
        monkeypatch.setenv("KUBECONFIG", str(tmp_path / "config"))
        client = kube.async_client("red")
        assert (await anext(kube.follow(client, kube.PODS, "1")))[0] == "ADDED"
        await client.close()
    assert pauses == [1, 2, 3, 4]
