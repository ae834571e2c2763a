"""What the platform tells of pods that cannot be made, or are made again; the API server is a stand-in."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from typing import Any, cast

import msgspec
import pytest

from resile.api import timeouts
from resile.api.ids import NodeId, NodeKey, Rank, Seconds
from resile.api.job import JobSpec
from resile.common.backoff import Backoff
from resile.kube.client import Client
from resile.kube.errors import KubeError, unreachable
from resile.kube.informer import Listed
from resile.kube.kinds import PODS
from resile.master import app
from resile.platform.base import Launch, Observation
from resile.platform.kubernetes import platform as tested
from resile.platform.kubernetes.platform import KubernetesPlatform
from resile.protocol.reports import NodeStatus
from tests.platform.test_pods import job

NODE = NodeKey("worker", NodeId(4))
LAUNCH = Launch(node=NODE, rank=Rank(1), replicas=3)
DEADLINE = 10.0
QUOTA = "exceeded quota: pods"


class FakeAPI:
    """Answers each request for a pod with the next of its errors (or `EXISTS`), then makes the pod."""

    def __init__(self, *errors: KubeError | str) -> None:
        self.errors = list(errors)
        self.there: dict[str, Any] | None = None
        self.made: list[dict[str, Any]] = []
        self.on_delete: Callable[[], None] = lambda: None
        self.listing: asyncio.Event | None = None

    async def create(self, kind: Any, pod: Any) -> dict[str, Any] | None:
        await asyncio.sleep(0)
        if self.errors:
            error = self.errors.pop(0)
            if isinstance(error, KubeError):
                raise error
            return None
        number = len(self.made) + 1
        metadata = {**pod["metadata"], "uid": f"uid-{number}", "resourceVersion": str(10 * number)}
        self.there = {"metadata": metadata, "spec": pod["spec"], "status": {"phase": "Pending"}}
        self.made.append(self.there)
        return self.there

    async def get(self, kind: Any, namespace: str, name: str) -> dict[str, Any] | None:
        return self.there

    async def delete(self, kind: Any, namespace: str, name: str, grace: int) -> bool:
        if self.there is None:
            return False
        self.there = None
        self.on_delete()
        return True

    async def list(self, *_: Any, **__: Any) -> tuple[list[Any], str]:
        assert self.listing is not None
        await self.listing.wait()
        return [], "5"

    async def watch(self, *_: Any, **__: Any) -> AsyncIterator[tuple[str, Any]]:
        await asyncio.Event().wait()
        yield "", {}


EXISTS = "AlreadyExists"
SLOW = unreachable(TimeoutError("slow"))


def answer(code: int, message: str = "no") -> KubeError:
    return KubeError(message, code=code)


async def made_by(api: FakeAPI, launch: Launch) -> dict[str, Any]:
    made = await api.create(PODS, tested.pod_manifest(job(), launch, "here:1"))
    assert made is not None
    return made


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tested, "BACKOFF", Backoff(0.01, 0.05))
    monkeypatch.setattr(tested, "NO_ROOM", 0.01)


def platform_on(api: FakeAPI, told: list[Observation], spec: JobSpec | None = None) -> KubernetesPlatform:
    platform = KubernetesPlatform(spec or job(), cast(Client, api))
    platform._observe = told.append
    return platform


async def until(true: Callable[[], object]) -> None:
    async with asyncio.timeout(DEADLINE):
        while not true():  # noqa: ASYNC110  # whatever becomes true
            await asyncio.sleep(0.005)


async def test_a_pod_that_cannot_be_made_is_pending_whatever_hinders_it_and_whenever() -> None:
    told: list[Observation] = []
    api = FakeAPI(SLOW, answer(403, QUOTA), answer(429, "too many"))
    platform = platform_on(api, told)
    platform.launch(LAUNCH)
    await until(lambda: len(api.errors) == 2 and told)
    assert told[-1].status is NodeStatus.PENDING
    assert "cannot be reached" in told[-1].end.message
    await until(lambda: len(api.errors) == 1)
    await until(lambda: QUOTA in platform.hindrance(NODE))
    await until(lambda: api.made)
    await until(lambda: told[-1].status is NodeStatus.STARTING)
    assert [seen.status for seen in told] == [NodeStatus.PENDING, NodeStatus.STARTING], "nothing is said twice"
    await platform.close()


async def test_a_name_that_a_strangers_pod_holds_is_said() -> None:
    told: list[Observation] = []
    api = FakeAPI(*[EXISTS] * 100)
    api.there = {"metadata": {"name": "j-edljob-worker-4", "uid": "other", "ownerReferences": []}}
    platform = platform_on(api, told)
    platform.launch(LAUNCH)
    await until(lambda: told)
    assert told[-1].status is NodeStatus.PENDING
    assert "already exists" in told[-1].end.message
    await platform.close()


async def test_a_pod_that_was_deleted_before_it_was_there_is_removed_when_it_is_asked_for() -> None:
    told: list[Observation] = []
    api = FakeAPI()
    quick = msgspec.structs.replace(job(), timeouts=timeouts.derive(Seconds(1.0)))
    platform = platform_on(api, told, quick)
    grace = quick.timeouts.kill_grace
    platform.launch(LAUNCH)
    platform.delete(NODE, grace)
    await until(lambda: told)
    assert told[-1].status is NodeStatus.DELETED
    platform._on_pod(NODE, await made_by(api, LAUNCH))
    assert told[-1].status is NodeStatus.STARTING
    platform.delete(NODE, grace)
    begun = time.monotonic()
    await until(lambda: api.there is None)
    assert time.monotonic() - begun < tested.LAST_REPORT - 1.0, "half of the recovery budget is 0.5 s"
    await platform.close()


async def test_a_lost_pod_that_is_told_to_have_ended_is_kept_with_its_logs() -> None:
    told: list[Observation] = []
    api = FakeAPI()
    platform = platform_on(api, told)
    pod = await made_by(api, LAUNCH)
    platform._on_pod(NODE, {**pod, "status": {"phase": "Running"}})
    platform.delete(NODE, job().timeouts.kill_grace)
    await asyncio.sleep(0.05)
    platform._on_pod(NODE, {**pod, "status": {"phase": "Failed"}})
    await until(lambda: not platform._tasks)
    assert (told[-1].status, api.there) == (NodeStatus.FAILED, pod)
    await platform.close()


def test_a_master_whose_job_is_over_stays_until_what_is_left_is_deleted() -> None:
    assert app.FAREWELL >= 2 * tested.LAST_REPORT


async def test_an_answer_that_is_lost_says_nothing_of_a_pod_that_is_there() -> None:
    told: list[Observation] = []
    api = FakeAPI(SLOW, EXISTS)
    platform = platform_on(api, told)
    pod = await made_by(FakeAPI(), LAUNCH)
    api.there = {**pod, "status": {"phase": "Running"}}
    platform._on_pod(NODE, api.there)  # the watch was faster
    await platform._make(NODE, pod)
    assert {seen.status for seen in told} == {NodeStatus.RUNNING}
    await platform.close()


async def test_a_refusal_that_comes_before_the_start_is_told_at_the_start() -> None:
    told: list[Observation] = []
    api = FakeAPI(answer(422, "no such field"))
    api.listing = asyncio.Event()
    platform = KubernetesPlatform(job(), cast(Client, api))
    starting = asyncio.ensure_future(platform.start(told.append))
    platform.launch(LAUNCH)
    await until(lambda: not api.errors and not platform._launching)
    api.listing.set()
    await starting
    assert [(seen.status, seen.end.reason) for seen in told] == [(NodeStatus.FAILED, "Invalid")]
    await platform.close()


async def test_a_pod_without_room_elsewhere_is_let_go_in_time_to_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tested, "NO_ROOM", 60.0)
    api = FakeAPI()
    spec = job()
    hasty = msgspec.structs.replace(spec, timeouts=msgspec.structs.replace(spec.timeouts, pend=0.1))
    platform = KubernetesPlatform(hasty, cast(Client, api))
    avoiding = Launch(node=NODE, rank=Rank(1), replicas=3, avoid=("n1",))
    platform._on_pod(NODE, await made_by(api, avoiding))
    await until(lambda: len(api.made) == 2)
    await platform.close()


async def test_a_list_at_any_moment_does_not_end_a_node_whose_pod_is_made_again() -> None:
    told: list[Observation] = []
    api = FakeAPI()
    platform = platform_on(api, told)
    avoiding = Launch(node=NODE, rank=Rank(1), replicas=3, avoid=("n1",))
    old = await made_by(api, avoiding)
    leaving = {**old, "metadata": {**old["metadata"], "deletionTimestamp": "2026-01-01T00:00:00Z"}}
    api.on_delete = lambda: platform._on_list(Listed([leaving], "11"))  # while it goes
    platform._on_pod(NODE, old)
    await until(lambda: len(api.made) == 2 and NODE not in platform._launching)
    platform._on_list(Listed([], "12"))  # after it went, and older than the new one
    assert NodeStatus.DELETED not in {seen.status for seen in told}
    assert [seen.address for seen in await platform.adopt()] == [""]
    assert platform._pods[NODE]["metadata"]["uid"] == "uid-2"
    await platform.close()
