"""The connection to a cluster, which is the one that kubectl would use. Every refusal becomes one sentence.

Commands that wait for changes use informers; they fail when the API server cannot be reached for `PATIENCE`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Self

from resile.api.ids import Seconds
from resile.api.kinds import registry
from resile.client.cluster.streams import end
from resile.client.errors import CommandError
from resile.client.pod_names import did_you_mean
from resile.client.target import Target
from resile.kube.client import Client
from resile.kube.config import NoCluster, NoSuchContext, config_files, from_files, from_pod, in_a_pod
from resile.kube.errors import FORBIDDEN, NOT_FOUND, UNAUTHORIZED, KubeError
from resile.kube.informer import Informer, Watched, key_of
from resile.kube.kinds import PODS, Kind, Object, of

FIELD_MANAGER = "resile"
PATIENCE = Seconds(60.0)
"""A command that waits fails when the API server has not answered for this long."""
INSTALL = "`make deploy`, or `resile manifests | kubectl apply -f -`, installs resile there"


class KindNotInstalled(CommandError):
    """Raised if the cluster has no CustomResourceDefinition of the requested kind."""


def connect(target: Target) -> Cluster:
    """Open a connection to the cluster that a user named; sends no request yet."""
    files = config_files(target.kubeconfig)
    configured = any(path.is_file() for path in files)
    if not configured and (target.kubeconfig or not in_a_pod()):
        raise CommandError(
            f"no cluster is configured: {', '.join(map(str, files))} does not exist; set KUBECONFIG or give "
            "--kubeconfig, or use --local for this machine"
        )
    try:
        config = from_files(files, target.context) if configured else from_pod()
        return Cluster(Client(config, FIELD_MANAGER), target.namespace or config.namespace)
    except NoSuchContext as error:
        raise CommandError(f"{error}; {did_you_mean(target.context, error.known)}") from error
    except NoCluster as error:
        raise CommandError(str(error)) from error


class Cluster:
    """One API server and the namespace of a command. Methods raise `CommandError` if the cluster refuses."""

    def __init__(self, client: Client, namespace: str) -> None:
        self._client = client
        self.namespace = namespace
        self.name, self.server = client.context, client.server

    async def close(self) -> None:
        await self._client.close()

    async def all(self, wanted: Watched) -> list[Object]:
        with self._one_sentence(wanted.kind):
            items, _ = await self._client.list(
                wanted.kind, wanted.namespace, labels=wanted.labels, fields=wanted.fields
            )
            return items

    async def get(self, kind: Kind, name: str, namespace: str = "") -> Object | None:
        """The object with this name, in the command's namespace unless `namespace` is given; None if there is none."""
        with self._one_sentence(kind):
            return await self._client.get(kind, namespace or self.namespace, name)

    async def apply(self, kind: Kind, item: Object) -> Object:
        """Set the fields of `item` by server-side apply, even if another program owns them. Other fields stay."""
        with self._one_sentence(kind, item["metadata"]["namespace"]):
            return await self._client.apply(kind, item)

    async def patch(self, kind: Kind, name: str, patch: Object, subresource: str = "") -> Object:
        with self._one_sentence(kind):
            return await self._client.patch(kind, self.namespace, name, patch, subresource)

    async def delete(self, kind: Kind, name: str, grace: int | None = None) -> None:
        """Delete an object if it exists. `grace` is in seconds; None means the object's own grace period."""
        with self._one_sentence(kind):
            await self._client.delete(kind, self.namespace, name, grace)

    async def log(
        self,
        pod: str,
        *,
        container: str | None = None,
        tail: int | None = None,
        since: int | None = None,
        follow: bool = False,
    ) -> AsyncIterator[str]:
        """Yield the lines that a container has written, without line ends.

        `container` may be None if the pod has only one container. With `tail`, begins with the last `tail` lines; with
        `since`, with the lines of the last `since` seconds; otherwise with the first line. With `follow`, each line
        begins with the time at which it was written, and later lines are yielded, too, until the container ends.
        """
        lines = self._client.log(
            self.namespace,
            pod,
            follow=follow,
            container=container,
            tailLines=tail,
            sinceSeconds=since,
            timestamps=follow or None,
        )
        with self._one_sentence(PODS):
            async for line in lines:
                yield line

    def watch(self, *wanted: Watched) -> contextlib.AbstractAsyncContextManager[Watch]:
        """Watch objects; enter the result as a context to begin, leave it to end."""
        return Watch(self._client, self.refusal, wanted).running()

    @contextlib.contextmanager
    def _one_sentence(self, kind: Kind, namespace: str = "") -> Iterator[None]:
        try:
            yield
        except KubeError as error:
            raise self.refusal(error, kind, namespace) from error

    def refusal(self, error: KubeError, kind: Kind, namespace: str = "") -> CommandError:
        """The error to raise if the cluster refused a request. Its text is one sentence for the user."""
        words = str(error)
        if not error.code:
            return CommandError(f"the API server {self.server} (context {self.name}) cannot be reached: {error.detail}")
        if error.code == UNAUTHORIZED:
            return CommandError(f"the cluster does not take the credentials of context {self.name}; log in to it again")
        if error.code == FORBIDDEN:
            return CommandError(f"the cluster forbids it: {words}")
        if error.code == NOT_FOUND and words.startswith("namespaces "):
            missing = namespace or self.namespace
            return CommandError(
                f"there is no namespace {missing} on the cluster; `kubectl create namespace {missing}` makes it"
            )
        if error.code == NOT_FOUND and kind in map(of, registry.kinds()) and not error.about:
            return KindNotInstalled(f"the cluster (context {self.name}) knows no {kind.name}; {INSTALL}")
        return CommandError(f"the cluster refuses: {words}")


class Watch:
    """Copies of the watched objects, kept up to date while the context of `running` lasts."""

    def __init__(
        self, client: Client, refusal: Callable[[KubeError, Kind], Exception], wanted: tuple[Watched, ...]
    ) -> None:
        self._refusal = refusal
        self._changed = asyncio.Event()
        self._failure: Exception | None = None
        self._informers = {
            one.kind: Informer(client, one, lambda _: self._changed.set(), on_list=self._changed.set, patience=PATIENCE)
            for one in wanted
        }

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[Self]:
        """Keep the copies up to date. All objects have been listed when the context begins."""
        tasks = [asyncio.create_task(self._run(kind, one)) for kind, one in self._informers.items()]
        try:
            for informer in self._informers.values():
                while not informer.synced.is_set():
                    await self.change(PATIENCE)
            yield self
        finally:
            await end(*tasks)

    def all(self, kind: Kind) -> list[Object]:
        """The objects of a kind as they are now, sorted by namespace and name; none if the kind is not watched."""
        return sorted(self._informers[kind].all(), key=key_of) if kind in self._informers else []

    async def change(self, seconds: float) -> bool:
        """Wait for a change; False if none came for `seconds`. Raises `CommandError` if the watch has failed."""
        try:
            async with asyncio.timeout(seconds):
                await self._changed.wait()
        except TimeoutError:
            return False
        self._changed.clear()
        if self._failure is not None:
            raise self._failure
        return True

    async def _run(self, kind: Kind, informer: Informer) -> None:
        try:
            await informer.run()
        except KubeError as error:
            self._failure = self._refusal(error, kind)
        except Exception as error:  # a task that ended in silence would be waited for without end; `change` raises it
            self._failure = error
        self._changed.set()
