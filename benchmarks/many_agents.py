"""Thousands of agents against one real master: the agents' side of the protocol without any training processes.

The master is the process that production runs (`python -m resile.master`); the agents are connections of the
production code, thousands to a process, each with its own handshake, Hello and heartbeats. This module is both the
process that plays agents (`python -m benchmarks.many_agents`, told what to do line by line) and the handle by which a
benchmark holds a master and its crowd.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.harness import GaveUp, Story, Workplace, asking, file_limit, say
from resile.api.ids import NO_ROUND, Round
from resile.api.job import JobSpec
from resile.api.kinds.run.names import RUN_KIND, WORKER
from resile.protocol.agent_to_master import Hello, Join
from resile.protocol.master_to_agent import MasterMessage, Refused, RoundFormed, RoundOver, Welcome
from resile.protocol.message import PROTOCOL
from resile.protocol.reports import RendezvousConfig
from resile.wire.frames import HEARTBEAT_FRAME
from resile.wire.job_directory import JobDirectory
from resile.wire.transport import CallingConnection, Connection, Endpoint

PER_PROCESS = 5000
"""Agents that one process plays."""
AT_ONCE = 200
"""Agents of one process that may be in the middle of connecting."""
TICK = 0.002
"""How finely heartbeats are spread. Coarser ticks would flatter the master: more messages per wake-up."""
JOB = "crowd"
CONNECT_SECONDS = 180.0


class Report(msgspec.Struct, kw_only=True):
    """What one process of agents answers: when, by the monotonic clock, its last agent was through."""

    at: float
    begun: float = 0.0
    lost: int = 0
    """Connections that ended without being told to."""
    beats: int = 0
    """Heartbeats sent so far."""
    error: str = ""


# the agents' process --------------------------------------------------------------------------------------------------


class Players:
    """Many agents in one process."""

    def __init__(self, directory: JobDirectory, agents: int, total: int, first: int) -> None:
        self._directory = directory
        self._agents = agents
        self._total = total
        self._first = first
        self._connections: list[Connection] = []
        self._awaited = 0
        self._kind: type[Any] = Welcome
        self._all = asyncio.Event()
        self._last = 0.0
        self._round: Round = NO_ROUND
        self._beat = 0.0
        self._beats_sent = 0
        self._leaving: set[Connection] = set()
        self._lost = 0
        self._error = ""

    async def play(self) -> None:
        """Do what the lines on standard input say until they end."""
        lines = asyncio.StreamReader()
        loop = asyncio.get_running_loop()
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
        beating = asyncio.ensure_future(self._beats())
        verbs = {
            "connect": self._connect,
            "join": self._join,
            "drop": self._drop,
            "told": self._told,
            "count": self._count,
        }
        while line := (await lines.readline()).decode().strip():
            report = await verbs[line]()
            sys.stdout.buffer.write(msgspec.json.encode(report) + b"\n")
            sys.stdout.buffer.flush()
        beating.cancel()

    def _hear(self, connection: Connection, message: Any) -> None:
        if isinstance(message, RoundFormed):
            self._round = message.round
        elif isinstance(message, Welcome):
            self._beat = message.heartbeat
        elif isinstance(message, Refused):
            self._error = message.because
            self._all.set()
        if isinstance(message, self._kind):
            self._awaited -= 1
            if self._awaited <= 0:
                self._last = time.monotonic()
                self._all.set()

    def _closed(self, connection: Connection, because: str) -> None:
        if connection in self._leaving:
            return
        self._lost += 1
        self._error = self._error or because

    def _await(self, kind: type[Any], number: int) -> None:
        self._kind, self._awaited = kind, number
        self._all.clear()

    async def _report(self, begun: float) -> Report:
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                await self._all.wait()
        except TimeoutError:
            self._error = self._error or f"{self._awaited} agents did not hear {self._kind.__name__}"
        return Report(at=self._last, begun=begun, lost=self._lost, error=self._error)

    async def _connect(self) -> Report:
        address, token = self._directory.address(), self._directory.token()
        assert address is not None
        endpoint = Endpoint(
            token=token,
            decode=MasterMessage,
            on_message=self._hear,
            on_close=self._closed,
        )
        begun = time.monotonic()
        gate = asyncio.Semaphore(AT_ONCE)
        self._await(Welcome, self._agents)

        async def one(number: int) -> None:
            async with gate:
                where = f"127.0.0.1:{address.port}"
                made = CallingConnection(endpoint, where)
                await endpoint.loop.create_connection(lambda: made, "127.0.0.1", address.port)
                connection = await made.done
                connection.send(self._hello(number))
                self._connections.append(connection)

        async with asyncio.TaskGroup() as tasks:
            for number in range(self._first, self._first + self._agents):
                tasks.create_task(one(number))
        return await self._report(begun)

    def _hello(self, number: int) -> Hello:
        return Hello(
            protocol=PROTOCOL,
            job=JOB,
            incarnation=f"{number:032x}",
            address="127.0.0.1",
            host=f"host-{number}",
            nproc=8,
            rendezvous=RendezvousConfig(min_nodes=self._total, max_nodes=self._total),
            role=WORKER,
        )

    async def _join(self) -> Report:
        self._await(RoundFormed, len(self._connections))
        join = Join(after=self._round, store_port=29500)
        for connection in self._connections:
            connection.send(join)
        report = await self._report(time.monotonic())
        self._await(RoundOver, len(self._connections))  # from now on, so that no agent hears of a loss too early
        return report

    async def _drop(self) -> Report:
        """One agent's connection dies; the others of this process are to hear about it."""
        gone = self._connections.pop()
        self._leaving.add(gone)
        self._awaited -= 1
        begun = time.monotonic()
        gone.abort()
        return await self._report(begun)

    async def _told(self) -> Report:
        """The agents of this process are to hear about one of another process."""
        return await self._report(time.monotonic())

    async def _count(self) -> Report:
        return Report(at=time.monotonic(), lost=self._lost, beats=self._beats_sent, error=self._error)

    async def _beats(self) -> None:
        """The heartbeats of all agents, evenly spread."""
        due, before = 0.0, time.monotonic()
        while True:
            await asyncio.sleep(TICK)
            now = time.monotonic()
            crowd = self._connections
            if self._beat:
                due += (now - before) * len(crowd) / self._beat
            before = now
            while due >= 1:
                crowd[self._beats_sent % len(crowd)].send_frame(HEARTBEAT_FRAME)
                self._beats_sent += 1
                due -= 1


