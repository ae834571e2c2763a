"""Calls the API server: plain dictionaries in and out, a deadline on every call, `KubeError` for whatever goes wrong.

lightkube reads the configuration and signs the requests in; the requests themselves are written here. lightkube's own
client turns objects into models, reopens watches without a pause, and leaves the errors of a garbled answer to its
caller. Here a call returns an object of the shape that the API server promises, or raises `KubeError`.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Iterator, Mapping
from typing import Any, TypeVar, cast

import httpx2
import msgspec
from lightkube.config.client_adapter import AsyncClient, ConnectionParams
from lightkube.config.kubeconfig import SingleConfig
from lightkube.core.exceptions import ConfigError

from resile.kube import intervals
from resile.kube.config import unusable_config
from resile.kube.errors import CONFLICT, KubeError, garbled, refused, refused_with, unreachable
from resile.kube.kinds import PODS, Kind, Object

T = TypeVar("T")
Selector = Mapping[str, str]
"""Labels or fields, and the values that they must have."""

_MERGE, _JSON, _APPLY = ("application/merge-patch+json", "application/json-patch+json", "application/apply-patch+yaml")
_CANNOT_REACH = (httpx2.HTTPError, httpx2.StreamError, httpx2.InvalidURL, ConfigError, OSError, TimeoutError)
"""`ConfigError` is raised if the token's file is gone, or if the program that should print a token fails."""


class _Request(msgspec.Struct, frozen=True):
    method: str
    path: str
    params: dict[str, str] = {}
    body: Any = None
    content_type: str = "application/json"

    def to(self, client: httpx2.AsyncClient, **options: Any) -> httpx2.Request:
        content = None if self.body is None else msgspec.json.encode(self.body)
        headers = {} if content is None else {"Content-Type": self.content_type}
        return client.build_request(
            self.method, self.path, params=self.params, content=content, headers=headers, **options
        )


class Client:
    """An asynchronous client of one API server. Methods raise `KubeError` if a call fails or there is a conflict."""

    def __init__(self, config: SingleConfig, field_manager: str) -> None:
        """Prepare the connection, which the first call opens. The API server records writes under `field_manager`.

        Raises `NoCluster` if a certificate or a key that the configuration names cannot be used.
        """
        self.namespace = config.namespace
        self.context, self.server = config.context_name, config.cluster.server
        self.field_manager = field_manager
        self._params = {"fieldManager": field_manager}
        try:
            self._http = AsyncClient(config, ConnectionParams(timeout=httpx2.Timeout(intervals.SILENCE)))
        except (ConfigError, OSError, ValueError, AssertionError) as error:
            raise unusable_config(error) from error

    async def close(self) -> None:
        await self._http.aclose()

    async def list(
        self, kind: Kind, namespace: str, *, labels: Selector | None = None, fields: Selector | None = None
    ) -> tuple[list[Object], str]:
        """All objects of a kind, in one answer without paging, and the resourceVersion from which to watch them."""
        answer = await self._call(_Request("GET", kind.path(namespace), _selected(labels, fields)))
        with _sound_answer():
            version = answer["metadata"]["resourceVersion"]
            if not version or not isinstance(version, str):
                raise ValueError("a list without a version")
            return [_sound(item) for item in answer["items"] or ()], version

    async def watch(
        self,
        kind: Kind,
        namespace: str,
        version: str,
        *,
        labels: Selector | None = None,
        fields: Selector | None = None,
    ) -> AsyncGenerator[tuple[str, Object], None]:
        """Yield the changes after `version` as (`ADDED`, `MODIFIED`, `DELETED` or `BOOKMARK`, object).

        The API server ends the watch after `intervals.WATCH`. The object of a bookmark has only a resourceVersion.
        """
        params = {
            **_selected(labels, fields),
            "watch": "true",
            "resourceVersion": version,
            "allowWatchBookmarks": "true",
            "timeoutSeconds": str(int(intervals.WATCH)),
        }
        silence = intervals.WATCH + intervals.WATCH_SLACK
        async for line in self._lines(_Request("GET", kind.path(namespace), params), silence):
            yield _change(line)

    async def get(self, kind: Kind, namespace: str, name: str) -> Object | None:
        try:
            return _sound_object(await self._call(_Request("GET", kind.path(namespace, name))))
        except KubeError as error:
            if error.is_absent:
                return None
            raise

    async def get_same(self, kind: Kind, namespace: str, name: str, uid: str) -> Object | None:
        """The object with this name and uid; None if it does not exist, even if a later object has its name."""
        found = await self.get(kind, namespace, name)
        return found if found is not None and found["metadata"].get("uid") == uid else None

    async def create(self, kind: Kind, item: Object) -> Object | None:
        """Create `item` in the namespace of its metadata; None if an object of its name exists already."""
        path = kind.path(item["metadata"]["namespace"])
        try:
            return _sound_object(await self._call(_Request("POST", path, self._params, _typed(kind, item))))
        except KubeError as error:
            if error.code == CONFLICT and error.reason == "AlreadyExists":
                return None
            raise

    async def replace(self, kind: Kind, item: Object) -> Object:
        """Replace an object by `item`. Raises `KubeError` (`CONFLICT`) if `item` has an old resourceVersion."""
        return _sound_object(await self._call(_Request("PUT", _path(kind, item), self._params, _typed(kind, item))))

    async def apply(self, kind: Kind, item: Object) -> Object:
        """Set the fields of `item`, even if another field manager owns them; keep all others (server-side apply)."""
        params = {**self._params, "force": "true"}
        return _sound_object(await self._call(_Request("PATCH", _path(kind, item), params, _typed(kind, item), _APPLY)))

    async def patch(self, kind: Kind, namespace: str, name: str, patch: Object, subresource: str = "") -> Object:
        """Merge `patch` into an object, or into its `subresource` if given, and return the object.

        Raises `KubeError` (`CONFLICT`) if `patch` names an old resourceVersion.
        """
        path = kind.path(namespace, name, subresource)
        return _sound_object(await self._call(_Request("PATCH", path, self._params, patch, _MERGE)))

    async def patch_status(self, kind: Kind, namespace: str, name: str, version: str, status: Object) -> Object:
        """Merge `status` into an object's status, and return the object.

        Raises `KubeError` (`CONFLICT`) if `version` is not the object's present resourceVersion.
        """
        patch = {"metadata": {"resourceVersion": version}, "status": status}
        return await self.patch(kind, namespace, name, patch, "status")

    async def replace_status(self, kind: Kind, namespace: str, name: str, uid: str, status: Object) -> Object:
        """Replace the status of the object with this uid, whatever its resourceVersion.

        Raises `KubeError` (`INVALID`) if the object of this name has another uid. The request is a JSON patch, because
        the API server ignores a wrong uid in a merge patch of a custom resource's status.
        """
        operations = [
            {"op": "test", "path": "/metadata/uid", "value": uid},
            {"op": "add", "path": "/status", "value": status},
        ]
        path = kind.path(namespace, name, "status")
        return _sound_object(await self._call(_Request("PATCH", path, self._params, operations, _JSON)))

    async def delete(self, kind: Kind, namespace: str, name: str, grace: int | None = None) -> bool:
        """Ask the API server to delete an object, within `grace` seconds if given; False if it does not exist."""
        body = None if grace is None else {"gracePeriodSeconds": grace}
        try:
            await self._call(_Request("DELETE", kind.path(namespace, name), body=body))
        except KubeError as error:
            if error.is_absent:
                return False
            raise
        return True

    async def log(self, namespace: str, pod: str, *, follow: bool = False, **options: object) -> AsyncIterator[str]:
        """Yield the lines that a pod wrote, without line ends; with `follow`, also those to come.

        `options` (such as `container`, `tailLines`, `sinceSeconds`) go to the API server, except those that are None.
        """
        given = {"follow": follow or None, **options}
        params = {key: _written(value) for key, value in given.items() if value is not None}
        request = _Request("GET", PODS.path(namespace, pod, "log"), params)
        async for line in self._lines(request, None if follow else intervals.SILENCE):
            yield line

    async def _call(self, request: _Request) -> Any:
        with _one_kind_of_error():
            async with asyncio.timeout(intervals.CALL):
                response = await self._http.send(request.to(self._http))
        if response.status_code >= httpx2.codes.MULTIPLE_CHOICES:
            raise refused(response.status_code, response.content)
        with _sound_answer():
            return msgspec.json.decode(response.content)

    async def _lines(self, request: _Request, silence: float | None) -> AsyncIterator[str]:
        timeout = httpx2.Timeout(intervals.SILENCE, read=silence)
        with _one_kind_of_error():
            response = await self._http.send(request.to(self._http, timeout=timeout), stream=True)
            try:
                if response.status_code >= httpx2.codes.MULTIPLE_CHOICES:
                    raise refused(response.status_code, await response.aread())
                async for line in response.aiter_lines():
                    yield line
            finally:
                await response.aclose()


