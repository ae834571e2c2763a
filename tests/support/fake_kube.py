"""An API server in memory, behind the methods of `resile.kube.client`: uids, versions, conflicts, broken watches."""

from __future__ import annotations

import asyncio
import copy
import itertools
from collections.abc import AsyncGenerator, Callable
from typing import Any

from resile.kube.errors import CONFLICT, GONE, INVALID, NOT_FOUND, Failure, KubeError
from resile.kube.kinds import Kind, Object


def refusal(code: int, name: str = "") -> KubeError:
    """An answer of the API server that says no; without a name it is about no object."""
    return KubeError(f"{name}: {code}", code=code, about=name)


def merged(before: Object, patch: Object) -> Object:
    """A JSON merge patch."""
    after = {key: value for key, value in before.items() if key not in patch}
    for key, value in patch.items():
        if isinstance(value, dict):
            after[key] = merged(before.get(key) or {}, value)
        elif value is not None:
            after[key] = value
    return after


class Objects:
    """What the API server keeps, and what a test does to it."""

    def __init__(self) -> None:
        self._versions = itertools.count(1)
        self._watchers: list[tuple[Kind, asyncio.Queue[tuple[str, Object] | None]]] = []
        self.objects: dict[tuple[str, str, str], Object] = {}
        self.before: Callable[[str], object] = lambda verb: None
        """Called with the verb of every call, ahead of it; may raise."""
        self.patches = 0

    def put(self, kind: Kind, item: Object) -> Object:
        """Create or change an object, and tell the watches."""
        metadata = {"namespace": "red", **item["metadata"]}
        key = (kind.name, metadata["namespace"], metadata["name"])
        change = "MODIFIED" if key in self.objects else "ADDED"
        version = str(next(self._versions))
        uid = self.objects[key]["metadata"]["uid"] if key in self.objects else f"{metadata['name']}-{version}"
        self.objects[key] = {**item, "metadata": {"uid": uid, **metadata, "resourceVersion": version}}
        self._tell(kind, change, self.objects[key])
        return copy.deepcopy(self.objects[key])

    def replaced(self, kind: Kind, name: str, /, **content: Any) -> Object:
        """A new object in the place of one of its name, if there is one, with a uid of its own."""
        self.objects.pop((kind.name, "red", name), None)
        metadata = {"name": name, **content.pop("metadata", {})}
        return self.put(kind, {**content, "metadata": metadata})

    def drop(self, kind: Kind, namespace: str, name: str, *, silently: bool = False) -> None:
        gone = self.objects.pop((kind.name, namespace, name))
        if not silently:
            self._tell(kind, "DELETED", gone)

    def break_watches(self) -> None:
        for _, watcher in self._watchers:
            watcher.put_nowait(None)

    def _tell(self, kind: Kind, change: str, item: Object) -> None:
        for watched, watcher in self._watchers:
            if watched == kind:
                watcher.put_nowait((change, item))

    def _there(self, kind: Kind, namespace: str, name: str) -> Object:
        found = self.objects.get((kind.name, namespace, name))
        if found is None:
            raise refusal(NOT_FOUND, name)
        return found

    def _patched(self, kind: Kind, namespace: str, name: str, patch: Object) -> Object:
        self.patches += 1
        there = self._there(kind, namespace, name)
        version = (patch.get("metadata") or {}).get("resourceVersion")
        if version is not None and version != there["metadata"]["resourceVersion"]:
            raise refusal(CONFLICT, name)
        return self.put(kind, merged(there, patch))


class FakeKube(Objects):
    """For the event loop."""

    namespace = "red"
    field_manager = "resile-test"

    def __init__(self) -> None:
        super().__init__()
        self.down = False

    async def _answer(self, verb: str) -> None:
        await asyncio.sleep(0)
        if self.down:
            raise KubeError("the API server cannot be reached", failure=Failure.UNREACHABLE)
        self.before(verb)

    async def list(
        self, kind: Kind, namespace: str, *, labels: object = None, fields: object = None
    ) -> tuple[list[Object], str]:
        await self._answer("list")
        return [item for key, item in self.objects.items() if key[0] == kind.name], str(next(self._versions))

    async def watch(
        self, kind: Kind, namespace: str, version: str, *, labels: object = None, fields: object = None
    ) -> AsyncGenerator[tuple[str, Object], None]:
        await self._answer("watch")
        queue: asyncio.Queue[tuple[str, Object] | None] = asyncio.Queue()
        self._watchers.append((kind, queue))
        while (change := await queue.get()) is not None:
            yield change
        raise KubeError("too old resource version", code=GONE)

    async def get(self, kind: Kind, namespace: str, name: str) -> Object | None:
        await self._answer("get")
        return copy.deepcopy(self.objects.get((kind.name, namespace, name)))

    async def get_same(self, kind: Kind, namespace: str, name: str, uid: str) -> Object | None:
        found = await self.get(kind, namespace, name)
        return found if found is not None and found["metadata"]["uid"] == uid else None

    async def create(self, kind: Kind, item: Object) -> Object | None:
        await self._answer("create")
        metadata = item["metadata"]
        if (kind.name, metadata["namespace"], metadata["name"]) in self.objects:
            return None
        return self.put(kind, item)

    async def apply(self, kind: Kind, item: Object) -> Object:
        await self._answer("apply")
        metadata = item["metadata"]
        there = self.objects.get((kind.name, metadata["namespace"], metadata["name"]))
        if "uid" in metadata and (there is None or there["metadata"]["uid"] != metadata["uid"]):
            raise KubeError("uid mismatch", code=CONFLICT)
        return self.put(kind, merged(there or {}, item))

    async def replace(self, kind: Kind, item: Object) -> Object:
        await self._answer("replace")
        metadata = item["metadata"]
        there = self._there(kind, metadata["namespace"], metadata["name"])
        if there["metadata"]["resourceVersion"] != metadata["resourceVersion"]:
            raise refusal(CONFLICT, metadata["name"])
        return self.put(kind, item)

    async def patch_status(self, kind: Kind, namespace: str, name: str, version: str, status: Object) -> Object:
        await self._answer("patch")
        patch = {"metadata": {"resourceVersion": version}, "status": status}
        return self._patched(kind, namespace, name, patch)

    async def replace_status(self, kind: Kind, namespace: str, name: str, uid: str, status: Object) -> Object:
        await self._answer("patch")
        self.patches += 1
        there = self._there(kind, namespace, name)
        if there["metadata"]["uid"] != uid:
            raise refusal(INVALID, name)
        return self.put(kind, {**there, "status": copy.deepcopy(status)})

    async def delete(self, kind: Kind, namespace: str, name: str, grace: int | None = None) -> bool:
        await self._answer("delete")
        if (kind.name, namespace, name) not in self.objects:
            return False
        self.drop(kind, namespace, name)
        return True


class FakeBlockingKube(Objects):
    """For a thread that may wait."""

    def get(self, kind: Kind, namespace: str, name: str) -> Object | None:
        self.before("get")
        return copy.deepcopy(self.objects.get((kind.name, namespace, name)))

    def patch(self, kind: Kind, namespace: str, name: str, patch: Object) -> Object:
        self.before("patch")
        return self._patched(kind, namespace, name, patch)

    def close(self) -> None:
        pass
