"""The API server as this project speaks to it: plain data in and out, every call with a deadline.

Objects are sent and read as they are, not through typed models: a template may hold fields newer than any model. A
watch never ends: it is opened again at once when the server ends it, from a fresh list when its place is lost or what
came made no sense, and after a pause that grows, up to a bound, while the server does not answer, answers no, or ends
every watch as soon as it is opened. Its place moves on only with what was passed on, so no change is lost.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Any, cast

import httpx2
from lightkube import ApiError, AsyncClient, Client
from lightkube.core.exceptions import ConfigError, NotReadyError
from lightkube.core.resource import ApiInfo, ResourceDef
from lightkube.generic_resource import GenericNamespacedResource, GenericNamespacedStatus

from resile.api.ids import Seconds
from resile.api.kinds import elasticjob, scaleplan
from resile.api.manifests.metadata import GROUP, VERSION

log = logging.getLogger("resile.kubernetes")

Manifest = dict[str, Any]
Kind = type[GenericNamespacedResource]
Selector = dict[str, Any]


def _kind(group: str, version: str, kind: str, plural: str) -> Kind:
    """A kind of object as plain data; lightkube's own registry of kinds is for its typed models."""
    verbs = ["delete", "get", "global_list", "global_watch", "list", "patch", "post", "put", "watch"]
    what = ResourceDef(group, version, kind)
    status = ApiInfo(resource=what, parent=what, plural=plural, verbs=["get", "patch", "put"], action="status")
    own = {
        "_api_info": ApiInfo(resource=what, plural=plural, verbs=verbs),
        "Status": type(f"{kind}Status", (GenericNamespacedStatus,), {"_api_info": status}),
    }
    return cast(Kind, type(kind, (GenericNamespacedResource,), own))


PODS = _kind("", "v1", "Pod", "pods")
SERVICES = _kind("", "v1", "Service", "services")
CONFIG_MAPS = _kind("", "v1", "ConfigMap", "configmaps")
EVENTS = _kind("", "v1", "Event", "events")
JOBS = _kind(GROUP, VERSION, elasticjob.KIND, elasticjob.PLURAL)
PLANS = _kind(GROUP, VERSION, scaleplan.KIND, scaleplan.PLURAL)

CALL_SECONDS = Seconds(10.0)
"""For one call; an API server under load answers in one or two."""
IDLE_SECONDS = Seconds(60.0)
"""A watch that says nothing for so long is opened again, in case its connection is dead and nobody told."""
FIRST_PAUSE, LONGEST_PAUSE = Seconds(0.1), Seconds(5.0)
"""Between attempts to reach a server that does not answer."""
BRIEF_SECONDS = Seconds(1.0)
"""A watch that ends earlier was refused without a word; the next one waits."""

OddAnswer = (KeyError, ValueError, TypeError, AttributeError, NotReadyError)
"""What lightkube raises over an answer that is not the API server's: of a proxy, or of a server that is starting up."""
CannotReach = (httpx2.HTTPError, httpx2.StreamError, ConfigError, *OddAnswer)
"""All that a call may raise: the server does not answer, answers no (`ApiError`), or makes no sense. Only the call
itself belongs in such a `try`: a mistake of our own must not pass for one of the server's."""

NOT_FOUND, CONFLICT, GONE, FORBIDDEN, INVALID, TOO_MANY = 404, 409, 410, 403, 422, 429


def async_client(namespace: str) -> AsyncClient:
    """A client for the event loop: the pod's own ServiceAccount, or what KUBECONFIG names.

    Raises:
        ConfigError: neither is there.
    """
    client = AsyncClient(namespace=namespace, timeout=httpx2.Timeout(CALL_SECONDS), field_manager="resile-master")
    pace_watches(client)
    return client


def pace_watches(client: AsyncClient) -> None:
    """Have pauses made between watches that end as soon as they are opened.

    lightkube itself opens a watch again when the server closes it without an error, at once and without end. It offers
    no say in that, so its HTTP client is asked: before each request that client calls its hooks.
    """
    opened: dict[str, tuple[float, int]] = {}

    async def wait(request: httpx2.Request) -> None:
        if "watch" not in request.url.params:
            return
        which = str(request.url.copy_remove_param("resourceVersion"))
        last, brief = opened.get(which, (-BRIEF_SECONDS, 0))
        brief = brief + 1 if time.monotonic() - last < BRIEF_SECONDS else 0
        if brief:
            await asyncio.sleep(pause(brief))
        opened[which] = time.monotonic(), brief

    http = cast(Any, client)._client._client
    http.event_hooks = {**http.event_hooks, "request": [*http.event_hooks["request"], wait]}


