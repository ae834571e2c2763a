"""A queue of names: each waits at most once, is worked on by one worker at a time, and comes back later if it failed.

A name that changes while it is worked on is looked at once more afterwards, so no change is missed and a hundred
changes cost two looks. Time comes from the event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import NamedTuple

from resile.api.ids import Seconds
from resile.operator import settings

log = logging.getLogger("resile.operator")


class Key(NamedTuple):
    """One object of a kind: two jobs of one name in two namespaces are two."""

    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


class TryAgain(Exception):
    """What is needed is not there yet, which is nobody's mistake; look again, with growing pauses."""


Look = Callable[[Key], Awaitable[Seconds | None]]
"""Looks at one object and does what is needed; tells when to look again, if time alone may change things."""

Told = Callable[[Key, str, float], None]
"""Called after every look with how it went (`done`, `again`, `failed`) and the seconds that it took."""


class WorkQueue:
    """Names to look at, and the workers that do it."""

    def __init__(self, look: Look, told: Told | None = None) -> None:
        self._look = look
        self._told = told
        self._ready: asyncio.Queue[Key] = asyncio.Queue()
        self._waiting: set[Key] = set()
        self._busy: set[Key] = set()
        self._again: set[Key] = set()
        self._failures: dict[Key, int] = {}
        self._alarms: dict[Key, asyncio.TimerHandle] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, key: Key) -> None:
        """Have `key` looked at, soon."""
        alarm = self._alarms.pop(key, None)
        if alarm is not None:
            alarm.cancel()
        if key in self._busy:
            self._again.add(key)
        elif key not in self._waiting:
            self._waiting.add(key)
            self._ready.put_nowait(key)

    def add_after(self, key: Key, delay: Seconds) -> None:
        """Have `key` looked at after `delay`, or before if something changes or an earlier alarm is set."""
        loop = asyncio.get_running_loop()
        alarm = self._alarms.get(key)
        if alarm is not None and alarm.when() <= loop.time() + delay:
            return
        if alarm is not None:
            alarm.cancel()
        self._alarms[key] = loop.call_later(max(0.0, delay), self._ring, key)

    def forget(self, key: Key) -> None:
        """The object is gone: no alarm and no count of failures is kept for it."""
        self._failures.pop(key, None)
        alarm = self._alarms.pop(key, None)
        if alarm is not None:
            alarm.cancel()

    async def run(self, workers: int = settings.WORKERS) -> None:
        """Work until cancelled."""
        async with asyncio.TaskGroup() as group:
            for _ in range(workers):
                group.create_task(self._work())

    def _ring(self, key: Key) -> None:
        self._alarms.pop(key, None)
        self.add(key)

    async def _work(self) -> None:
        while True:
            key = await self._ready.get()
            self._waiting.discard(key)
            self._busy.add(key)
            try:
                await self._once(key)
            finally:
                self._busy.discard(key)
            if key in self._again:
                self._again.discard(key)
                self.add(key)

    async def _once(self, key: Key) -> None:
        loop = asyncio.get_running_loop()
        begun = loop.time()
        try:
            async with asyncio.timeout(settings.RECONCILE):
                delay = await self._look(key)
        except TryAgain as reason:
            outcome = "again"
            log.info("%s: %s", key, reason)
            self._retry(key)
        # The boundary between one object and all others: whatever is wrong with one must not keep the others waiting.
        except Exception as error:
            outcome = "failed"
            expected = isinstance(error, (OSError, TimeoutError)) or hasattr(error, "code")
            log.warning("%s: %s", key, str(error) or type(error).__name__, exc_info=None if expected else error)
            self._retry(key)
        else:
            outcome = "done"
            self._failures.pop(key, None)
            if delay is not None:
                self.add_after(key, delay)
        if self._told is not None:
            self._told(key, outcome, loop.time() - begun)

    def _retry(self, key: Key) -> None:
        failures = self._failures.get(key, 0)
        self._failures[key] = failures + 1
        self.add_after(key, backoff(failures))


def backoff(failures: int, first: Seconds = settings.RETRY_FIRST, longest: Seconds = settings.RETRY_LONGEST) -> Seconds:
    """The pause after so many failures before this one."""
    return Seconds(min(longest, first * 2.0 ** min(failures, 30)))
