"""The queue, the mirror, the election and the ports, without a cluster."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, cast

import pytest
from lightkube import AsyncClient

from resile.api.ids import Seconds
from resile.operator import settings
from resile.operator.cluster import GONE, LEASE, POD, Cluster, ClusterError
from resile.operator.election import Election, LeadershipLost
from resile.operator.health import Answer, serve
from resile.operator.informer import Informer
from resile.operator.workqueue import Key, TryAgain, WorkQueue, backoff
from tests.operator.fake_cluster import FakeCluster
from tests.operator.objects import pod
from tests.support.scripted_api_server import RESET, answer, refusal, scripted

KEY = Key("red", "mnist")
DEADLINE = 5.0


async def until(check: Callable[[], Any]) -> None:
    async with asyncio.timeout(DEADLINE):
        while not check():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


@contextlib.asynccontextmanager
async def running(work: Coroutine[Any, Any, None]) -> AsyncIterator[asyncio.Task[None]]:
    task = asyncio.create_task(work)
    try:
        yield task
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError, LeadershipLost):
            await task


# the queue --------------------------------------------------------------------------------------------------------


async def test_a_hundred_changes_of_one_object_cost_two_looks() -> None:
    looks: list[Key] = []
    hold = asyncio.Event()

    async def look(key: Key) -> None:
        looks.append(key)
        await hold.wait()

    queue = WorkQueue(look)
    async with running(queue.run()):
        queue.add(KEY)
        await until(lambda: looks)
        for _ in range(100):
            queue.add(KEY)
        hold.set()
        await until(lambda: len(looks) == 2)
        await asyncio.sleep(0.02)
    assert looks == [KEY, KEY]


async def test_one_object_is_never_looked_at_twice_at_a_time_but_others_are() -> None:
    now: list[Key] = []
    most = [0, 0]

    async def look(key: Key) -> None:
        now.append(key)
        most[:] = [max(most[0], now.count(key)), max(most[1], len(now))]
        await asyncio.sleep(0.005)
        now.remove(key)

    queue = WorkQueue(look)
    async with running(queue.run(workers=3)):
        for _ in range(5):
            for name in "abcdef":
                queue.add(Key("red", name))
            await asyncio.sleep(0.004)
        await until(lambda: not now and not len(queue))
    assert most == [1, 3]


async def test_a_look_that_failed_is_repeated_and_does_not_hold_up_the_others() -> None:
    looks: list[str] = []

    async def look(key: Key) -> None:
        looks.append(key.name)
        if key.name == "bad" and looks.count("bad") < 3:
            raise RuntimeError("surprise") if looks.count("bad") == 1 else TryAgain("not yet")

    queue = WorkQueue(look)
    async with running(queue.run(workers=1)):
        queue.add(Key("red", "bad"))
        queue.add(Key("red", "good"))
        await until(lambda: looks.count("bad") == 3)
    assert looks[:2] == ["bad", "good"]


async def test_a_look_can_ask_for_another_one_later() -> None:
    looks: list[float] = []

    async def look(_: Key) -> Seconds | None:
        looks.append(asyncio.get_running_loop().time())
        return Seconds(0.05) if len(looks) == 1 else None

    queue = WorkQueue(look)
    async with running(queue.run()):
        queue.add(KEY)
        await until(lambda: len(looks) == 2)
    assert looks[1] - looks[0] >= 0.045


def test_pauses_double_up_to_a_bound() -> None:
    assert [backoff(n) for n in (0, 1, 2)] == [0.1, 0.2, 0.4]
    assert backoff(10_000) == settings.RETRY_LONGEST


# the mirror -------------------------------------------------------------------------------------------------------


@pytest.fixture
def cluster() -> FakeCluster:
    return FakeCluster()


def mirror_of(cluster: FakeCluster, changed: list[str]) -> Informer:
    return Informer(cast(Cluster, cluster), POD, "*", lambda item: changed.append(item["metadata"]["uid"]))


async def test_a_mirror_follows_what_comes_changes_and_goes(cluster: FakeCluster) -> None:
    changed: list[str] = []
    mirror = mirror_of(cluster, changed)
    key = Key("red", "elasticjob-mnist-dlrover-master")
    cluster.put(POD, pod("Pending", uid="a"))
    async with running(mirror.run()):
        await until(mirror.synced.is_set)
        await until(lambda: cluster._watchers)
        cluster.put(POD, pod("Running", uid="a"))
        await until(lambda: (mirror.get(key) or {})["status"]["phase"] == "Running")
        cluster.drop(POD, *key)
        await until(lambda: mirror.get(key) is None)
    assert changed == ["a", "a", "a"]


async def test_what_went_while_nobody_watched_is_noticed_by_the_next_list(cluster: FakeCluster) -> None:
    changed: list[str] = []
    mirror = mirror_of(cluster, changed)
    cluster.put(POD, pod(uid="a"))
    async with running(mirror.run()):
        await until(lambda: cluster._watchers)
        cluster.drop(POD, "red", "elasticjob-mnist-dlrover-master", silently=True)
        cluster.break_watches()
        await until(lambda: mirror.all() == [])
    assert changed == ["a", "a"]


async def test_a_mirror_waits_for_an_api_server_that_is_away(cluster: FakeCluster) -> None:
    cluster.down = True
    mirror = mirror_of(cluster, [])
    async with running(mirror.run()):
        await asyncio.sleep(0.05)
        assert not mirror.synced.is_set()
        cluster.down = False
        await until(mirror.synced.is_set)


async def test_watches_that_end_at_once_are_opened_again_with_growing_pauses(
    cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []
    sleep = asyncio.sleep

    async def slept(seconds: float) -> None:
        pauses.append(seconds)
        await sleep(0)

    async def ends_at_once(*_: Any) -> AsyncIterator[tuple[str, Any]]:
        if len(pauses) % 2:
            raise ClusterError(GONE, "too old resource version")
        return
        yield

    monkeypatch.setattr(cluster, "watch", ends_at_once)
    monkeypatch.setattr("resile.operator.informer.asyncio.sleep", slept)
    monkeypatch.setattr(FakeCluster, "_answer", lambda _: sleep(0))
    async with running(mirror_of(cluster, []).run()):
        async with asyncio.timeout(DEADLINE):
            while len(pauses) < 10:
                await sleep(0)
    assert pauses[:3] == [0.1, 0.2, 0.4]
    assert max(pauses) == settings.RELIST_LONGEST


# answers that make no sense ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "said",
    [
        answer("starting", 503, ""),
        answer("<html>", 200, "text/html"),
        answer("null"),
        answer({"items": [{}], "metadata": {"resourceVersion": "1"}}),
        answer({"items": []}),
        answer("not json", 500),
        RESET,
        refusal(404, "the server could not find the requested resource"),
    ],
)
async def test_an_answer_that_makes_no_sense_is_an_error_like_any_other(said: bytes) -> None:
    async with scripted(said) as server:
        cluster = Cluster(AsyncClient(config=server.config))
        with pytest.raises(ClusterError):
            await cluster.list(POD, "red")
        with pytest.raises(ClusterError):
            await anext(cluster.watch(POD, "red", "1"))
        if said != answer({"items": []}) and b"items" not in said:
            with pytest.raises(ClusterError):
                await cluster.get(POD, "red", "a")
        await cluster.close()


# the election -----------------------------------------------------------------------------------------------------


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same proportions, a hundred times faster, so that the test's waits are short."""
    monkeypatch.setattr(settings, "RETRY_PERIOD", Seconds(0.02))
    monkeypatch.setattr(settings, "RENEW_DEADLINE", Seconds(0.1))


