from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import multiprocessing
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import TypeVar

import pytest

from resile.api.ids import Round
from resile.protocol.agent_to_master import NodeFinished, StepReport
from resile.protocol.message import Message
from resile.protocol.shards import DatasetOpen, OpenDataset, ShardGranted, ShardNoted, ShardProgress, TakeShard
from resile.protocol.worker_to_agent import Attach, WorkerMessage
from resile.wire.agent_client import STEP_INTERVAL, AgentClient, AgentNotAnswering
from resile.wire.agent_socket import AgentSocket, serve_local
from resile.wire.connection import CannotListen
from resile.wire.frames import MAX_FRAME, FrameDecoder, MessageDecoder, encode
from resile.wire.transport import Connection
from tests.wire.peers import Ear

OPEN = OpenDataset(worker="", request=0, name="d", size=10, shard_size=2)
TAKE = TakeShard(worker="", request=0, dataset="d")
Got = TypeVar("Got")


def progress(lease: int) -> ShardProgress:
    return ShardProgress(worker="", request=0, dataset="d", lease=lease, upto=1)


class Agent(Ear):
    """An agent that answers all but TakeShard at once; those wait until `grant`."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path
        self.server: AgentSocket
        self.waiting: list[tuple[Connection, TakeShard]] = []
        self._leases = itertools.count(1)

    async def start(self) -> None:
        self.server = await serve_local(
            self.path, on_message=self.on_message, on_close=self.on_close, on_refused=self.on_refused
        )

    async def stop(self) -> None:
        self.server.close()
        await asyncio.sleep(0.01)

    def on_message(self, connection: Connection, message: Message) -> None:
        match message:
            case OpenDataset():
                connection.send(DatasetOpen(worker=message.worker, request=message.request))
            case ShardProgress():
                connection.send(ShardNoted(worker=message.worker, request=message.request, counted=True))
            case TakeShard():
                self.waiting.append((connection, message))
        super().on_message(connection, message)

    def grant(self) -> None:
        for connection, take in self.waiting:
            connection.send(ShardGranted(worker=take.worker, request=take.request, lease=next(self._leases)))
        self.waiting.clear()

    def steps(self) -> list[int]:
        return [message.step for message in self.messages if isinstance(message, StepReport)]


@pytest.fixture
async def agent(tmp_path: Path) -> AsyncIterator[Agent]:
    agent = Agent(tmp_path / "run" / "agent.sock")
    await agent.start()
    yield agent
    await agent.stop()


@pytest.fixture
async def channel(agent: Agent) -> AsyncIterator[AgentClient]:
    channel = AgentClient(str(agent.path), "w0", Round(3))
    yield channel
    channel.close()


async def off_loop(work: Callable[[], Got]) -> Got:
    return await asyncio.wait_for(asyncio.to_thread(work), 20)


async def test_a_process_attaches_and_its_first_step_goes_out_at_once(agent: Agent, channel: AgentClient) -> None:
    channel.report_step(7, total=100)
    await agent.until(lambda: len(agent.messages) == 2)
    attach, step = agent.messages
    assert attach == Attach(worker="w0")
    assert isinstance(step, StepReport)
    assert (step.round, step.step, step.total) == (3, 7, 100)
    assert [connection.peer for connection in agent.server.connections] == [f"pid {os.getpid()}"]


async def test_many_steps_are_told_seldom_but_the_newest_is_told(agent: Agent, channel: AgentClient) -> None:
    start = time.monotonic()
    for step in range(10_000):
        channel.report_step(step)
    took = time.monotonic() - start
    channel.flush()
    await agent.until(lambda: agent.steps()[-1:] == [9999])
    assert agent.steps()[0] == 0
    assert len(agent.steps()) <= 3 + took / STEP_INTERVAL


async def test_a_held_back_step_goes_before_a_request(agent: Agent, channel: AgentClient) -> None:
    channel.report_step(1)
    channel.report_step(2)
    await off_loop(lambda: channel.request(OPEN, 5))
    assert agent.steps() == [1, 2]


async def test_reporting_without_an_agent_neither_waits_nor_raises(tmp_path: Path) -> None:
    channel = AgentClient(str(tmp_path / "nobody.sock"), "w0")
    start = time.monotonic()
    for step in range(1000):
        channel.report_step(step)
    channel.flush()
    assert time.monotonic() - start < 1


async def test_reporting_to_an_agent_that_does_not_read_never_waits(tmp_path: Path) -> None:
    path = tmp_path / "stuck.sock"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        channel = AgentClient(str(path), "w0")
        longest = 0.0
        for step in range(20_000):
            channel._next_step = 0.0
            start = time.monotonic()
            channel.report_step(step)
            longest = max(longest, time.monotonic() - start)
        assert longest < 0.1
        assert channel._held is not None
        channel.close()


async def test_steps_are_told_again_once_an_agent_that_stood_still_reads(tmp_path: Path) -> None:
    path = tmp_path / "stuck.sock"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        channel = AgentClient(str(path), "w0")
        for step in range(20_000):
            channel._next_step = 0.0
            channel.report_step(step)
        assert channel._unsent, "the agent's buffer is full"
        line, _ = listener.accept()
        with line:
            line.setblocking(False)
            heard = bytearray()
            for step in range(20_000, 20_100):
                with contextlib.suppress(BlockingIOError):
                    while data := line.recv(1 << 20):
                        heard += data
                channel._next_step = 0.0
                channel.report_step(step)
        channel.close()
    frames = FrameDecoder(MAX_FRAME).feed(bytes(heard))
    steps = [m.step for m in map(MessageDecoder(WorkerMessage).decode, frames) if isinstance(m, StepReport)]
    assert steps[-1] >= 20_090
    assert steps == sorted(steps)


async def test_requests_get_their_own_answers(agent: Agent, channel: AgentClient) -> None:
    opened = await off_loop(lambda: channel.request(OPEN, 5))
    assert opened == DatasetOpen(worker="w0", request=1)
    noted = await off_loop(lambda: channel.request(progress(1), 5))
    assert noted == ShardNoted(worker="w0", request=2, counted=True)


async def test_a_waiting_request_does_not_hold_up_other_threads(agent: Agent, channel: AgentClient) -> None:
    take = asyncio.create_task(off_loop(lambda: channel.request(TAKE, 10)))
    await agent.until(lambda: agent.waiting)
    noted = await asyncio.gather(*(off_loop(lambda n=n: channel.request(progress(n), 5)) for n in range(4)))
    assert {answer.request for answer in noted} == {2, 3, 4, 5}
    assert not take.done()
    channel.report_step(1)
    agent.grant()
    assert (await take).lease == 1


async def test_several_threads_may_wait_without_end(agent: Agent, channel: AgentClient) -> None:
    takes = [asyncio.create_task(off_loop(lambda: channel.request(TAKE, math.inf))) for _ in range(3)]
    await agent.until(lambda: len(agent.waiting) == 3)
    agent.grant()
    assert sorted(granted.lease for granted in await asyncio.gather(*takes)) == [1, 2, 3]


async def test_a_late_grant_goes_to_whoever_asks_again(agent: Agent, channel: AgentClient) -> None:
    with pytest.raises(AgentNotAnswering, match=r"^the agent did not answer TakeShard within 0.05 s$"):
        await off_loop(lambda: channel.request(TAKE, 0.05))
    agent.grant()
    await off_loop(lambda: channel.request(OPEN, 5))
    granted = await off_loop(lambda: channel.request(TAKE, 5))
    assert (granted.request, granted.lease) == (1, 1)
    assert not agent.waiting


async def test_unanswered_requests_are_repeated_to_an_agent_that_comes_back(agent: Agent, channel: AgentClient) -> None:
    take = asyncio.create_task(off_loop(lambda: channel.request(TAKE, 10)))
    await agent.until(lambda: agent.waiting)
    await agent.stop()
    agent.waiting.clear()
    await agent.start()
    await agent.until(lambda: agent.waiting)
    agent.grant()
    assert (await take).request == 1
    assert [message for message in agent.messages if isinstance(message, Attach)] == [Attach(worker="w0")] * 2


async def test_steps_go_on_after_the_agent_comes_back(agent: Agent, channel: AgentClient) -> None:
    channel.report_step(1)
    await agent.until(lambda: agent.steps() == [1])
    await agent.stop()
    await agent.start()
    for step in itertools.count(2):
        channel.report_step(step)
        await asyncio.sleep(0.02)
        if len(agent.steps()) > 1:
            break
    assert agent.steps()[-1] > 1


async def test_an_agent_that_talks_nonsense_is_called_again(tmp_path: Path) -> None:
    path = tmp_path / "odd.sock"
    calls = 0

    async def odd(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal calls
        calls += 1
        await reader.read(10)
        writer.write(b"\xff" * 10 if calls == 1 else encode(DatasetOpen(worker="w0", request=1)))
        await reader.read()
        writer.close()

    server = await asyncio.start_unix_server(odd, path)
    channel = AgentClient(str(path), "w0")
    assert await off_loop(lambda: channel.request(OPEN, 5)) == DatasetOpen(worker="w0", request=1)
    assert calls == 2
    channel.close()
    server.close()
    await asyncio.sleep(0.01)


def _in_fork(work: Callable[[], bool]) -> bool:
    """Whether `work` returned True in a forked child."""
    child = multiprocessing.get_context("fork").Process(target=lambda: os._exit(0 if work() else 1))
    child.start()
    child.join(10)
    return child.exitcode == 0


async def test_a_forked_child_has_its_own_line_and_the_parents_goes_on(agent: Agent, channel: AgentClient) -> None:
    channel.report_step(1)
    await agent.until(lambda: agent.steps())

    def child() -> bool:
        return channel.request(OPEN, 5).worker == f"w0/{os.getpid()}"

    assert await off_loop(lambda: _in_fork(child))
    await agent.until(lambda: agent.closed)
    names = [message.worker for message in agent.messages if isinstance(message, Attach)]
    assert names[0] == "w0"
    assert len(names) == 2
    assert agent.closed == [f"the process with pid {names[1].removeprefix('w0/')} closed the connection"]
    assert (await off_loop(lambda: channel.request(OPEN, 5))).worker == "w0"


async def test_a_fork_while_another_thread_waits_is_no_trouble(agent: Agent, channel: AgentClient) -> None:
    take = asyncio.create_task(off_loop(lambda: channel.request(TAKE, 10)))
    await agent.until(lambda: agent.waiting)
    held = threading.Event()
    release = threading.Event()

    def hold() -> None:
        with channel._turn:
            held.set()
            release.wait(10)

    holder = threading.Thread(target=hold)
    holder.start()
    await off_loop(held.wait)
    assert await off_loop(lambda: _in_fork(lambda: channel.request(OPEN, 5).error == ""))
    release.set()
    holder.join()
    agent.grant()
    assert (await take).worker == "w0"


async def test_the_channel_comes_from_the_environment(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RESILE_AGENT_SOCKET", raising=False)
    assert AgentClient.from_environment() is None
    program = (
        "from resile.wire.agent_client import AgentClient\n"
        "channel = AgentClient.from_environment()\n"
        "assert channel is AgentClient.from_environment()\n"
        "channel.report_step(1); channel.report_step(2)\n"
        "import subprocess, sys\n"
        "again = 'from resile.wire.agent_client import AgentClient as A; A.from_environment().report_step(3)'\n"
        "subprocess.run([sys.executable, '-c', again], check=True)\n"
    )
    environment = {
        **os.environ,
        "RESILE_AGENT_SOCKET": str(agent.path),
        "RESILE_WORKER": "w5",
        "RESILE_ROUND": "9",
    }
    run = [sys.executable, "-c", program]
    await off_loop(lambda: subprocess.run(run, env=environment, check=True))
    await agent.until(lambda: len(agent.closed) == 2)
    assert sorted(agent.steps()) == [1, 2, 3]
    assert {message.round for message in agent.messages if isinstance(message, StepReport)} == {9}
    own, child = sorted(message.worker for message in agent.messages if isinstance(message, Attach))
    assert own == "w5"
    assert child.startswith("w5/")


@pytest.mark.parametrize(
    ("said", "sentence"),
    [
        (b"\xff\xff\xff\xff", "sent a message of 4294967295 bytes, over the limit of 1048576 bytes"),
        (
            encode(NodeFinished(round=1)),
            "sent a message that is not allowed here: Invalid value 'NodeFinished' - at `$.type`",
        ),
    ],
)
async def test_a_bad_process_is_cut_off_and_others_go_on(
    agent: Agent, channel: AgentClient, said: bytes, sentence: str
) -> None:
    with socket.socket(socket.AF_UNIX) as bad:
        bad.connect(str(agent.path))
        bad.send(said)
        await agent.until(lambda: agent.closed)
    assert agent.closed == [f"the process with pid {os.getpid()} {sentence}"]
    assert await off_loop(lambda: channel.request(OPEN, 5)) == DatasetOpen(worker="w0", request=1)


async def test_a_process_of_another_user_is_turned_away(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("resile.wire.transport._credentials", lambda transport: (77, 12345))
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.connect(str(agent.path))
        await agent.until(lambda: agent.refused)
    assert agent.refused == ["the process with pid 77 belongs to user 12345, not to ours"]
    assert not agent.server.connections
    assert not agent.closed


async def test_the_sockets_directory_is_closed_to_others(agent: Agent, tmp_path: Path) -> None:
    assert agent.path.parent.stat().st_mode & 0o777 == 0o700
    loose = tmp_path / "loose"
    loose.mkdir(mode=0o755)
    with pytest.raises(CannotListen, match=r"the directory is open to others \(mode must be 0700\)$"):
        await serve_local(loose / "a.sock", on_message=agent.on_message)
