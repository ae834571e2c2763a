"""List and watch: everything there is of a kind, then every change of it.

A watch goes on from the last version that was passed on, so no change is lost; bookmarks move that version on while
nothing happens. After a version that the API server has forgotten, or an answer that makes no sense, everything is
listed again. Pauses grow, up to a bound, while the API server does not answer, refuses, or ends watches as soon as they
are opened. A copy may be behind the cluster by as long as an event travels, so a writer must name the version that it
saw.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Callable
from typing import NamedTuple

import msgspec

from resile.api.ids import Seconds
from resile.kube import intervals
from resile.kube.client import Client
from resile.kube.errors import FORBIDDEN, GONE, NOT_FOUND, UNAUTHORIZED, Failure, KubeError
from resile.kube.kinds import Kind, Object

log = logging.getLogger("resile.kube")


class Key(NamedTuple):
    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


def key_of(item: Object) -> Key:
    return Key(item["metadata"].get("namespace", ""), item["metadata"]["name"])


class Watched(msgspec.Struct, frozen=True):
    kind: Kind
    namespace: str
    labels: dict[str, str] | None = None
    fields: dict[str, str] | None = None


class Listed(NamedTuple):
    items: list[Object]
    version: str


class Changed(NamedTuple):
    item: Object
    deleted: bool = False


async def list_and_watch(
    client: Client, watched: Watched, *, since: str = "", patience: Seconds | None = None, relist: Seconds | None = None
) -> AsyncGenerator[Listed | Changed, None]:
    """Yield all objects as `Listed`, then each change as `Changed`, without end.

    If changes were missed, yield `Listed` again. If the resourceVersion `since` is given, do not list at first, but
    yield the changes after `since`.

    Without `patience`, failures are logged and the call is repeated. With `patience`, a `KubeError` is raised if the
    first list fails, if access is denied, if the API server does not know the kind, or if it has not answered for
    `patience` seconds.

    If `relist` is given, all objects are listed again when a watch ends and the last list is at least `relist` seconds
    old.
    """
    loop = asyncio.get_running_loop()
    version, failures, answered, listed = since, 0, loop.time() if since else 0.0, loop.time()
    while True:
        opened = None
        try:
            if not version:
                items, version = await client.list(
                    watched.kind, watched.namespace, labels=watched.labels, fields=watched.fields
                )
                answered = listed = loop.time()
                yield Listed(items, version)
            opened = loop.time()
            changes = client.watch(
                watched.kind, watched.namespace, version, labels=watched.labels, fields=watched.fields
            )
            async with contextlib.aclosing(changes):
                async for change, item in changes:
                    answered = loop.time()
                    version = item["metadata"]["resourceVersion"]
                    if change != "BOOKMARK":
                        yield Changed(item, deleted=change == "DELETED")
            answered = loop.time()
            trouble = ""
        except KubeError as error:
            if patience is not None and (
                not answered or error.code in (UNAUTHORIZED, FORBIDDEN, NOT_FOUND) or loop.time() - answered > patience
            ):
                raise
            if error.code == GONE or error.failure is Failure.GARBLED:
                version = ""
            trouble = str(error)
        if relist is not None and loop.time() - listed >= relist:
            version = ""
        if opened is not None and loop.time() - opened >= intervals.WATCH_WELL:
            failures = 0
            continue
        failures += 1
        pause = intervals.BACKOFF.after(failures)
        if trouble and failures > 1:
            log.warning("watching %s: %s; again in %.1f s", watched.kind.plural, trouble, pause)
        await asyncio.sleep(pause)


class Informer:
    """A local copy of the watched objects, which `run` keeps up to date."""

    def __init__(
        self,
        client: Client,
        watched: Watched,
        on_change: Callable[[Object], None],
        *,
        on_list: Callable[[], None] = lambda: None,
        trim: Callable[[Object], Object] = lambda item: item,
        patience: Seconds | None = None,
        relist: Seconds | None = None,
    ) -> None:
        """Prepare; only `run` calls the API server. `patience` and `relist` are passed to `list_and_watch`.

        `on_change` is called with every object that was added, modified or deleted; `on_list` is called after every
        list of all objects. `trim` returns the part of an object to keep in the copy.
        """
        self._news = list_and_watch(client, watched, patience=patience, relist=relist)
        self._on_change = on_change
        self._after_list = on_list
        self._trim = trim
        self._objects: dict[Key, Object] = {}
        self.synced = asyncio.Event()
        """Set when the copy is complete for the first time."""

    def get(self, key: Key) -> Object | None:
        return self._objects.get(key)

    def all(self) -> list[Object]:
        return list(self._objects.values())

    def __len__(self) -> int:
        return len(self._objects)

    async def run(self) -> None:
        """Keep the copy up to date until cancelled. With `patience`, raises `KubeError` as `list_and_watch` does."""
        async with contextlib.aclosing(self._news):
            async for news in self._news:
                match news:
                    case Listed(items=items):
                        self._on_list(items)
                    case Changed(item=item, deleted=True):
                        self._objects.pop(key_of(item), None)
                        self._on_change(item)
                    case Changed(item=item):
                        self._objects[key_of(item)] = self._trim(item)
                        self._on_change(item)

    def _on_list(self, items: list[Object]) -> None:
        found = {key_of(item): self._trim(item) for item in items}
        before, self._objects = self._objects, found
        self.synced.set()
        for key in before.keys() - found.keys():
            self._on_change(before[key])
        for key, item in found.items():
            old = before.get(key)
            if old is None or old["metadata"]["resourceVersion"] != item["metadata"]["resourceVersion"]:
                self._on_change(item)
        self._after_list()