def candidate(cluster: FakeCluster, name: str) -> Election:
    return Election(cast(Cluster, cluster), "red", name)


async def test_only_one_leads_and_the_next_follows_when_it_resigns(cluster: FakeCluster, quick: None) -> None:
    first, second = candidate(cluster, "one"), candidate(cluster, "two")
    await first.win()
    async with running(second.win()) as waiting, running(first.keep()):
        await asyncio.sleep(0.1)
        assert not waiting.done()
        held = cluster.objects["Lease", "red", settings.LEASE]["spec"]
        assert (held["holderIdentity"], held["leaseDurationSeconds"]) == ("one", 15)
    async with running(second.win()) as waiting:
        await first.resign()
        await until(waiting.done)


async def test_a_renewal_that_was_cut_short_does_not_keep_the_leader_from_resigning(cluster: FakeCluster) -> None:
    first = candidate(cluster, "one")
    await first.win()
    written = cluster.objects["Lease", "red", settings.LEASE]
    cluster.put(LEASE, {**written, "spec": {**written["spec"], "renewTime": "later"}})  # its answer was never read
    await first.resign()
    assert cluster.objects["Lease", "red", settings.LEASE]["spec"]["holderIdentity"] == ""


async def test_a_leader_whose_lease_was_taken_leaves_it_to_the_next(cluster: FakeCluster) -> None:
    first = candidate(cluster, "one")
    await first.win()
    written = cluster.objects["Lease", "red", settings.LEASE]
    cluster.put(LEASE, {**written, "spec": {**written["spec"], "holderIdentity": "two"}})
    await first.resign()
    assert cluster.objects["Lease", "red", settings.LEASE]["spec"]["holderIdentity"] == "two"


