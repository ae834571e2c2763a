"""A watch of the cluster outlives whatever the API server, or a proxy before it, does to it; no change is lost."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine
from contextlib import aclosing
from typing import Any, cast

import pytest

from resile.api.ids import Seconds
from resile.common.backoff import Backoff
from resile.kube import intervals
from resile.kube.client import Client
from resile.kube.errors import GONE, KubeError
from resile.kube.informer import Changed, Informer, Key, Listed, Watched, list_and_watch
from resile.kube.kinds import ALL_NAMESPACES, PODS
from tests.support.fake_kube import FakeKube
from tests.support.scripted_api_server import RESET, answer, listed, refusal, scripted, thing, watched

DEADLINE = 20.0
TOO_OLD = ("ERROR", {"kind": "Status", "code": 410, "message": "too old resource version"})
RED = Watched(PODS, "red")


@pytest.fixture
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(intervals, "BACKOFF", Backoff(0.01, 0.05))


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The pauses that an informer makes, none of which is waited for."""
    made: list[float] = []
    sleep = asyncio.sleep

    async def slept(seconds: float) -> None:
        if seconds:
            made.append(seconds)
        await sleep(0)

    monkeypatch.setattr("resile.kube.informer.asyncio.sleep", slept)
    return made


def words(news: Listed | Changed) -> str:
    if isinstance(news, Listed):
        return " ".join(["LISTED", *(one["metadata"]["name"] for one in news.items)])
    return f"{'DELETED' if news.deleted else 'CHANGED'} {news.item['metadata']['name']}"


async def followed(number: int, *answers: bytes, since: str = "1", **how: Any) -> tuple[list[str], list[str]]:
    """The first so many news, as words, and where each watch began."""
    seen: list[str] = []
    async with scripted(*answers) as server, asyncio.timeout(DEADLINE):
        client = Client(server.config, "test")
        try:
            following = cast(AsyncGenerator[Listed | Changed, None], list_and_watch(client, RED, since=since, **how))
            async with aclosing(following) as all_news:
                async for news in all_news:
                    seen.append(words(news))
                    if len(seen) == number:
                        break
        finally:
            await client.close()
    began = [url.partition("resourceVersion=")[2].partition("&")[0] for url in server.asked if "watch=" in url]
    return seen, began


FIRST = ("ADDED", thing("a", "2"))
SECOND = ("ADDED", thing("b", "3"))


@pytest.mark.usefixtures("_quick")
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
    assert seen == ["CHANGED a", "CHANGED b"]
    assert began == ["1", "2", *["2"] * len(breaks)]


@pytest.mark.usefixtures("_quick")
async def test_a_bookmark_moves_the_place_on_and_is_no_news() -> None:
    bookmark = ("BOOKMARK", {"kind": "Pod", "metadata": {"resourceVersion": "9"}})
    seen, began = await followed(1, watched(bookmark, then=RESET), watched(SECOND))
    assert (seen, began) == (["CHANGED b"], ["1", "9"])


@pytest.mark.usefixtures("_quick")
@pytest.mark.parametrize(
    "gone",
    [watched(TOO_OLD), refusal(410, "too old"), watched("<html>"), answer("<html>", 200, "text/html"), watched("{}")],
    ids=["410 in the stream", "410 as an answer", "no JSON", "a page", "an empty event"],
)
async def test_a_watch_that_lost_its_place_begins_with_everything_there_is(gone: bytes) -> None:
    there, later = listed("7", thing("a", "2"), thing("b", "3")), watched(("DELETED", thing("a", "8")))
    seen, began = await followed(2, gone, there, later)
    assert seen == ["LISTED a b", "DELETED a"]
    assert began == ["1", "7"]


@pytest.mark.usefixtures("_quick")
async def test_a_list_that_cannot_be_had_is_asked_for_again() -> None:
    gone, there = watched(TOO_OLD), listed("7", thing("a", "2"))
    seen, _ = await followed(1, gone, answer({"items": []}), answer("", 502, ""), refusal(500), there)
    assert seen == ["LISTED a"]


@pytest.mark.usefixtures("_quick")
async def test_a_server_that_always_says_no_is_not_asked_all_the_time() -> None:
    async with scripted(refusal(500)) as server:
        client = Client(server.config, "test")
        following = asyncio.ensure_future(anext(list_and_watch(client, RED, since="1")))
        await asyncio.wait([following], timeout=1.0)
        assert not following.done()
        following.cancel()
        await asyncio.wait([following])
        await client.close()
    assert 2 <= len(server.asked) <= 30


@pytest.mark.parametrize("said", ["", json.dumps({"type": "ADDED", "object": thing("a", "2")})])
async def test_a_server_that_closes_watches_at_once_is_asked_with_pauses(said: str, pauses: list[float]) -> None:
    events = 5 if said else 0
    await followed(2 + events, listed("1"), *[answer(said)] * 5, watched(SECOND), since="")
    assert pauses == [0.1, 0.2, 0.4, 0.8, 1.6]


