"""An API server in memory, as far as a master needs one: uids, versions, conflicts, and both kinds of patches."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import httpx2
from lightkube import ApiError
from lightkube.types import PatchType

from resile.platform.kubernetes import client as kube

Object = dict[str, Any]


def refusal(code: int, name: str) -> ApiError:
    """What the client raises when the server says no."""
    status = {"code": code, "message": f"{name}: {code}", "details": {"name": name}}
    return ApiError(response=httpx2.Response(code, json=status, request=httpx2.Request("GET", "http://fake")))


class FakeApi:
    """Objects by kind and name, for the calls that both clients of lightkube have; `before` runs ahead of each."""

    namespace = "red"

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self.objects: dict[tuple[str, str], Object] = {}
        self.before: Callable[[str], object] = lambda verb: None
        self.patches = 0

    def put(self, kind_: kube.Kind, name: str, **content: Any) -> Object:
        """Make an object, in the place of one of its name, with a uid of its own."""
        number = next(self._numbers)
        metadata = {"name": name, "uid": f"uid-{number}", "resourceVersion": str(number)}
        metadata |= content.pop("metadata", {})
        self.objects[kind_.__name__, name] = {"metadata": metadata, **content}
        return copy.deepcopy(self.objects[kind_.__name__, name])

    def drop(self, kind: kube.Kind, name: str) -> None:
        del self.objects[kind.__name__, name]

    def get(self, kind: Any, name: str, *, namespace: str | None = None) -> Object:
        self.before("get")
        found = self.objects.get((kind.__name__, name))
        if found is None:
            raise refusal(kube.NOT_FOUND, name)
        return copy.deepcopy(found)

    def patch(self, kind: Any, name: str, patch: Any, *, patch_type: PatchType, namespace: str) -> Object:
        self.before("patch")
        self.patches += 1
        there = self.objects.get((kind.__name__.removesuffix("Status"), name))
        if there is None:
            raise refusal(kube.NOT_FOUND, name)
        if patch_type is PatchType.JSON:
            self._change(there, patch)
        else:
            self._merge(there, patch)
        there["metadata"]["resourceVersion"] = str(next(self._numbers))
        return copy.deepcopy(there)

    def _merge(self, there: Object, patch: Object) -> None:
        metadata = patch.pop("metadata", {})  # of which, as on a real server, only the version counts
        if (
            metadata.get("resourceVersion", there["metadata"]["resourceVersion"])
            != there["metadata"]["resourceVersion"]
        ):
            raise refusal(kube.CONFLICT, there["metadata"]["name"])
        _merge_into(there, patch)

    def _change(self, there: Object, operations: list[Object]) -> None:
        for operation in operations:
            *way, last = operation["path"].strip("/").split("/")
            inner = there
            for step in way:
                inner = inner[step]
            if operation["op"] == "test" and inner.get(last) != operation["value"]:
                raise refusal(kube.INVALID, there["metadata"]["name"])
            if operation["op"] == "add":
                inner[last] = copy.deepcopy(operation["value"])


def _merge_into(there: Object, patch: Object) -> None:
    for key, value in patch.items():
        if value is None:
            there.pop(key, None)
        elif isinstance(value, dict):
            _merge_into(there.setdefault(key, {}), value)
        else:
            there[key] = value


class FakeAsyncApi(FakeApi):
    """The same for the event loop."""

    async def get(self, *words: Any, **options: Any) -> Object:  # type: ignore[override]
        return super().get(*words, **options)

    async def patch(self, *words: Any, **options: Any) -> Object:  # type: ignore[override]
        return super().patch(*words, **options)
