"""The way to a cluster: what kubectl would use, every call with a deadline, every refusal one sentence.

Lists are followed by watches, so that commands that wait are told; a server that cannot be reached for
`PATIENCE` ends them.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator
from contextlib import aclosing
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar, cast

import httpx2
import msgspec
import yaml
from lightkube import ApiError, AsyncClient
from lightkube.config.kubeconfig import KubeConfig, SingleConfig
from lightkube.core.exceptions import ConfigError
from lightkube.types import PatchType

from resile.api.kinds import elasticjob
from resile.client.errors import CommandError
from resile.client.names import did_you_mean
from resile.client.target import Target, config_files, in_a_pod
from resile.platform.kubernetes import client as kube

Manifest = dict[str, Any]
Kind = kube.Kind
T = TypeVar("T")

EVERY_NAMESPACE = "*"
FIELD_MANAGER = "resile"
PATIENCE = 60.0
"""Seconds without an answer after which a command that waits gives up."""
IDLE_SECONDS = 60.0
"""A watch that says nothing for so long is opened again, in case its connection is dead and nobody told."""
UNAUTHORIZED = 401
INSTALL = "`make deploy`, or `resile manifests | kubectl apply -f -`, installs resile there"


def on(target: Target, work: Callable[[Cluster], Awaitable[T]]) -> T:
    """Do something on the cluster that is meant.

    Raises:
        CommandError: there is none, or it refuses.
    """

    async def whole() -> T:
        cluster = connect(target)
        try:
            return await work(cluster)
        finally:
            await cluster.close()

    return asyncio.run(whole())


def connect(target: Target) -> Cluster:
    """A connection to the cluster that is meant; nothing is asked yet.

    Raises:
        CommandError: nothing says where a cluster is, or what says so cannot be used.
    """
    try:
        config = _config(target)
        client = AsyncClient(
            config=config,
            namespace=target.namespace or config.namespace,
            timeout=httpx2.Timeout(kube.CALL_SECONDS),
            field_manager=FIELD_MANAGER,
        )
    except CommandError:
        raise
    except (ConfigError, OSError, ValueError, KeyError, TypeError, AttributeError, yaml.YAMLError) as error:
        words = " ".join(str(error).split()) or type(error).__name__
        raise CommandError(f"the cluster's configuration cannot be used: {words}") from error
    return Cluster(client, config)


def _config(target: Target) -> SingleConfig:
    paths = config_files(target.kubeconfig)
    there = [path for path in paths if path.is_file()]
    if not there and not target.kubeconfig and in_a_pod():
        return cast(SingleConfig, KubeConfig.from_service_account().get())
    if not there:
        named = ", ".join(map(str, paths))
        raise CommandError(
            f"no cluster is configured: {named} does not exist; set KUBECONFIG or give --kubeconfig, "
            "or use --local for this machine"
        )
    whole = _merged(there)
    if target.context and target.context not in whole.contexts:
        hint = did_you_mean(target.context, sorted(whole.contexts))
        raise CommandError(f"there is no context {target.context!r} in {there[0]}; {hint}")
    return cast(SingleConfig, whole.get(target.context or None))


def _merged(paths: list[Path]) -> KubeConfig:
    """Several files as one, the first that names a thing counts, as for kubectl."""
    whole = _read(paths[0])
    for path in paths[1:]:
        other = _read(path)
        whole.clusters = {**other.clusters, **whole.clusters}
        whole.contexts = {**other.contexts, **whole.contexts}
        whole.users = {**other.users, **whole.users}
        whole.current_context = whole.current_context or other.current_context
    return whole


def _read(path: Path) -> KubeConfig:
    try:
        return KubeConfig.from_file(path)
    except (KeyError, TypeError, AttributeError) as error:  # lightkube reads what is there as if it were well formed
        raise CommandError(f"{path} is no kubeconfig file: its clusters, contexts or users are malformed") from error


class Wanted(msgspec.Struct, frozen=True):
    """Objects to keep an eye on."""

    kind: Kind
    namespace: str
    labels: dict[str, str] | None = None
    fields: dict[str, str] | None = None


class Cluster:
    """One API server, and the namespace that is meant."""

    def __init__(self, client: AsyncClient, config: SingleConfig) -> None:
        self._client = client
        kube.pace_watches(client)
        self.namespace = str(client.namespace)
        self.name = config.context_name
        self.server = config.cluster.server

    async def close(self) -> None:
        """Let go of the connections."""
        await self._client.close()

    async def all(self, wanted: Wanted) -> list[Manifest]:
        """All objects that are wanted.

        Raises:
            CommandError: the cluster refuses, or does not answer.
        """
        with self._asking(wanted.kind):
            return (await self._list(wanted))[0]

    async def get(self, kind: Kind, name: str, namespace: str = "") -> Manifest | None:
        """An object, or None if there is none.

        Raises:
            CommandError: the cluster refuses, or does not answer.
        """
        with self._asking(kind):
            try:
                return cast(Manifest, await self._client.get(kind, name, namespace=namespace or self.namespace))
            except kube.CannotReach as error:
                if kube.code_of(error) == kube.NOT_FOUND and isinstance(error, ApiError):
                    return None
                raise

    async def apply(self, kind: Kind, item: Manifest) -> Manifest:
        """Make the fields of `item` so, whoever set them before; fields that it does not name are left alone.

        Raises:
            CommandError: the cluster refuses, or does not answer.
        """
        metadata = item["metadata"]
        with self._asking(kind, metadata["namespace"]):
            applied = await self._client.patch(
                kind,
                metadata["name"],
                item,
                namespace=metadata["namespace"],
                patch_type=PatchType.APPLY,
                force=True,
            )
            return cast(Manifest, applied)

    async def patch(self, kind: Any, name: str, patch: Manifest) -> Manifest:
        """Merge into an object, or into a subresource of it.

        Raises:
            CommandError: the cluster refuses, or does not answer.
        """
        with self._asking(kind):
            patched = await self._client.patch(kind, name, patch, namespace=self.namespace, patch_type=PatchType.MERGE)
            return cast(Manifest, patched)

    async def delete(self, kind: Kind, name: str, grace: int | None = None) -> None:
        """Ask for an object to be removed; nothing happens if there is none.

        Raises:
            CommandError: the cluster refuses, or does not answer.
        """
        with self._asking(kind):
            try:
                await self._client.delete(kind, name, namespace=self.namespace, grace_period=grace)
            except kube.CannotReach as error:
                if kube.code_of(error) != kube.NOT_FOUND:
                    raise

    async def log(
        self,
        pod: str,
        *,
        container: str | None = None,
        tail: int | None = None,
        since: int | None = None,
        follow: bool = False,
        stamps: bool = False,
    ) -> AsyncIterator[str]:
        """The lines that a pod wrote, without their ends; with `follow`, those to come as well.

        Raises:
            CommandError: the cluster refuses, or does not answer.
        """
        with self._asking(kube.PODS):
            lines = self._client.log(
                pod,
                namespace=self.namespace,
                container=container,
                tail_lines=tail,
                since=since,
                follow=follow,
                timestamps=stamps,
                newlines=False,
            )
            async for line in lines:
                yield line

    def watch(self, *wanted: Wanted) -> Watch:
        """Keep an eye on objects, from entering the result as a context until leaving it."""
        return Watch(self, wanted)

    async def changes(self, wanted: Wanted) -> AsyncIterator[tuple[str, Manifest]]:
        """Everything there is, as (`LISTED`, {"items": [...]}), then every change; lists again after each gap.

        Raises:
            CommandError: the cluster refuses, or did not answer for `PATIENCE`.
        """
        answered, attempt = time.monotonic(), 0
        first = True
        while True:
            try:
                items, version = await self._list(wanted)
                first, attempt = False, 0
                yield "LISTED", {"items": items}
                stream = self._client.watch(
                    wanted.kind,
                    namespace=wanted.namespace,
                    labels=cast(Any, wanted.labels),
                    fields=cast(Any, wanted.fields),
                    resource_version=version,
                )
                async with aclosing(cast(AsyncGenerator[tuple[str, Manifest], None], stream)) as news:
                    while True:
                        answered = time.monotonic()
                        async with asyncio.timeout(IDLE_SECONDS):
                            change = await anext(news)
                        yield change
            except (TimeoutError, StopAsyncIteration):
                continue
            except kube.CannotReach as error:
                lasting = kube.code_of(error) in (UNAUTHORIZED, kube.FORBIDDEN, kube.NOT_FOUND)
                if first or lasting or time.monotonic() - answered > PATIENCE:
                    raise self._refusal(error, wanted.kind) from error
                attempt += 1
                await asyncio.sleep(kube.pause(attempt))

    async def _list(self, wanted: Wanted) -> tuple[list[Manifest], str]:
        found = self._client.list(
            wanted.kind,
            namespace=wanted.namespace,
            labels=cast(Any, wanted.labels),
            fields=cast(Any, wanted.fields),
        )
        return [cast(Manifest, one) async for one in found], found.resourceVersion

    @contextlib.contextmanager
    def _asking(self, kind: Any, namespace: str = "") -> Iterator[None]:
        try:
            yield
        except kube.CannotReach as error:
            raise self._refusal(error, kind, namespace) from error

    def _refusal(self, error: BaseException, kind: Any, namespace: str = "") -> CommandError:
        """What the cluster has against it, in one sentence that says what to do."""
        code, words = kube.code_of(error), " ".join(str(error).split())
        ours = kind in (kube.JOBS, kube.PLANS)
        if not code:
            why = words or type(error).__name__
            return CommandError(f"the API server {self.server} (context {self.name}) cannot be reached: {why}")
        if code == UNAUTHORIZED:
            return CommandError(f"the cluster does not take the credentials of context {self.name}; log in to it again")
        if code == kube.FORBIDDEN:
            return CommandError(f"the cluster forbids it: {words}")
        if code == kube.NOT_FOUND and words.startswith("namespaces "):
            space = namespace or self.namespace
            return CommandError(
                f"there is no namespace {space} on the cluster; `kubectl create namespace {space}` makes it"
            )
        if code == kube.NOT_FOUND and ours and not _names_object(error):
            return CommandError(f"the cluster (context {self.name}) knows no {elasticjob.KIND}; {INSTALL}")
        return CommandError(f"the cluster refuses: {words}")


def _names_object(error: BaseException) -> bool:
    """Whether what was not found is an object, not a kind of objects."""
    details = error.status.details if isinstance(error, ApiError) else None
    return bool(details and details.name)


class Watch:
    """Some objects of a cluster, kept up to date while inside."""

    def __init__(self, cluster: Cluster, wanted: tuple[Wanted, ...]) -> None:
        self._cluster = cluster
        self._wanted = wanted
        self._found: dict[Kind, dict[str, Manifest]] = {}
        self._bell = asyncio.Event()
        self._failed: Exception | None = None
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        self._tasks = [asyncio.create_task(self._keep(one)) for one in self._wanted]
        try:
            while len(self._found) < len(self._wanted):
                await self.change(PATIENCE)
        except BaseException:
            await self._end()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._end()

    def all(self, kind: Kind) -> list[Manifest]:
        """The objects of a kind as they are now, by namespace and name."""
        there = self._found[kind].values()
        return sorted(there, key=lambda one: (one["metadata"]["namespace"], one["metadata"]["name"]))

    def has(self, kind: Kind) -> bool:
        """Whether objects of a kind are watched."""
        return kind in self._found

    async def change(self, seconds: float) -> bool:
        """Wait for news; False if there were none for `seconds`.

        Raises:
            CommandError: the cluster refuses, or did not answer for too long.
        """
        try:
            async with asyncio.timeout(seconds):
                await self._bell.wait()
        except TimeoutError:
            return False
        self._bell.clear()
        if self._failed is not None:
            raise self._failed
        return True

    async def _keep(self, wanted: Wanted) -> None:
        try:
            async for change, thing in self._cluster.changes(wanted):
                if change == "LISTED":
                    self._found[wanted.kind] = {one["metadata"]["uid"]: one for one in thing["items"]}
                elif change == "DELETED":
                    self._found[wanted.kind].pop(thing["metadata"]["uid"], None)
                else:
                    self._found[wanted.kind][thing["metadata"]["uid"]] = thing
                self._bell.set()
        except Exception as error:  # a task that ended in silence would be waited for without end; `change` raises it
            self._failed = error
            self._bell.set()

    async def _end(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
