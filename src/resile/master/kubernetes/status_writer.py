"""Writes the status of the job's resource, and an Event for every job event.

No decision depends on either, so an API server that does not answer delays them and nothing else. A change is written
within a second, a change of steps alone every ten seconds. Events are bounded in number and rate. The status goes only
to the resource with this job's uid: a later job of the same name has another master.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable

from resile.api.ids import NodeKey, Seconds
from resile.api.job import JobSpec
from resile.api.job_phase import JOURNAL_GONE
from resile.api.kinds import registry
from resile.core.decisions import Note
from resile.kube.client import Client
from resile.kube.errors import INVALID, NOT_FOUND, KubeError
from resile.kube.events import emit, new_event_name
from resile.kube.kinds import Object, of
from resile.master.app import Serving
from resile.master.journal.base import JournalGone
from resile.master.kubernetes.job_status import difference, status_of

log = logging.getLogger("resile.master")

STATUS_SECONDS = Seconds(1.0)
STEPS_SECONDS = Seconds(10.0)
"""The least seconds between two writes if only progress or goodput has changed: each write loads the API server."""
LAST_SECONDS = Seconds(5.0)
"""How long a master that ends tries to write the last status and Events."""
EVENTS_AT_ONCE = 50
EVENTS_PER_SECOND = 5.0
EVENTS_WAITING = 500
"""How many Events may wait to be written. Further ones are not written; the job's story has them all."""
_GAUGES = {"progress": {"step", "total", "speed"}, "goodput": set[str]()}


class StatusWriter:
    def __init__(
        self, spec: JobSpec, client: Client, serving: Serving, job: Object, hindrance: Callable[[NodeKey], str]
    ) -> None:
        """Prepare; only `run` writes. `job` is the present resource; `hindrance` says why a node cannot start."""
        self._spec = spec
        self._kind = of(registry.job_kind(spec.kind))
        self._client = client
        self._serving = serving
        self._hindrance = hindrance
        self._written: Object = {}
        self._gone = False
        self._steps_at = 0.0
        self._changed = asyncio.Event()
        self._changed.set()
        self._notes: asyncio.Queue[tuple[str, float, Note]] = asyncio.Queue(EVENTS_WAITING)
        self._in_hand: tuple[str, float, Note] | None = None
        """The Event that is being written. A master that ends writes it once more, since that write may have failed."""
        self._left_out = 0
        self._generation = 0
        self._error = self._reason = ""
        self.seen(job)
        serving.observers.append(self._on_note)
        serving.events.observers.append(self._changed.set)

    def seen(self, job: Object, error: str = "", reason: str = "") -> None:
        """Note the newest state of the job's resource. If its change is refused, `error` and `reason` say why."""
        self._error, self._reason = error, reason
        if not error:
            self._generation = int(job["metadata"].get("generation") or 0)
        self._written = job.get("status") or {}
        self._changed.set()

    def _on_note(self, note: Note) -> None:
        try:
            self._notes.put_nowait((new_event_name(self._spec.name), self._serving.events.now, note))
        except asyncio.QueueFull:
            self._left_out += 1

    async def run(self) -> None:
        """Write the status and Events until cancelled; then write the last ones within `LAST_SECONDS`."""
        try:
            async with asyncio.TaskGroup() as both:
                both.create_task(self._keep_status())
                both.create_task(self._keep_events())
        finally:
            try:
                async with asyncio.timeout(LAST_SECONDS):
                    await self._write_status(steps=True)
                    if self._in_hand is not None:
                        await self._write_event(*self._in_hand)
                    while not self._notes.empty():
                        await self._write_event(*self._notes.get_nowait())
            except TimeoutError:
                log.warning("the last words about the job could not be written in time")

    async def _keep_status(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(STEPS_SECONDS):
                    await self._changed.wait()
            self._changed.clear()
            now = asyncio.get_running_loop().time()
            await self._write_status(steps=now - self._steps_at >= STEPS_SECONDS)
            await asyncio.sleep(STATUS_SECONDS)

    async def _write_status(self, *, steps: bool) -> None:
        if self._gone:
            return
        events = self._serving.events
        wanted = status_of(events.engine.state, events.now, self._written, self._generation, self._hindrance)
        if not events.engine.state.phase.over:
            wanted |= self._complaint()
        patch = difference(self._written, wanted)
        if not patch or (not steps and _only_gauges(patch)):
            return
        try:
            await self._client.replace_status(self._kind, self._spec.namespace, self._spec.name, self._spec.uid, wanted)
        except KubeError as error:
            if error.code in (NOT_FOUND, INVALID) and await self._is_gone():
                self._gone = True
                log.info("the job is gone, and its status is not written any more")
                return
            log.warning("the status of the job cannot be written now: %s", error)
            self._changed.set()
            return
        self._written = wanted
        self._steps_at = asyncio.get_running_loop().time()

    async def _is_gone(self) -> bool:
        try:
            spec = self._spec
            return await self._client.get_same(self._kind, spec.namespace, spec.name, spec.uid) is None
        except KubeError:
            return False

    def _complaint(self) -> dict[str, str]:
        trouble = self._serving.events.trouble
        if trouble is not None:
            reason = JOURNAL_GONE if isinstance(trouble, JournalGone) else "JournalNotWritten"
            return {"reason": reason, "message": f"{trouble}; the job trains on, but nothing is decided meanwhile"}
        if self._error:
            because = f"the change of the job cannot be run, and the job goes on as it was: {self._error}"
            return {"reason": self._reason, "message": because}
        return {}

    async def _keep_events(self) -> None:
        allowance, since = float(EVENTS_AT_ONCE), asyncio.get_running_loop().time()
        while True:
            self._in_hand = await self._notes.get()
            now = asyncio.get_running_loop().time()
            allowance, since = min(EVENTS_AT_ONCE, allowance + (now - since) * EVENTS_PER_SECOND), now
            if allowance < 1:
                await asyncio.sleep(1 / EVENTS_PER_SECOND)
            allowance -= 1
            await self._write_event(*self._in_hand)
            self._in_hand = None
            if self._left_out:
                log.warning("%d Events were left out; `resile describe` has the whole story", self._left_out)
                self._left_out = 0

    async def _write_event(self, name: str, at: float, note: Note) -> None:
        metadata = {"name": self._spec.name, "namespace": self._spec.namespace, "uid": self._spec.uid}
        reason, message, warning = note.reason, note.message, note.warning
        await emit(self._client, self._kind, metadata, reason, message, warning=warning, now=at, name=name)


def _only_gauges(patch: Object) -> bool:
    return all(
        field in _GAUGES and (not isinstance(value, dict) or set(value) <= _GAUGES[field])
        for field, value in patch.items()
    )
