"""List and watch: everything there is of a kind, then every change of it.

A watch goes on from the last version that was passed on, so no change is lost; bookmarks move that version on where
nothing happens. After a version that the API server has forgotten, or an answer that makes no sense, everything is
listed again. Pauses grow, up to a bound, while the API server does not answer, refuses, or ends watches as soon as they
are opened. What is seen may be behind the cluster by as long as an event travels: a writer must name the version that
it saw.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import NamedTuple, cast

import msgspec

from resile.api.ids import Seconds
from resile.kube import intervals
from resile.kube.client import Client
from resile.kube.errors import FORBIDDEN, GONE, NOT_FOUND, UNAUTHORIZED, Failure, KubeError
from resile.kube.kinds import Kind, Object

log = logging.getLogger("resile.kube")

DELETED = "DELETED"


class Key(NamedTuple):
    """One object of a kind: two of the same name in two namespaces are two."""

    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


def key_of(item: Object) -> Key:
    """An object's key."""
    return Key(item["metadata"].get("namespace", ""), item["metadata"]["name"])


class Watched(msgspec.Struct, frozen=True):
    """Which objects to list and watch."""

    kind: Kind
    namespace: str
    labels: dict[str, str] | None = None
    fields: dict[str, str] | None = None


class Listed(NamedTuple):
    """Everything there is at a version."""

    items: list[Object]
    version: str


class Changed(NamedTuple):
    """One object that was added, modified or deleted."""

    item: Object
    deleted: bool = False


async def list_and_watch(
    client: Client, watched: Watched, *, since: str = "", patience: Seconds | None = None, relist: Seconds | None = None
) -> AsyncIterator[Listed | Changed]:
    """Everything there is, then every change, without end; `Listed` again wherever changes may have been missed.

    Args:
        client: speaks to the API server.
        watched: which objects.
        since: a version from which to watch, without the first list.
        patience: for a caller that gives up: a first list that fails, a refusal that will last, and silence for this
            long are raised. Without it every failure is logged, and tried again.
        relist: list again, instead of going on, when a watch ends after this long.

    Raises:
        KubeError: with `patience` alone.
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
            async with contextlib.aclosing(cast(AsyncGenerator[tuple[str, Object], None], changes)):
                async for change, item in changes:
                    answered = loop.time()
                    version = item["metadata"]["resourceVersion"]
                    if change != "BOOKMARK":
                        yield Changed(item, deleted=change == DELETED)
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
    """A copy of the watched objects, kept up to date while `run` runs."""

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
        """Nothing is asked before `run`.

        Args:
            client: speaks to the API server.
            watched: which objects.
            on_change: called with every object that was added, modified or deleted.
            on_list: called after every list, whatever was in it.
            trim: cuts an object down to what is kept of it.
            patience: as of `list_and_watch`.
            relist: as of `list_and_watch`.
        """
        self._news = list_and_watch(client, watched, patience=patience, relist=relist)
        self._on_change = on_change
        self._after_list = on_list
        self._trim = trim
        self._objects: dict[Key, Object] = {}
        self.synced = asyncio.Event()
        """Set from the first list on."""

    def get(self, key: Key) -> Object | None:
        """The object as last seen, or None."""
        return self._objects.get(key)

    def all(self) -> list[Object]:
        """Every object."""
        return list(self._objects.values())

    def __len__(self) -> int:
        return len(self._objects)

    async def run(self) -> None:
        """Follow the cluster until cancelled.

        Raises:
            KubeError: with `patience` alone.
        """
        async with contextlib.aclosing(cast(AsyncGenerator[Listed | Changed, None], self._news)):
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
            if _version(before.get(key)) != _version(item):
                self._on_change(item)
        self._after_list()


def _version(item: Object | None) -> str:
    return "" if item is None else str(item["metadata"].get("resourceVersion", ""))
