"""Real master processes for tests, and a peer that speaks to them."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from resile.api.job import JobSpec
from resile.api.job_view import JobView
from resile.api.kinds.run.names import RUN_KIND, WORKER
from resile.api.timeouts import derive
from resile.protocol.agent_to_master import Hello
from resile.protocol.commands import Answer, Ask, Command, FromMaster, JobStatus, Result, Status
from resile.protocol.master_to_agent import Welcome
from resile.protocol.message import PROTOCOL, Message
from resile.protocol.reports import RendezvousConfig
from resile.wire.connection import connect
from resile.wire.job_directory import JobDirectory
from resile.wire.transport import CannotConnect, Connection

PATIENCE = 30.0
BARE = JobSpec(name="job", kind=RUN_KIND, timeouts=derive())


def new_job(path: Path, spec: JobSpec = BARE) -> JobDirectory:
    directory = JobDirectory(path / "job")
    directory.create(spec)
    return directory


def command(directory: JobDirectory, *flags: str) -> list[str]:
    return [sys.executable, "-m", "resile.master", "--directory", str(directory.path), *flags]


@contextmanager
def master(directory: JobDirectory, *flags: str) -> Iterator[subprocess.Popen[str]]:
    """A master (or, with --supervise, its supervisor) in a session of its own; all of it is gone afterwards."""
    process = subprocess.Popen(
        command(directory, *flags),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate(timeout=PATIENCE)


class Peer:
    """Speaks to a master: `await peer.hear(Welcome)` gives the next message of that kind."""

    def __init__(self) -> None:
        self.heard: list[Any] = []
        self._news = asyncio.Event()
        self.connection: Connection
        self.closed = asyncio.Event()

    @classmethod
    async def call(cls, directory: JobDirectory, token: bytes | None = None, after: int = 0) -> Peer:
        """Connect, waiting for the master to come up; with `after`, for one that says it is another process."""
        peer = cls()
        async with asyncio.timeout(PATIENCE):
            while True:
                address = directory.address()
                if address is not None and address.pid != after:
                    try:
                        peer.connection = await connect(
                            address.reachable_host,
                            address.port,
                            token=token or directory.token(),
                            decode=FromMaster,
                            on_message=peer._message,
                            on_close=lambda *_: peer.closed.set(),
                        )
                        return peer
                    except CannotConnect:
                        pass
                await asyncio.sleep(0.01)

    def _message(self, _: Connection, message: Any) -> None:
        self.heard.append(message)
        self._news.set()

    async def hear(self, kind: type[Any]) -> Any:
        async with asyncio.timeout(PATIENCE):
            while True:
                for number, message in enumerate(self.heard):
                    if isinstance(message, kind):
                        return self.heard.pop(number)
                self._news.clear()
                await self._news.wait()

    def say(self, message: Message) -> None:
        self.connection.send(message)

    def greeting(self, incarnation: str, **fields: Any) -> Hello:
        words: dict[str, Any] = {
            "protocol": PROTOCOL,
            "job": "job",
            "incarnation": incarnation,
            "address": "127.0.0.1",
            "host": "here",
            "nproc": 1,
            "rendezvous": RendezvousConfig(min_nodes=2, max_nodes=2),
            "role": WORKER,
        }
        return Hello(**(words | fields))

    async def hello(self, incarnation: str, **fields: Any) -> Welcome:
        self.say(self.greeting(incarnation, **fields))
        welcome = await self.hear(Welcome)
        assert isinstance(welcome, Welcome)
        return welcome

    async def ask(self, command: Command) -> Result:
        self.say(Ask(request=1, command=command))
        answer = await self.hear(Answer)
        assert isinstance(answer, Answer)
        return answer.result

    async def status(self) -> JobView:
        answer = await self.ask(Status())
        assert isinstance(answer, JobStatus)
        return answer.job
