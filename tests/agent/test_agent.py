"""An agent between a master that is played by the test and real processes that do nothing."""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest_asyncio

from resile.agent.agent import Agent, Identity
from resile.agent.options import RunOptions
from resile.agent.session import Session
from resile.agent.workers.attempt import LogDirectory
from resile.agent.workers.output import Output
from resile.api.ids import NodeId, NodeKey, Rank, Round
from resile.protocol.agent_to_master import CanRegroup, Hello, Join, NodeFinished, WorkerFailed
from resile.protocol.master_to_agent import JobOver, RoundFormed, RoundOver, Welcome
from resile.protocol.message import Message
from resile.protocol.reports import RendezvousConfig, RoundAssignment
from resile.protocol.worker_to_agent import WorkerAssignment, WorkerReady

M = TypeVar("M", bound=Message)
SLEEPS = "import time; time.sleep(60)"


class Master(Session):
    """A session on whose other end is the test."""

    def __init__(self) -> None:
        self.heard: list[Message] = []
        self._news = asyncio.Event()

    def send(self, message: Message) -> None:
        self.heard.append(message)
        self._news.set()

    def beat(self, interval: float) -> None:
        pass

    async def hears(self, kind: type[M], count: int = 1) -> M:
        async with asyncio.timeout(20):
            while len(found := [each for each in self.heard if isinstance(each, kind)]) < count:
                self._news.clear()
                await self._news.wait()
        return found[-1]


class Line:
    owner: Any = None

    def __init__(self) -> None:
        self.heard: list[Message] = []
        self.closed = ""

    def send(self, message: Message) -> None:
        self.heard.append(message)

    def close(self, because: str = "") -> None:
        self.closed = because


class Node:
    def __init__(self, directory: Path, script: str, **fields: Any) -> None:
        options = RunOptions(
            command=(sys.executable, "-S", "-c", script),
            nproc=2,
            rendezvous=RendezvousConfig(max_restarts=3),
            run_id="r",
            job_name="j",
            **fields,
        )
        self.master, self.output = Master(), Output()
        self.away: list[float] = []
        self.agent = Agent(
            options,
            Identity(host="here"),
            session=self.master,
            token=bytes,
            revive_master=self.away.append,
            directory=directory,
            logs=LogDirectory(options, directory),
            output=self.output,
        )

    def says(self, message: Any) -> None:
        self.agent.on_message(message)

    def welcome(self, *, elastic: bool = False) -> None:
        key = NodeKey("worker", NodeId(0))
        self.says(
            Welcome(
                node=key,
                rank=Rank(0),
                heartbeat=1.0,
                heartbeat_timeout=5.0,
                kill_grace=5.0,
                exit_grace=5.0,
                elastic=elastic,
            )
        )

    def forms(self, number: int, nproc: int = 2) -> None:
        assignment = RoundAssignment(
            group_rank=Rank(0),
            group_world_size=1,
            first_rank=0,
            world_size=nproc,
            master_addr="127.0.0.1",
            master_port=9,
            nproc=nproc,
        )
        self.says(RoundFormed(round=Round(number), assignment=assignment))

    async def runs(self) -> dict[int, str]:
        """Wait for the processes; their names."""
        deadline = time.monotonic() + 20
        while not self.agent._launcher.is_running:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.005)
        assert self.agent._launcher.attempt is not None
        return self.agent._launcher.attempt.names

    def ready(self, name: str) -> Line:
        line: Any = Line()
        self.agent.on_worker(line, WorkerReady(worker=name, step=0))
        return line

    @property
    def hello(self) -> Hello:
        return self.agent.hello("127.0.0.1")


@pytest_asyncio.fixture
async def node(tmp_path: Path) -> AsyncIterator[Callable[..., Node]]:
    made: list[Node] = []

    def make(script: str = SLEEPS, **fields: Any) -> Node:
        made.append(Node(tmp_path, script, **fields))
        return made[-1]

    yield make
    for each in made:
        each.agent.close()
        await each.agent._launcher.stop(0.0, signal.SIGKILL)
        each.output.close()


async def test_workers_that_never_say_that_they_are_ready_are_restarted_with_every_round(
    node: Callable[..., Node],
) -> None:
    made = node()
    made.welcome()
    assert (await made.master.hears(Join)).after == 0
    made.forms(1)
    first = await made.runs()
    assert (made.hello.running, made.hello.elastic) == (True, False)
    made.says(RoundOver(round=Round(1), because="a node came"))
    assert (await made.master.hears(Join, 2)).after == 1
    assert not made.hello.running
    made.says(RoundOver(round=Round(1), because="a node came"))  # it has left that round already
    await asyncio.sleep(0.05)
    assert sum(isinstance(message, Join) for message in made.master.heard) == 2
    made.forms(2)
    assert made.hello.running
    assert set((await made.runs()).values()).isdisjoint(first.values())


