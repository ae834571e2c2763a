"""Watches the job's resource for changes by users: another number of nodes, or suspend.

A change goes to the core like one of a command line, and a refusal is written into the job's status. The master acts on
the number of nodes in the resource only when that number changes: a plan or `resile scale` may have changed the job
since. The journal keeps the last number, so a change that was made while no master lived is found.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable

import msgspec

from resile.api.job import JobSpec
from resile.api.job_phase import INVALID_SPEC
from resile.api.kinds import registry
from resile.api.kinds.base import JobKind
from resile.api.manifests.errors import BadManifest
from resile.api.manifests.reader import read_manifest
from resile.kube.client import Client
from resile.kube.informer import Listed, Watched, list_and_watch
from resile.kube.kinds import Object, of
from resile.master.app import Serving
from resile.master.journal.configmap import ConfigMapJournal
from resile.protocol.job_changes import Change, Scale, Suspend

log = logging.getLogger("resile.master")

LAST_SEEN = "wanted"
"""The key under which the journal remembers the `WantedSpec` that the master last acted upon."""
REFUSED = "ScaleRefused"
"""The reason in the status of a job if the core refuses a change of its spec."""


class WantedSpec(msgspec.Struct, frozen=True):
    replicas: dict[str, int]
    suspend: bool


def wanted(kind: JobKind, job: Object) -> WantedSpec:
    """Read from a job's resource what may change while the job runs; raises `BadManifest` if it is invalid."""
    spec = kind.to_job_spec(read_manifest(job))
    return WantedSpec({role: declared.replicas for role, declared in spec.roles.items()}, spec.suspend)


class SpecWatch:
    def __init__(
        self,
        spec: JobSpec,
        client: Client,
        serving: Serving,
        journal: ConfigMapJournal,
        seen: Callable[[Object, str, str], None],
    ) -> None:
        """Prepare. `run` calls `seen` with each state of the job's resource, an error, and the reason of the error.

        The error says why a change of the resource is refused. It is empty if no change is refused.
        """
        self._spec = spec
        self._kind = registry.job_kind(spec.kind)
        self._client = client
        self._serving = serving
        self._journal = journal
        self._seen = seen
        self._refused = ""

    async def run(self, job: Object) -> None:
        """Ask the core to make the job as its resource `job` describes, now and after each change of the resource.

        Returns when the resource is deleted, or is missing in a list.
        """
        known = self._journal.recall(LAST_SEEN)
        before = msgspec.json.decode(known, type=WantedSpec) if known else None
        if before is None and self._serving.fresh:
            before = wanted(self._kind, job)  # the first nodes are launched by it anyway
            self._remember(before)
        last = await self._act(job, before)
        watched = Watched(of(self._kind), self._spec.namespace, fields={"metadata.name": self._spec.name})
        news = list_and_watch(self._client, watched, since=job["metadata"]["resourceVersion"])
        async with contextlib.aclosing(news):
            async for one in news:
                seen = one.items if isinstance(one, Listed) else [] if one.deleted else [one.item]
                there = next((item for item in seen if item["metadata"]["uid"] == self._spec.uid), None)
                if there is None or there["metadata"].get("deletionTimestamp"):
                    return
                last = await self._act(there, last)

    async def _act(self, job: Object, before: WantedSpec | None) -> WantedSpec | None:
        try:
            now = wanted(self._kind, job)
        except BadManifest as bad:
            log.warning("the job was changed into something that cannot be run, and goes on as it was: %s", bad)
            self._seen(job, str(bad), INVALID_SPEC)
            return before
        if now != before:
            self._refused = ""
            state = self._serving.events.engine.state
            for role, replicas in now.replicas.items():
                if before is not None and before.replicas.get(role) == replicas:
                    continue
                if state.targets.get(role) != replicas:
                    await self._wish(Scale(role=role, replicas=replicas))
            if (before is None or before.suspend != now.suspend) and state.suspended != now.suspend:
                await self._wish(Suspend(on=now.suspend))
            self._remember(now)  # after the last answer: if this master dies before, the next one asks for the rest
        self._seen(job, self._refused, REFUSED)
        return now

    def _remember(self, now: WantedSpec) -> None:
        self._journal.remember(LAST_SEEN, msgspec.json.encode(now).decode())

    async def _wish(self, change: Change) -> None:
        refused = await self._serving.commands.change(change)
        if refused:
            log.warning("the change of the job is refused: %s", refused)
            self._refused = refused
