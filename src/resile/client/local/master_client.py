"""Sending commands to a job's master from blocking code: one connection, one command at a time, with deadlines."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any, Self, overload

from resile.client.errors import CommandError
from resile.protocol.commands import Answer, Ask, Command, Events, Failed, JobEvents, JobStatus, Result, Status
from resile.wire.connection import connect
from resile.wire.frames import BadFrame
from resile.wire.handshake import HandshakeRefused
from resile.wire.job_directory import DirectoryError, JobDirectory
from resile.wire.transport import CannotConnect, Connection

ANSWER_SECONDS = 2.0
"""How long to wait for the answer to one command; a healthy master takes a millisecond."""
RESTART_SECONDS = 10.0
"""How long to repeat a command that must reach the master, which may be restarting."""
RETRY_SECONDS = 0.1


class MasterUnreachable(Exception):
    """Raised if no master answered in time; the text is one sentence. Another try may succeed."""


class MasterClient:
    """Sends commands to one job's master. Connects at the first command, and again after a restart of the master."""

    def __init__(self, directory: JobDirectory) -> None:
        self._directory = directory
        self._runner = asyncio.Runner()
        self._connection: Connection | None = None
        self._asked = 0
        self._answer: asyncio.Future[Answer] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._runner.run(self._connection.wait_closed())
        self._runner.close()

    @overload
    def ask(self, command: Status, seconds: float = ...) -> JobStatus: ...
    @overload
    def ask(self, command: Events, seconds: float = ...) -> JobEvents: ...
    @overload
    def ask(self, command: Command, seconds: float = ...) -> Result: ...

    def ask(self, command: Command, seconds: float = ANSWER_SECONDS) -> Result:
        """Send a command once, and return the master's result.

        Raises `MasterUnreachable` if no answer comes within `seconds`, and `CommandError` if the master refuses.
        """
        return self._runner.run(self._ask(command, seconds))

    def insist(self, command: Command, seconds: float = RESTART_SECONDS) -> Result:
        """Send a command again and again until a master answers, and return its result.

        A master may get the command more than once. Raises `MasterUnreachable` if no answer comes for `seconds`, and
        `CommandError` if the master refuses the command.
        """
        until = time.monotonic() + seconds
        while True:
            try:
                return self.ask(command, min(ANSWER_SECONDS, seconds))
            except MasterUnreachable:
                if time.monotonic() > until:
                    raise
            time.sleep(RETRY_SECONDS)

    async def _ask(self, command: Command, seconds: float) -> Result:
        try:
            async with asyncio.timeout(seconds):
                connection = await self._connected(seconds)
                self._asked += 1
                self._answer = asyncio.get_running_loop().create_future()
                connection.send(Ask(request=self._asked, command=command))
                answer = await self._answer
        except TimeoutError:
            if self._connection is not None:
                self._connection.abort("it did not answer")
                self._connection = None
            raise MasterUnreachable(f"the master did not answer within {seconds:g} s") from None
        except BadFrame as error:
            raise CommandError(f"the question is too long: {error}") from error
        if isinstance(answer.result, Failed):
            raise CommandError(answer.result.error)
        return answer.result

    async def _connected(self, seconds: float) -> Connection:
        if self._connection is not None and not self._connection.closed:
            return self._connection
        address = self._directory.address()
        if address is None:
            raise MasterUnreachable("the job has no master yet")
        try:
            self._connection = await connect(
                address.reachable_host,
                address.port,
                token=self._directory.token(),
                decode=Answer,
                on_message=self._received,
                on_close=self._closed,
                timeout=seconds,
            )
        except CannotConnect as error:
            raise MasterUnreachable(str(error)) from error
        except HandshakeRefused as error:
            raise CommandError(f"the job's master refuses us: {error}") from error
        except (DirectoryError, ValueError) as error:  # no token, or an empty one
            raise CommandError(f"the job's token cannot be used: {error}") from error
        return self._connection

    def _received(self, _: Connection, message: Any) -> None:
        waiting = self._answer
        if isinstance(message, Answer) and message.request == self._asked and waiting and not waiting.done():
            waiting.set_result(message)

    def _closed(self, connection: Connection, because: str) -> None:
        if self._connection is connection:
            self._connection = None
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(MasterUnreachable(because))


def wait_until(done: Callable[[], bool], seconds: float, every: float = RETRY_SECONDS) -> bool:
    """Call `done` repeatedly until it returns True; False if it does not within `seconds`."""
    until = time.monotonic() + seconds
    while not done():
        if time.monotonic() > until:
            return False
        time.sleep(every)
    return True