def sync_client(namespace: str) -> Client:
    """The same for a thread that may wait."""
    return Client(namespace=namespace, timeout=httpx2.Timeout(CALL_SECONDS), field_manager="resile-master")


def code_of(error: BaseException) -> int:
    """The HTTP status of an answer, or 0 if there was none."""
    if isinstance(error, ApiError) and error.status.code:
        return int(error.status.code)
    return error.response.status_code if isinstance(error, httpx2.HTTPStatusError) else 0


def absent(error: BaseException) -> bool:
    """Whether this very object is not there.

    A server that is starting up gives the same code for kinds that it does not know yet, but names no object.
    """
    if not isinstance(error, ApiError) or error.status.code != NOT_FOUND:
        return False
    return error.status.details is not None and bool(error.status.details.name)


async def same(client: AsyncClient, kind: Kind, name: str, uid: str) -> Manifest | None:
    """The object of this name, if it is this very one; None if it is gone, though another may have its name by now.

    Raises:
        CannotReach: that cannot be said now.
    """
    try:
        found = cast(Manifest, await client.get(kind, name))
    except ApiError as error:
        if absent(error):
            return None
        raise
    return found if found["metadata"]["uid"] == uid else None


def new_status(uid: str, status: Manifest) -> list[Manifest]:
    """The JSON patch that replaces the status of this very object, and is refused (`INVALID`) by another of its name.

    A merge patch is no guard: of a custom resource's status the server passes over a uid that is not the object's.
    """
    return [
        {"op": "test", "path": "/metadata/uid", "value": uid},
        {"op": "add", "path": "/status", "value": status},
    ]


def sentence(error: BaseException) -> str:
    """What went wrong, in one line."""
    if code_of(error):
        return " ".join(str(error).split())
    if isinstance(error, OddAnswer):
        return f"the API server's answer makes no sense ({type(error).__name__}: {' '.join(str(error).split())})"
    return f"the API server cannot be reached ({type(error).__name__}{f': {error}' if str(error) else ''})"


def pause(attempt: int) -> float:
    """How long to wait before attempt number `attempt`, from 1."""
    return min(LONGEST_PAUSE, FIRST_PAUSE * 2.0 ** (attempt - 1))


async def list_all(
    client: AsyncClient, kind: Kind, *, labels: Selector | None = None, fields: Selector | None = None
) -> tuple[list[Manifest], str]:
    """Every object of a kind in the client's namespace, and the version of that list.

    Raises:
        CannotReach: it could not be had.
    """
    found = client.list(kind, namespace=client.namespace, labels=labels, fields=fields)
    return [cast(Manifest, one) async for one in found], found.resourceVersion


async def follow(
    client: AsyncClient,
    kind: Kind,
    version: str,
    *,
    labels: Selector | None = None,
    fields: Selector | None = None,
) -> AsyncIterator[tuple[str, Manifest]]:
    """Every change after `version`, for ever, as (`ADDED`, `MODIFIED` or `DELETED`, object).

    Where changes were missed, the whole list comes as one (`LISTED`, {"items": [...], "version": "..."}).
    """
    failures = 0
    while True:
        try:
            stream = client.watch(
                kind, namespace=client.namespace, labels=labels, fields=fields, resource_version=version
            )
            async with aclosing(cast(AsyncGenerator[tuple[str, Manifest], None], stream)) as changes:
                while True:
                    async with asyncio.timeout(IDLE_SECONDS):
                        change, thing = await anext(changes)
                    version = thing["metadata"]["resourceVersion"]
                    failures = 0
                    yield change, thing
        except TimeoutError:
            failures = 0  # it was well, and nothing happened
            continue
        except CannotReach as error:
            failures += 1
            if failures > 1:
                log.warning("the watch of %s ended: %s", kind.__name__, sentence(error))
                await asyncio.sleep(pause(failures))
            if code_of(error) != GONE and not isinstance(error, OddAnswer):
                continue
        listed = await _try_list(client, kind, labels, fields)
        if listed is not None:
            items, version = listed
            yield "LISTED", {"items": items, "version": version}


async def _try_list(
    client: AsyncClient, kind: Kind, labels: Selector | None, fields: Selector | None
) -> tuple[list[Manifest], str] | None:
    try:
        return await list_all(client, kind, labels=labels, fields=fields)
    except CannotReach as error:
        log.warning("%s cannot be listed: %s", kind.__name__, sentence(error))
        return None
