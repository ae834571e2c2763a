"""A queue of keys to reconcile. Each key waits at most once, is reconciled by one worker at a time, and is retried.

A key that changes while it is reconciled is reconciled once more afterwards, so no change is missed and a hundred
changes cost two reconciliations. Time comes from the event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from resile.api.ids import Seconds
from resile.kube.errors import KubeError
from resile.kube.informer import Key
from resile.operator import intervals

log = logging.getLogger("resile.operator")


class TryAgain(Exception):
    """Raised to repeat a reconciliation after a pause, which grows each time. This is not logged as an error."""


Reconcile = Callable[[Key], Awaitable[Seconds | None]]
"""Reconciles one object. Returns after how many seconds to do it again; None: only when the object changes."""

OnReconciled = Callable[[str, float], None]
"""Called after every reconciliation with its outcome (`done`, `again`, `failed`) and the seconds that it took."""


class WorkQueue:
    def __init__(self, reconcile: Reconcile, on_reconciled: OnReconciled = lambda *_: None) -> None:
        self._reconcile = reconcile
        self._on_reconciled = on_reconciled
        self._ready: asyncio.Queue[Key] = asyncio.Queue()
        self._waiting: set[Key] = set()
        self._busy: set[Key] = set()
        self._again: set[Key] = set()
        self._failures: dict[Key, int] = {}
        self._timers: dict[Key, asyncio.TimerHandle] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, key: Key) -> None:
        timer = self._timers.pop(key, None)
        if timer is not None:
            timer.cancel()
        if key in self._busy:
            self._again.add(key)
        elif key not in self._waiting:
            self._waiting.add(key)
            self._ready.put_nowait(key)

    def add_after(self, key: Key, delay: Seconds) -> None:
        """Queue `key` after `delay` seconds, unless a timer for `key` is due earlier."""
        loop = asyncio.get_running_loop()
        timer = self._timers.get(key)
        if timer is not None and timer.when() <= loop.time() + delay:
            return
        if timer is not None:
            timer.cancel()
        self._timers[key] = loop.call_later(max(0.0, delay), self._on_timer, key)

    async def run(self, workers: int = intervals.WORKERS) -> None:
        async with asyncio.TaskGroup() as group:
            for _ in range(workers):
                group.create_task(self._work())

    def _on_timer(self, key: Key) -> None:
        self._timers.pop(key, None)
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
            async with asyncio.timeout(intervals.RECONCILE):
                delay = await self._reconcile(key)
        except TryAgain as reason:
            outcome = "again"
            log.info("%s: %s", key, reason)
            self._retry(key)
        # The boundary between one object and all others: an error of one must not keep the others waiting.
        except Exception as error:
            outcome = "failed"
            expected = isinstance(error, (KubeError, OSError, TimeoutError))
            log.warning("%s: %s", key, str(error) or type(error).__name__, exc_info=None if expected else error)
            self._retry(key)
        else:
            outcome = "done"
            self._failures.pop(key, None)
            if delay is not None:
                self.add_after(key, delay)
        self._on_reconciled(outcome, loop.time() - begun)

    def _retry(self, key: Key) -> None:
        failures = self._failures[key] = self._failures.get(key, 0) + 1
        self.add_after(key, Seconds(intervals.RETRY.after(failures)))