# the benchmark's handle -----------------------------------------------------------------------------------------------


class Crowd:
    """A master process and the processes that play its agents."""

    def __init__(self, place: Workplace, agents: int) -> None:
        self.agents = agents
        self.directory = JobDirectory(place.path / "job")
        self.directory.create(JobSpec(name=JOB, kind=RUN_KIND))
        self.master = place.start([sys.executable, "-m", "resile.master", "--directory", self.directory.path])
        self.story: Story
        self._place = place
        self._processes: list[subprocess.Popen[bytes]] = []

    def connect(self) -> float:
        """Start the agents; the seconds from the first call to the last Welcome."""
        for first in range(0, self.agents, PER_PROCESS):
            number = min(PER_PROCESS, self.agents - first)
            words = ["--directory", str(self.directory.path), "--agents", str(number)]
            words += ["--total", str(self.agents), "--first", str(first)]
            self._processes.append(
                self._place.start(
                    [sys.executable, "-m", "benchmarks.many_agents", *words],
                    env={"PYTHONPATH": str(Path(__file__).parents[1])},
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                )
            )
        reports = self._tell(["connect"] * len(self._processes))
        return max(report.at for report in reports) - min(report.begun for report in reports)

    def join(self) -> float:
        """All agents ask for a round at once; the seconds from the last Join sent to the last RoundFormed received."""
        reports = self._tell(["join"] * len(self._processes))
        return max(report.at for report in reports) - max(report.begun for report in reports)

    def drop(self) -> float:
        """One agent's connection dies; the seconds until the last of the others knows that the round is over."""
        reports = self._tell(["told"] * (len(self._processes) - 1) + ["drop"])
        return max(report.at for report in reports) - reports[-1].begun

    def beats(self) -> int:
        """How many heartbeats the agents have sent so far."""
        return sum(report.beats for report in self._ask(["count"] * len(self._processes)))

    @property
    def verdicts(self) -> int:
        """How many nodes the master has declared lost."""
        return self.story.count("NodeFailed")

    def _tell(self, words: list[str]) -> list[Report]:
        """Have it done by every agent; one that cannot spoils the measurement."""
        reports = self._ask(words)
        for report in reports:
            if report.error or report.lost:
                raise GaveUp(f"{report.lost} agents lost their connection; {report.error}")
        return reports

    def _ask(self, words: list[str]) -> list[Report]:
        for process, word in zip(self._processes, words, strict=True):
            assert process.stdin is not None
            process.stdin.write(word.encode() + b"\n")
            process.stdin.flush()
        return [self._report_of(process) for process in self._processes]

    def _report_of(self, process: subprocess.Popen[bytes]) -> Report:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise GaveUp("a process of agents ended")
        return msgspec.json.decode(line, type=Report)


@contextlib.contextmanager
def gathered(agents: int) -> Iterator[Crowd]:
    """A master with so many agents connected, none of which has joined a round."""
    with Workplace() as place:
        crowd = Crowd(place, agents)
        with asking(crowd.directory) as crowd.story:
            took = crowd.connect()
            say(f"{agents:,} agents connected in {took:.1f} s")
            yield crowd


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.many_agents", description="Play agents.")
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--agents", type=int, required=True)
    parser.add_argument("--total", type=int, required=True)
    parser.add_argument("--first", type=int, required=True)
    options = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_NOFILE, (file_limit(), file_limit()))

    async def play() -> None:
        directory = JobDirectory(options.directory)
        await Players(directory, options.agents, options.total, options.first).play()

    asyncio.run(play())


if __name__ == "__main__":
    main()
