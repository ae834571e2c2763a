"""Answers command lines. Changes of the job go through the core, and its decision is the answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import count

from resile.api.job_view import JobView
from resile.core.decisions import Reply
from resile.core.events import AnyEvent, ChangeWanted
from resile.master.journal.base import Journal, JournalError
from resile.protocol.commands import Command, Done, Events, Failed, JobEvents, JobStatus, Result, Status
from resile.protocol.job_changes import Change

Answer = Callable[[Result], None]


class Commands:
    def __init__(self, submit: Callable[[AnyEvent], None], journal: Journal, look: Callable[[], JobView]) -> None:
        self._submit = submit
        self._journal = journal
        self._look = look
        self._numbers = count(1)
        self._waiting: dict[int, Answer] = {}

    def __call__(self, command: Command, answer: Answer) -> None:
        """Execute a command and pass its result to `answer`, now or when the core has decided."""
        match command:
            case Status():
                answer(JobStatus(job=self._look()))
            case Events():
                try:
                    events = self._journal.story(command.after, command.limit)
                except JournalError as error:
                    answer(Failed(error=str(error)))
                else:
                    answer(JobEvents(events=events))
            case change:
                self._change(change, answer)

    async def change(self, change: Change) -> str:
        """Ask the core to change the job. Returns one sentence that says why the core refuses; empty if it agrees."""
        answered: asyncio.Future[str] = asyncio.get_running_loop().create_future()

        def answer(result: Result) -> None:
            if not answered.done():
                answered.set_result(result.error if isinstance(result, Failed) else "")

        self._change(change, answer)
        return await answered

    def reply(self, decision: Reply) -> None:
        answer = self._waiting.pop(decision.request, None)
        if answer is not None:
            answer(Failed(error=decision.error) if decision.error else Done())

    def _change(self, change: Change, answer: Answer) -> None:
        number = next(self._numbers)
        self._waiting[number] = answer
        self._submit(ChangeWanted(change=change, request=number))