async def test_a_worker_that_says_that_it_is_ready_makes_all_of_them_stay(node: Callable[..., Node]) -> None:
    made = node()
    made.welcome()
    await made.master.hears(Join)
    made.forms(1)
    names = await made.runs()
    made.master.heard.clear()
    line = made.ready(names[0])
    assert made.master.heard == [CanRegroup()]
    assert isinstance(line.heard[0], WorkerAssignment)
    assert (made.hello.running, made.hello.elastic) == (True, True)
    made.says(RoundOver(round=Round(1), because="a node came"))
    assert isinstance(line.heard[-1], RoundOver)
    made.ready(names[0])
    made.ready(names[1])
    assert (await made.master.hears(Join)).nproc == 2
    assert made.master.heard.count(CanRegroup()) == 1, "a node says so once"
    made.forms(2)
    assert await made.runs() == names, "the same processes"
    assert made.hello.round == 2


async def test_strangers_do_not_make_workers_stay(node: Callable[..., Node]) -> None:
    made = node()
    made.welcome()
    await made.master.hears(Join)
    made.forms(1)
    await made.runs()
    assert made.ready("stranger").closed == "no process 'stranger' runs here"
    assert not made.hello.elastic


async def test_a_node_that_comes_to_an_elastic_job_starts_before_it_joins(node: Callable[..., Node]) -> None:
    made = node()
    made.welcome(elastic=True)
    names = await made.runs()
    assert made.master.heard == []
    for name in names.values():
        made.ready(name)
    assert (await made.master.hears(Join)).elastic


async def test_workers_that_are_still_starting_stay_if_the_end_of_their_round_says_so(
    node: Callable[..., Node],
) -> None:
    made = node()
    made.welcome()
    await made.master.hears(Join)
    made.forms(1)
    names = await made.runs()
    made.says(RoundOver(round=Round(1), because="a node was lost", elastic=True))
    for name in names.values():
        made.ready(name)
    assert (await made.master.hears(Join, 2)).nproc == 2
    assert await made.runs() == names


async def test_a_node_has_finished_when_all_its_workers_ended_well_in_either_regime(node: Callable[..., Node]) -> None:
    for number, elastic in ((1, False), (2, True)):
        made = node("")
        made.welcome()
        await made.master.hears(Join)
        made.forms(number)
        if elastic:
            made.ready((await made.runs())[0])
        assert (await made.master.hears(NodeFinished)).round == number
        assert (made.hello.finished, made.hello.elastic) == (True, elastic)


async def test_a_failure_stops_the_siblings_of_restarting_workers_and_is_told_again_to_a_new_master(
    node: Callable[..., Node],
) -> None:
    made = node("import os, sys, time; os.environ['RANK'] == '1' and sys.exit(3); time.sleep(60)")
    made.welcome()
    await made.master.hears(Join)
    made.forms(1)
    failed = await made.master.hears(WorkerFailed)
    assert (failed.failure.global_rank, failed.failure.exit_code) == (1, 3)
    await made.master.hears(Join, 2)
    made.master.heard.clear()
    made.welcome()
    assert [type(message) for message in made.master.heard] == [WorkerFailed, Join]


async def test_a_job_that_is_over_ends_the_agent_and_nothing_brings_it_back(node: Callable[..., Node]) -> None:
    made = node()
    made.welcome()
    await made.master.hears(Join)
    made.forms(1)
    await made.runs()
    made.says(JobOver(succeeded=False, reason="WorkerError", message="it failed"))
    made.forms(2)
    assert await asyncio.wait_for(made.agent.done, 20) == 1
    assert not made.agent._launcher.is_running
    assert not made.agent._launcher.has_next


async def test_a_node_without_work_gives_up_on_a_master_and_one_that_trains_does_not(
    node: Callable[..., Node],
) -> None:
    made = node()
    made.welcome()
    await made.master.hears(Join)
    made.forms(1)
    await made.runs()
    made.agent.on_away(10_000.0, "refused")
    assert (made.away, made.agent.done.done()) == ([10_000.0], False)
    idle = node()
    idle.agent.on_away(10_000.0, "refused")
    assert await asyncio.wait_for(idle.agent.done, 20) == 1
