"""The queue, the leader election and the ports, without a cluster."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, cast

import pytest

from resile.api.ids import Seconds
from resile.kube.client import Client
from resile.kube.errors import NOT_FOUND
from resile.kube.informer import Key
from resile.kube.kinds import LEASES, PODS, Kind, Object
from resile.operator import intervals
from resile.operator.controller import Controller
from resile.operator.health import Answer, serve
from resile.operator.leader_election import LeaderElection, LeadershipLost
from resile.operator.metrics import Metrics
from resile.operator.workqueue import TryAgain, WorkQueue
from tests.operator.objects import job
from tests.support.fake_kube import FakeKube, refusal
from tests.support.kinds import ELASTIC_JOBS, SCALE_PLANS

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


async def test_a_hundred_changes_of_one_object_cost_two_reconciliations() -> None:
    reconciled: list[Key] = []
    hold = asyncio.Event()

    async def reconcile(key: Key) -> None:
        reconciled.append(key)
        await hold.wait()

    queue = WorkQueue(reconcile)
    async with running(queue.run()):
        queue.add(KEY)
        await until(lambda: reconciled)
        for _ in range(100):
            queue.add(KEY)
        hold.set()
        await until(lambda: len(reconciled) == 2)
        await asyncio.sleep(0.02)
    assert reconciled == [KEY, KEY]


async def test_one_object_is_never_reconciled_twice_at_a_time_but_others_are() -> None:
    now: list[Key] = []
    most = [0, 0]

    async def reconcile(key: Key) -> None:
        now.append(key)
        most[:] = [max(most[0], now.count(key)), max(most[1], len(now))]
        await asyncio.sleep(0.005)
        now.remove(key)

    queue = WorkQueue(reconcile)
    async with running(queue.run(workers=3)):
        for _ in range(5):
            for name in "abcdef":
                queue.add(Key("red", name))
            await asyncio.sleep(0.004)
        await until(lambda: not now and not len(queue))
    assert most == [1, 3]


async def test_a_reconciliation_that_failed_is_repeated_and_does_not_hold_up_the_others() -> None:
    reconciled: list[str] = []

    async def reconcile(key: Key) -> None:
        reconciled.append(key.name)
        if key.name == "bad" and reconciled.count("bad") < 3:
            raise RuntimeError("surprise") if reconciled.count("bad") == 1 else TryAgain("not yet")

    queue = WorkQueue(reconcile)
    async with running(queue.run(workers=1)):
        queue.add(Key("red", "bad"))
        queue.add(Key("red", "good"))
        await until(lambda: reconciled.count("bad") == 3)
    assert reconciled[:2] == ["bad", "good"]


async def test_a_reconciliation_can_ask_for_another_one_later() -> None:
    reconciled: list[float] = []

    async def reconcile(_: Key) -> Seconds | None:
        reconciled.append(asyncio.get_running_loop().time())
        return Seconds(0.05) if len(reconciled) == 1 else None

    queue = WorkQueue(reconcile)
    async with running(queue.run()):
        queue.add(KEY)
        await until(lambda: len(reconciled) == 2)
    assert reconciled[1] - reconciled[0] >= 0.045


@pytest.fixture
def cluster() -> FakeKube:
    return FakeKube()


# the election -----------------------------------------------------------------------------------------------------


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same proportions, a hundred times faster, so that the test's waits are short."""
    monkeypatch.setattr(intervals, "RETRY_PERIOD", Seconds(0.02))
    monkeypatch.setattr(intervals, "RENEW_DEADLINE", Seconds(0.1))


def candidate(cluster: FakeKube, name: str) -> LeaderElection:
    return LeaderElection(cast(Client, cluster), "red", name)


async def test_only_one_leads_and_the_next_follows_when_it_resigns(cluster: FakeKube, quick: None) -> None:
    first, second = candidate(cluster, "one"), candidate(cluster, "two")
    await first.win()
    async with running(second.win()) as waiting, running(first.keep()):
        await asyncio.sleep(0.1)
        assert not waiting.done()
        held = cluster.objects["Lease", "red", intervals.LEASE]["spec"]
        assert (held["holderIdentity"], held["leaseDurationSeconds"]) == ("one", 15)
    async with running(second.win()) as waiting:
        await first.resign()
        await until(waiting.done)


