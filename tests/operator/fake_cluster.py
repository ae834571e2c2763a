"""An API server in memory, as far as the operator's plumbing needs one: versions, conflicts, watches that break."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from typing import Any

from resile.operator.cluster import CONFLICT, GONE, NOT_FOUND, ClusterError, Kind

Object = dict[str, Any]


class FakeCluster:
    namespace = "red"

    def __init__(self) -> None:
        self._versions = itertools.count(1)
        self.objects: dict[tuple[str, str, str], Object] = {}
        self._watchers: list[asyncio.Queue[tuple[str, Object] | None]] = []
        self.down = False
        self.lists = 0

    # what tests do

    def put(self, kind: Kind, item: Object) -> Object:
        """Create or change an object, and tell those who watch."""
        metadata = item["metadata"]
        key = (kind.__name__, metadata["namespace"], metadata["name"])
        change = "MODIFIED" if key in self.objects else "ADDED"
        version = str(next(self._versions))
        uid = self.objects[key]["metadata"]["uid"] if key in self.objects else f"{metadata['name']}-{version}"
        stored = {**item, "metadata": {"uid": uid, **metadata, "resourceVersion": version}}
        self.objects[key] = stored
        self._tell(change, stored)
        return stored

    def drop(self, kind: Kind, namespace: str, name: str, *, silently: bool = False) -> None:
        gone = self.objects.pop((kind.__name__, namespace, name))
        if not silently:
            self._tell("DELETED", gone)

    def break_watches(self) -> None:
        for watcher in self._watchers:
            watcher.put_nowait(None)

    def _tell(self, change: str, item: Object) -> None:
        for watcher in self._watchers:
            watcher.put_nowait((change, item))

    # what the operator does

    async def _answer(self) -> None:
        await asyncio.sleep(0)
        if self.down:
            raise ClusterError(0, "the API server did not answer")

    async def list(self, kind: Kind, namespace: str, labels: dict[str, str] | None = None) -> tuple[list[Object], str]:
        await self._answer()
        self.lists += 1
        return [item for key, item in self.objects.items() if key[0] == kind.__name__], str(next(self._versions))

    async def watch(
        self, kind: Kind, namespace: str, version: str, labels: dict[str, str] | None = None
    ) -> AsyncIterator[tuple[str, Object]]:
        await self._answer()
        queue: asyncio.Queue[tuple[str, Object] | None] = asyncio.Queue()
        self._watchers.append(queue)
        while (change := await queue.get()) is not None:
            yield change
        raise ClusterError(GONE, "too old resource version")

    async def get(self, kind: Kind, namespace: str, name: str) -> Object | None:
        await self._answer()
        return self.objects.get((kind.__name__, namespace, name))

    async def create(self, kind: Kind, item: Object) -> Object | None:
        await self._answer()
        metadata = item["metadata"]
        if (kind.__name__, metadata["namespace"], metadata["name"]) in self.objects:
            return None
        return self.put(kind, item)

    async def apply(self, kind: Kind, item: Object) -> Object:
        await self._answer()
        metadata = item["metadata"]
        there = self.objects.get((kind.__name__, metadata["namespace"], metadata["name"]))
        if "uid" in metadata and (there is None or there["metadata"]["uid"] != metadata["uid"]):
            raise ClusterError(CONFLICT, "uid mismatch")
        return self.put(kind, merged(there or {}, item))

    async def replace(self, kind: Kind, item: Object) -> Object:
        await self._answer()
        metadata = item["metadata"]
        there = self.objects.get((kind.__name__, metadata["namespace"], metadata["name"]))
        if there is None:
            raise ClusterError(NOT_FOUND, "not found")
        if there["metadata"]["resourceVersion"] != metadata["resourceVersion"]:
            raise ClusterError(CONFLICT, "the object has been modified")
        return self.put(kind, item)

    async def patch_status(self, kind: Kind, namespace: str, name: str, version: str, status: Object) -> Object:
        await self._answer()
        there = self.objects[kind.__name__, namespace, name]
        if there["metadata"]["resourceVersion"] != version:
            raise ClusterError(CONFLICT, "the object has been modified")
        return self.put(kind, {**there, "status": merged(there.get("status") or {}, status)})

    async def delete(self, kind: Kind, namespace: str, name: str, grace: int | None = None) -> None:
        await self._answer()
        if (kind.__name__, namespace, name) in self.objects:
            self.drop(kind, namespace, name)


def merged(before: Object, patch: Object) -> Object:
    """A JSON merge patch."""
    after = {key: value for key, value in before.items() if key not in patch}
    for key, value in patch.items():
        if isinstance(value, dict):
            after[key] = merged(before.get(key) or {}, value)
        elif value is not None:
            after[key] = value
    return after
