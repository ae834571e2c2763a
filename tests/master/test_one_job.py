"""A master writes for its own job alone, not for a later one of the same name."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from resile.api.job import JobSpec, RoleSpec
from resile.core.decisions import Reply
from resile.core.engine import Engine
from resile.core.events import ChangeWanted, Started
from resile.core.state import MAX_PLAN_ENDS, new_state
from resile.kube.client import Client
from resile.kube.errors import NOT_FOUND
from resile.kube.kinds import Kind, Object
from resile.master.app import Serving
from resile.master.kubernetes.plans import PlanWatch
from resile.master.kubernetes.status_writer import StatusWriter
from resile.protocol.job_changes import Change, Stop
from tests.core.given import running
from tests.kube.namespace import plan
from tests.support.fake_kube import FakeKube, refusal
from tests.support.kinds import ELASTIC_JOBS, SCALE_PLAN, SCALE_PLANS


class Master:
    """As much of a master as its companions look at; wishes are answered by `answers`, in order."""

    def __init__(self, api: FakeKube, uid: str) -> None:
        self.spec = JobSpec(
            name="j", kind="elasticjob", namespace="red", uid=uid, roles={"worker": RoleSpec(replicas=2)}
        )
        self.client = cast(Client, api)
        self.engine = Engine(new_state(self.spec, 0.0))
        self.engine.handle(Started(), 1.0)
        self.asked: list[Any] = []
        self.answers: list[str] = []
        events = SimpleNamespace(engine=self.engine, now=5.0, trouble=None, observers=[], submit=self.asked.append)
        self.serving = cast(
            Serving, SimpleNamespace(events=events, commands=_Commands(self), observers=[], fresh=False)
        )

    def stopped(self) -> None:
        self.engine.handle(ChangeWanted(change=Stop(because="the job was deleted")), 4.0)


class _Commands:
    def __init__(self, master: Master) -> None:
        self._master = master

    async def change(self, change: Change) -> str:
        self._master.asked.append(change)
        return self._master.answers.pop(0)


@pytest.fixture
def api() -> FakeKube:
    return FakeKube()


def status(api: FakeKube, kind: Kind = ELASTIC_JOBS, name: str = "j") -> Object:
    return dict(api.objects[kind.name, "red", name].get("status") or {})


# the status of the job ------------------------------------------------------------------------------------------


def reporter(api: FakeKube) -> tuple[Master, StatusWriter]:
    found = api.replaced(ELASTIC_JOBS, "j")
    master = Master(api, found["metadata"]["uid"])
    return master, StatusWriter(master.spec, master.client, master.serving, found, lambda _: "")


async def test_the_status_of_the_job_is_written_whoever_changed_it_meanwhile(api: FakeKube) -> None:
    master, reporter_ = reporter(api)
    await reporter_._write_status(steps=True)
    assert status(api)["phase"] == "Pending"
    api.objects["ElasticJob", "red", "j"]["metadata"]["resourceVersion"] = "77"
    master.stopped()
    await reporter_._write_status(steps=True)
    assert (status(api)["phase"], status(api)["message"]) == ("Failed", "the job was deleted")


async def test_the_master_of_a_deleted_job_leaves_the_next_one_of_its_name_alone_for_good(api: FakeKube) -> None:
    master, reporter_ = reporter(api)
    await reporter_._write_status(steps=True)
    master.stopped()
    api.replaced(ELASTIC_JOBS, "j")
    await reporter_._write_status(steps=True)
    assert status(api) == {}
    tried = api.patches
    await reporter_._write_status(steps=True)
    assert api.patches == tried


async def test_the_absence_of_the_job_is_final(api: FakeKube) -> None:
    master, reporter_ = reporter(api)
    api.drop(ELASTIC_JOBS, "red", "j")
    await reporter_._write_status(steps=True)
    api.replaced(ELASTIC_JOBS, "j", metadata={"uid": master.spec.uid})
    await reporter_._write_status(steps=True)
    assert status(api) == {}


async def test_a_server_that_says_no_without_knowing_is_asked_again(api: FakeKube) -> None:
    _, reporter_ = reporter(api)

    def refuse(_: str) -> None:
        raise refusal(NOT_FOUND)

    api.before = refuse
    await reporter_._write_status(steps=True)
    api.before = lambda _: None
    await reporter_._write_status(steps=True)
    assert status(api)["phase"] == "Pending"


# plans ----------------------------------------------------------------------------------------------------------


def planned(api: FakeKube, name: str = "p") -> Object:
    made = plan(name, "j", replicaResourceSpecs={"worker": {"replicas": 3}})
    return api.replaced(SCALE_PLANS, name, **made)


async def test_a_plan_is_told_how_far_it_is(api: FakeKube) -> None:
    master = Master(api, api.replaced(ELASTIC_JOBS, "j")["metadata"]["uid"])
    master.answers = ["the job is suspended; resume it first"]
    await PlanWatch(SCALE_PLAN, master.spec, master.client, master.serving)._execute(planned(api))
    assert status(api, SCALE_PLANS, "p") == {
        "phase": "Failed",
        "reason": "Refused",
        "message": "the job is suspended; resume it first",
        "createTime": "1970-01-01T00:00:05Z",
        "finishTime": "1970-01-01T00:00:05Z",
    }


async def test_a_plan_that_comes_after_the_job_was_deleted_is_left_to_the_next_of_its_name(api: FakeKube) -> None:
    master = Master(api, api.replaced(ELASTIC_JOBS, "j")["metadata"]["uid"])
    watch = PlanWatch(SCALE_PLAN, master.spec, master.client, master.serving)
    api.drop(ELASTIC_JOBS, "red", "j")
    await watch._execute(planned(api, "early"))
    api.replaced(ELASTIC_JOBS, "j")
    await watch._execute(planned(api, "late"))
    assert master.asked == []
    assert (status(api, SCALE_PLANS, "early"), status(api, SCALE_PLANS, "late")) == ({}, {})


async def test_another_plan_of_the_same_name_is_not_told_the_end_of_the_first(api: FakeKube) -> None:
    master = Master(api, api.replaced(ELASTIC_JOBS, "j")["metadata"]["uid"])
    master.answers = ["no"]
    first = planned(api)
    planned(api)
    await PlanWatch(SCALE_PLAN, master.spec, master.client, master.serving)._execute(first)
    assert status(api, SCALE_PLANS, "p") == {}


class Core:
    """A job that trains, and the answers of its real core."""

    def __init__(self, master: Master) -> None:
        self.job = running(2)
        master.serving.events.engine = self.job.engine
        self.events = master.serving.events
        master.serving.commands.change = self._change  # type: ignore[method-assign]

    async def _change(self, change: Change) -> str:
        self.job.wants(change, request=9)
        (reply,) = self.job.said(Reply)
        return str(reply.error)


async def rest(api: FakeKube) -> None:
    """Until nothing is written any more."""
    before = -1
    while before != api.patches:
        before = api.patches
        for _ in range(10):
            await asyncio.sleep(0)


@pytest.mark.parametrize(
    ("wish", "end"),
    [({"replicaResourceSpecs": {"worker": {"replicas": 2}}}, "Succeeded"), ({"createPods": [{}]}, "Failed")],
)
async def test_every_plan_is_told_its_end_however_many_there_are(api: FakeKube, wish: Object, end: str) -> None:
    """Some are done at once; others wait for nodes, and end all together when the job does."""
    master = Master(api, api.replaced(ELASTIC_JOBS, "j")["metadata"]["uid"])
    core = Core(master)
    watch = PlanWatch(SCALE_PLAN, master.spec, master.client, master.serving)
    names = [f"p{number}" for number in range(MAX_PLAN_ENDS + 50)]
    watch._on_list([api.replaced(SCALE_PLANS, name, **plan(name, "j", **wish)) for name in names])
    work = asyncio.create_task(watch._work())
    await rest(api)
    core.job.wants(Stop(because="enough"))
    for observer in core.events.observers:
        observer()
    await rest(api)
    work.cancel()
    assert {status(api, SCALE_PLANS, name).get("phase") for name in names} == {end}