async def test_a_renewal_that_was_cut_short_does_not_keep_the_leader_from_resigning(cluster: FakeKube) -> None:
    first = candidate(cluster, "one")
    await first.win()
    written = cluster.objects["Lease", "red", intervals.LEASE]
    cluster.put(LEASES, {**written, "spec": {**written["spec"], "renewTime": "later"}})  # its answer was never read
    await first.resign()
    assert cluster.objects["Lease", "red", intervals.LEASE]["spec"]["holderIdentity"] == ""


async def test_a_leader_whose_lease_was_taken_leaves_it_to_the_next(cluster: FakeKube) -> None:
    first = candidate(cluster, "one")
    await first.win()
    written = cluster.objects["Lease", "red", intervals.LEASE]
    cluster.put(LEASES, {**written, "spec": {**written["spec"], "holderIdentity": "two"}})
    await first.resign()
    assert cluster.objects["Lease", "red", intervals.LEASE]["spec"]["holderIdentity"] == "two"


async def test_a_silent_leader_is_followed_after_its_time_by_the_followers_own_clock(
    cluster: FakeKube, quick: None
) -> None:
    await candidate(cluster, "one").win()
    lease = cluster.objects["Lease", "red", intervals.LEASE]
    # Its clock is far ahead, which must not matter.
    cluster.put(LEASES, {**lease, "spec": {**lease["spec"], "renewTime": "2099-01-01T00:00:00.000000Z"}})
    lease = cluster.objects["Lease", "red", intervals.LEASE]
    cluster.put(LEASES, {**lease, "spec": {**lease["spec"], "leaseDurationSeconds": 1}})
    begun = asyncio.get_running_loop().time()
    async with asyncio.timeout(DEADLINE):
        await candidate(cluster, "two").win()
    assert asyncio.get_running_loop().time() - begun >= 1.0
    assert cluster.objects["Lease", "red", intervals.LEASE]["spec"]["leaseTransitions"] == 1


async def test_a_leader_that_cannot_renew_steps_down(cluster: FakeKube, quick: None) -> None:
    leader = candidate(cluster, "one")
    await leader.win()
    cluster.down = True
    with pytest.raises(LeadershipLost, match="not renewed"):
        async with asyncio.timeout(DEADLINE):
            await leader.keep()


async def test_a_leader_whose_lease_was_taken_steps_down_at_once(cluster: FakeKube, quick: None) -> None:
    leader = candidate(cluster, "one")
    await leader.win()
    lease = cluster.objects["Lease", "red", intervals.LEASE]
    cluster.put(LEASES, {**lease, "spec": {**lease["spec"], "holderIdentity": "two"}})
    with pytest.raises(LeadershipLost, match="another operator"):
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


# the controller ---------------------------------------------------------------------------------------------------


class LacksPlans(FakeKube):
    """An API server without the CRD of plans."""

    def __init__(self) -> None:
        super().__init__()
        self.master_started = asyncio.Event()

    async def create(self, kind: Kind, item: Object) -> Object | None:
        if kind == PODS:
            self.master_started.set()
        return await super().create(kind, item)

    async def list(self, kind: Kind, *arguments: Any, **options: Any) -> tuple[list[Object], str]:
        if kind == SCALE_PLANS:
            raise refusal(NOT_FOUND)
        return await super().list(kind, *arguments, **options)


async def test_a_kind_whose_crd_is_absent_does_not_keep_the_others_waiting() -> None:
    cluster = LacksPlans()
    cluster.put(ELASTIC_JOBS, job())
    controller = Controller(cast(Client, cluster), "red", "resile:1", Metrics())
    running = asyncio.create_task(controller.run())
    try:
        async with asyncio.timeout(10):
            await cluster.master_started.wait()
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    assert controller.not_synced() == [SCALE_PLANS.name]