async def test_pauses_grow_up_to_a_bound(pauses: list[float]) -> None:
    cluster = FakeKube()
    cluster.down = True
    async with running(informer_of(cluster, []).run()):
        await until(lambda: len(pauses) >= 10)
    assert max(pauses) == intervals.BACKOFF.limit


# giving up ----------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("_quick")
@pytest.mark.parametrize(
    "answers",
    [
        [refusal(500)],
        [RESET],
        [listed("1"), refusal(403, "forbidden")],
        [listed("1"), refusal(401, "who are you")],
        [listed("1"), refusal(404, "the server could not find the requested resource")],
    ],
)
async def test_a_caller_with_patience_is_told_of_refusals_that_will_last(answers: list[bytes]) -> None:
    with pytest.raises(KubeError):
        await followed(9, *answers, since="", patience=Seconds(60.0))


@pytest.mark.usefixtures("_quick")
async def test_a_caller_with_patience_waits_for_a_server_that_is_away_and_no_longer() -> None:
    seen, _ = await followed(2, listed("1"), RESET, refusal(500), watched(SECOND), since="", patience=Seconds(60.0))
    assert seen == ["LISTED", "CHANGED b"]
    with pytest.raises(KubeError, match="cannot be reached"):
        await followed(2, listed("1"), RESET, since="", patience=Seconds(0.1))


# the copy -----------------------------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def running(work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    task = asyncio.create_task(work)
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def until(true: Callable[[], object]) -> None:
    loop = asyncio.get_running_loop()
    end = loop.time() + DEADLINE
    while not true():
        assert loop.time() < end
        future = loop.create_future()
        loop.call_later(0.002, future.set_result, None)
        await future


def informer_of(cluster: FakeKube, changed: list[str], **how: Any) -> Informer:
    watched = Watched(PODS, ALL_NAMESPACES)
    return Informer(cast(Client, cluster), watched, lambda item: changed.append(item["metadata"]["uid"]), **how)


def pod(phase: str = "Running") -> dict[str, Any]:
    return {"metadata": {"name": "p", "namespace": "red", "uid": "a"}, "status": {"phase": phase}}


async def test_an_informer_follows_what_comes_changes_and_goes() -> None:
    cluster, changed = FakeKube(), list[str]()
    informer = informer_of(cluster, changed)
    key = Key("red", "p")
    cluster.put(PODS, pod("Pending"))
    async with running(informer.run()):
        await until(lambda: informer.synced.is_set() and cluster._watchers)
        cluster.put(PODS, pod("Running"))
        await until(lambda: (informer.get(key) or {})["status"]["phase"] == "Running")
        cluster.drop(PODS, *key)
        await until(lambda: informer.get(key) is None)
    assert changed == ["a", "a", "a"]


async def test_what_went_while_no_watch_was_open_is_noticed_by_the_next_list() -> None:
    cluster, changed = FakeKube(), list[str]()
    informer = informer_of(cluster, changed)
    cluster.put(PODS, pod())
    async with running(informer.run()):
        await until(lambda: cluster._watchers)
        cluster.drop(PODS, "red", "p", silently=True)
        cluster.break_watches()
        await until(lambda: informer.all() == [])
    assert changed == ["a", "a"]


async def test_an_informer_waits_for_an_api_server_that_is_away() -> None:
    cluster = FakeKube()
    cluster.down = True
    informer = informer_of(cluster, [])
    async with running(informer.run()):
        await asyncio.sleep(0.05)
        assert not informer.synced.is_set()
        cluster.down = False
        await until(informer.synced.is_set)


async def test_everything_is_listed_anew_when_that_is_due(pauses: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    cluster, lists = FakeKube(), list[str]()
    cluster.before = lists.append

    async def ends_at_once(*_: Any, **__: Any) -> AsyncIterator[tuple[str, Any]]:
        if len(pauses) % 2:
            raise KubeError("etcd leader changed", code=500)
        return
        yield

    monkeypatch.setattr(cluster, "watch", ends_at_once)
    async with running(informer_of(cluster, [], relist=Seconds(3600.0)).run()):
        await until(lambda: len(pauses) >= 5)
    assert lists == ["list"]
    async with running(informer_of(cluster, [], relist=Seconds(0.0)).run()):
        await until(lambda: len(lists) >= 5)


async def test_a_version_that_is_too_old_is_listed_anew(monkeypatch: pytest.MonkeyPatch, pauses: list[float]) -> None:
    cluster, lists = FakeKube(), list[str]()
    cluster.before = lists.append

    async def too_old(*_: Any, **__: Any) -> AsyncIterator[tuple[str, Any]]:
        raise KubeError("too old resource version", code=GONE)
        yield

    monkeypatch.setattr(cluster, "watch", too_old)
    async with running(informer_of(cluster, []).run()):
        await until(lambda: len(lists) >= 5)
    assert pauses[:3] == [0.1, 0.2, 0.4]
