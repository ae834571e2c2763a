"""What command lines may ask of a master: `status`, `events`, `scale`, `suspend`, `stop`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import count
from typing import Any

import msgspec

from resile.api.job_view import JobView
from resile.core.decisions import Reply
from resile.core.events import PlanWanted, ScaleWanted, StopWanted, SuspendWanted
from resile.master.journal.sqlite import Journal, JournalError
from resile.master.shell import Shell
from resile.protocol.commands import Ask

Answer = Callable[[str, Any], None]


class _Scale(msgspec.Struct, forbid_unknown_fields=True):
    role: str
    replicas: int


class _Suspend(msgspec.Struct, forbid_unknown_fields=True):
    on: bool


class _Stop(msgspec.Struct, forbid_unknown_fields=True):
    because: str = "a person stopped it"


class _Events(msgspec.Struct, forbid_unknown_fields=True):
    after: int = 0
    limit: int = 1000


class Commands:
    """Answers what command lines ask; wishes go through the core and are answered by its decision."""

    def __init__(self, shell: Shell, journal: Journal, look: Callable[[], JobView]) -> None:
        """`look` shows the job as it is now."""
        self._shell = shell
        self._journal = journal
        self._look = look
        self._numbers = count(1)
        self._waiting: dict[int, Answer] = {}

    def __call__(self, ask: Ask, answer: Answer) -> None:
        """Answer one Ask, now or when the core has decided. A bad one gets a sentence."""
        try:
            self._handle(ask, answer)
        except msgspec.ValidationError as error:
            answer(f"bad arguments for '{ask.what}': {error}", None)
        except JournalError as error:
            answer(str(error), None)

    def _handle(self, ask: Ask, answer: Answer) -> None:
        match ask.what:
            case "status":
                answer("", msgspec.to_builtins(self._look()))
            case "events":
                wanted = msgspec.convert(ask.arguments, _Events)
                answer("", msgspec.to_builtins(self._journal.story(wanted.after, min(wanted.limit, 1000))))
            case "scale":
                scale = msgspec.convert(ask.arguments, _Scale)
                self._shell.submit(ScaleWanted(role=scale.role, replicas=scale.replicas, request=self._wait(answer)))
            case "suspend":
                suspend = msgspec.convert(ask.arguments, _Suspend)
                self._shell.submit(SuspendWanted(on=suspend.on, request=self._wait(answer)))
            case "stop":
                stop = msgspec.convert(ask.arguments, _Stop)
                self._shell.submit(StopWanted(because=stop.because, request=self._wait(answer)))
            case unknown:
                answer(f"no such question: '{unknown}'", None)

    async def wish(self, event: PlanWanted) -> str:
        """Bring a plan to the core; what it has against it, or nothing."""
        answered: asyncio.Future[str] = asyncio.get_running_loop().create_future()

        def answer(error: str, _: Any) -> None:
            if not answered.done():
                answered.set_result(error)

        self._shell.submit(msgspec.structs.replace(event, request=self._wait(answer)))
        return await answered

    def reply(self, decision: Reply) -> None:
        """The core has decided on a wish."""
        answer = self._waiting.pop(decision.request, None)
        if answer is not None:
            answer(decision.error, None)

    def _wait(self, answer: Answer) -> int:
        number = next(self._numbers)
        self._waiting[number] = answer
        return number
