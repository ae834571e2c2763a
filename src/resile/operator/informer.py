"""A copy of all objects of one kind, kept up to date by a list and a watch from that list's version on.

It may be behind the cluster by as long as an event travels, so whoever acts on it must name the version it saw. On
any error everything is listed anew, and every object that differs is told of: nothing is missed, whatever broke.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable

from resile.api.ids import Seconds
from resile.operator import settings
from resile.operator.cluster import Cluster, ClusterError, Kind, Object
from resile.operator.workqueue import Key, backoff

log = logging.getLogger("resile.operator")


class Informer:
    """The copy of one kind in one namespace or all of them."""

    def __init__(
        self,
        cluster: Cluster,
        kind: Kind,
        namespace: str,
        changed: Callable[[Object], None],
        *,
        labels: dict[str, str] | None = None,
        keep: Callable[[Object], Object] = lambda item: item,
    ) -> None:
        """`changed` is called with every object that came, changed or went; `keep` drops what nobody reads."""
        self._cluster = cluster
        self._kind = kind
        self._namespace = namespace
        self._labels = labels
        self._changed = changed
        self._keep = keep
        self._objects: dict[Key, Object] = {}
        self.synced = asyncio.Event()
        """Set while the copy is complete: from the first list on."""
        self.relists = 0

    def get(self, key: Key) -> Object | None:
        """The object as last seen, or None."""
        return self._objects.get(key)

    def all(self) -> list[Object]:
        """Every object."""
        return list(self._objects.values())

    async def run(self) -> None:
        """Follow the cluster until cancelled."""
        loop = asyncio.get_running_loop()
        failures = 0
        while True:
            listed = None
            try:
                version = await self._list()
                listed = loop.time()
                await self._follow(version)
                trouble = ""
            except ClusterError as error:
                trouble = str(error)
            self.relists += 1
            if listed is not None and loop.time() - listed >= settings.WATCH_WELL:
                failures = 0
                continue  # a watch that lived: whatever ended it, the next list is due at once
            pause = backoff(failures, settings.RELIST_FIRST, settings.RELIST_LONGEST)
            failures += 1
            if trouble:
                log.warning("watching %s: %s; again in %.1f s", self._kind.__name__, trouble, pause)
            await asyncio.sleep(pause)

    async def _list(self) -> str:
        objects, version = await self._cluster.list(self._kind, self._namespace, self._labels)
        found = {key_of(item): self._keep(item) for item in objects}
        before, self._objects = self._objects, found
        first = not self.synced.is_set()
        self.synced.set()
        for key in before.keys() - found.keys():
            self._changed(before[key])
        for key, item in found.items():
            if first or _version(before.get(key)) != _version(item):
                self._changed(item)
        return version

    async def _follow(self, version: str) -> None:
        """Take in changes until the watch's time is over."""
        end = asyncio.get_running_loop().time() + settings.WATCH
        changes = self._cluster.watch(self._kind, self._namespace, version, self._labels)
        try:
            while asyncio.get_running_loop().time() < end:
                async with asyncio.timeout(settings.WATCH + settings.WATCH_SLACK):
                    change, item = await _next(changes)
                self._take(change, item)
        except (TimeoutError, StopAsyncIteration):
            return
        finally:
            await changes.aclose()  # type: ignore[attr-defined]  # it is a generator

    def _take(self, change: str, item: Object) -> None:
        key = key_of(item)
        if change == "DELETED":
            self._objects.pop(key, None)
        elif change in ("ADDED", "MODIFIED"):
            self._objects[key] = self._keep(item)
        else:
            return
        self._changed(item)


async def _next(changes: AsyncIterator[tuple[str, Object]]) -> tuple[str, Object]:
    return await anext(changes)


def key_of(item: Object) -> Key:
    """An object's key."""
    return Key(item["metadata"].get("namespace", ""), item["metadata"]["name"])


async def synced(mirrors: list[Informer], deadline: Seconds) -> bool:
    """Whether all are complete before the deadline."""
    try:
        async with asyncio.timeout(deadline):
            for mirror in mirrors:
                await mirror.synced.wait()
    except TimeoutError:
        return False
    return True


def _version(item: Object | None) -> str:
    return "" if item is None else str(item["metadata"].get("resourceVersion", ""))