async def test_a_silent_leader_is_followed_after_its_time_by_the_followers_own_clock(
    cluster: FakeCluster, quick: None
) -> None:
    await candidate(cluster, "one").win()
    lease = cluster.objects["Lease", "red", settings.LEASE]
    # Its clock is far ahead, which must not matter.
    cluster.put(LEASE, {**lease, "spec": {**lease["spec"], "renewTime": "2099-01-01T00:00:00.000000Z"}})
    lease = cluster.objects["Lease", "red", settings.LEASE]
    cluster.put(LEASE, {**lease, "spec": {**lease["spec"], "leaseDurationSeconds": 1}})
    begun = asyncio.get_running_loop().time()
    async with asyncio.timeout(DEADLINE):
        await candidate(cluster, "two").win()
    assert asyncio.get_running_loop().time() - begun >= 1.0
    assert cluster.objects["Lease", "red", settings.LEASE]["spec"]["leaseTransitions"] == 1


async def test_a_leader_that_cannot_renew_steps_down(cluster: FakeCluster, quick: None) -> None:
    leader = candidate(cluster, "one")
    await leader.win()
    cluster.down = True
    with pytest.raises(LeadershipLost, match="not renewed"):
        async with asyncio.timeout(DEADLINE):
            await leader.keep()


async def test_a_leader_whose_lease_was_taken_steps_down_at_once(cluster: FakeCluster, quick: None) -> None:
    leader = candidate(cluster, "one")
    await leader.win()
    lease = cluster.objects["Lease", "red", settings.LEASE]
    cluster.put(LEASE, {**lease, "spec": {**lease["spec"], "holderIdentity": "two"}})
    with pytest.raises(LeadershipLost, match="somebody else"):
        async with asyncio.timeout(DEADLINE):
            await leader.keep()


# the ports --------------------------------------------------------------------------------------------------------


async def asked(port: int, words: bytes) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(words)
        async with asyncio.timeout(DEADLINE):
            return await reader.read()
    except ConnectionError:  # cut off
        return b""
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


async def test_the_port_answers_what_it_knows_and_survives_what_it_does_not() -> None:
    routes = {"/healthz": lambda: Answer(200, b"ok\n"), "/readyz": lambda: Answer(503, b"not yet\n")}
    async with await serve("127.0.0.1", 0, routes) as server:
        port = server.sockets[0].getsockname()[1]
        assert (await asked(port, b"GET /healthz?x HTTP/1.1\r\n\r\n")).endswith(b"\r\n\r\nok\n")
        assert (await asked(port, b"GET /readyz HTTP/1.1\r\nHost: x\r\n\r\n")).startswith(b"HTTP/1.1 503 ")
        assert (await asked(port, b"POST /healthz HTTP/1.1\r\n\r\n")).startswith(b"HTTP/1.1 405 ")
        assert (await asked(port, b"GET /etc/passwd HTTP/1.1\r\n\r\n")).startswith(b"HTTP/1.1 404 ")
        assert (await asked(port, b"\x16\x03\x01\r\n\r\n")).startswith(b"HTTP/1.1 400 ")
        assert await asked(port, b"x" * 100_000) == b""
        assert (await asked(port, b"HEAD /healthz HTTP/1.1\r\n\r\n")).endswith(b"\r\n\r\n")