class BlockingClient:
    """A `Client` for code without an event loop: it runs on a loop in another thread, and each call blocks."""

    def __init__(self, config: SingleConfig, field_manager: str) -> None:
        self._client = Client(config, field_manager)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="resile-kube", daemon=True)
        self._thread.start()

    def get(self, kind: Kind, namespace: str, name: str) -> Object | None:
        return self._wait_for(self._client.get(kind, namespace, name))

    def patch(self, kind: Kind, namespace: str, name: str, patch: Object) -> Object:
        return self._wait_for(self._client.patch(kind, namespace, name, patch))

    def close(self) -> None:
        if self._loop.is_closed():
            return
        self._wait_for(self._client.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _wait_for(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()


def _path(kind: Kind, item: Object) -> str:
    return kind.path(item["metadata"]["namespace"], item["metadata"]["name"])


def _typed(kind: Kind, item: Object) -> Object:
    return {"apiVersion": kind.api_version, "kind": kind.name, **item}


def _selected(labels: Selector | None, fields: Selector | None) -> dict[str, str]:
    selectors = {"labelSelector": labels, "fieldSelector": fields}
    return {
        param: ",".join(f"{key}={value}" for key, value in chosen.items())
        for param, chosen in selectors.items()
        if chosen
    }


def _written(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _change(line: str) -> tuple[str, Object]:
    with _sound_answer():
        event = msgspec.json.decode(line)
        change, item = event["type"], event["object"]
        if change == "ERROR":
            raise refused_with(item)
        if change == "BOOKMARK":
            return change, {"metadata": {"resourceVersion": item["metadata"]["resourceVersion"]}}
        return str(change), _sound(item)


def _sound_object(item: Any) -> Object:
    with _sound_answer():
        return _sound(item)


def _sound(item: Any) -> Object:
    if not item["metadata"]["name"] or not item["metadata"]["resourceVersion"]:
        raise ValueError("an object without a name or a version")
    return cast(Object, item)


@contextlib.contextmanager
def _sound_answer() -> Iterator[None]:
    try:
        yield
    except (LookupError, TypeError, AttributeError, ValueError) as error:
        raise garbled(f"{type(error).__name__}: {error}") from error


@contextlib.contextmanager
def _one_kind_of_error() -> Iterator[None]:
    try:
        yield
    except _CANNOT_REACH as error:
        raise unreachable(error) from error
    except (LookupError, TypeError, ValueError) as error:  # of a program that should give a token
        raise garbled(f"{type(error).__name__}: {error}") from error
