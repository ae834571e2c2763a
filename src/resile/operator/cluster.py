"""The API server as the operator needs it: plain dictionaries in and out, one kind of error, a deadline on everything.

The only module that knows lightkube. Objects are not turned into lightkube's models: custom resources have none, and
decoding a thousand pods into them costs memory that a cache does not have.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterator
from typing import Any, cast

import httpx2
from lightkube import ApiError, AsyncClient
from lightkube.config.kubeconfig import KubeConfig
from lightkube.core.exceptions import ConfigError, NotReadyError
from lightkube.core.resource import ApiInfo, ResourceDef
from lightkube.generic_resource import GenericNamespacedResource, GenericNamespacedStatus
from lightkube.types import PatchType

from resile.api.kinds import elasticjob, scaleplan
from resile.api.manifests.metadata import GROUP, VERSION
from resile.operator import settings
from resile.platform.kubernetes.client import pace_watches

Object = dict[str, Any]
Kind = type[GenericNamespacedResource]

ALL_NAMESPACES = "*"
NOT_FOUND, CONFLICT, GONE = 404, 409, 410
_ODD_ANSWER = (KeyError, ValueError, TypeError, AttributeError, NotReadyError)
"""What lightkube raises over an answer that is not the API server's: of a proxy, or of a server that is starting up."""
REFUSED = (400, 403, 422)
"""The API server understood and will answer the same until somebody changes something."""


class ClusterError(Exception):
    """A request failed; `code` is the HTTP status, or 0 if there was no answer."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


class NoCluster(Exception):
    """There is no usable configuration of a cluster."""


def _kind(group: str, version: str, kind: str, plural: str) -> Kind:
    verbs = ["delete", "get", "global_list", "global_watch", "list", "patch", "post", "put", "watch"]
    definition = ResourceDef(group, version, kind)
    own = ApiInfo(resource=definition, plural=plural, verbs=verbs)
    status = ApiInfo(
        resource=definition, parent=definition, plural=plural, verbs=["get", "patch", "put"], action="status"
    )
    status_type = type(f"{kind}Status", (GenericNamespacedStatus,), {"_api_info": status})
    return cast(Kind, type(kind, (GenericNamespacedResource,), {"_api_info": own, "Status": status_type}))


POD = _kind("", "v1", "Pod", "pods")
SERVICE = _kind("", "v1", "Service", "services")
SERVICE_ACCOUNT = _kind("", "v1", "ServiceAccount", "serviceaccounts")
SECRET = _kind("", "v1", "Secret", "secrets")
CONFIG_MAP = _kind("", "v1", "ConfigMap", "configmaps")
EVENT = _kind("", "v1", "Event", "events")
ROLE = _kind("rbac.authorization.k8s.io", "v1", "Role", "roles")
ROLE_BINDING = _kind("rbac.authorization.k8s.io", "v1", "RoleBinding", "rolebindings")
LEASE = _kind("coordination.k8s.io", "v1", "Lease", "leases")
ELASTIC_JOB = _kind(GROUP, VERSION, elasticjob.KIND, elasticjob.PLURAL)
SCALE_PLAN = _kind(GROUP, VERSION, scaleplan.KIND, scaleplan.PLURAL)


class Cluster:
    """A connection to one API server. Every method but `watch` answers within `settings.REQUEST` or raises."""

    def __init__(self, client: AsyncClient) -> None:
        self._client = client

    @classmethod
    def connect(cls) -> Cluster:
        """The cluster of this pod, else that of KUBECONFIG or ~/.kube/config.

        Raises:
            NoCluster: when there is none of them, or it cannot be read.
        """
        try:
            config = KubeConfig.from_env().get()
            timeout = httpx2.Timeout(settings.REQUEST)
            client = AsyncClient(config=config, timeout=timeout, field_manager=settings.FIELD_MANAGER)
        except (ConfigError, OSError, ValueError, AssertionError) as error:
            raise NoCluster(str(error) or "the cluster's configuration cannot be read") from error
        pace_watches(client)
        return cls(client)

    @property
    def namespace(self) -> str:
        """The namespace that the configuration names."""
        return str(self._client.namespace or "default")

    async def list(self, kind: Kind, namespace: str, labels: dict[str, str] | None = None) -> tuple[list[Object], str]:
        """All objects of a kind, and the version from which to watch."""
        with _one_kind_of_error():
            # In one piece: a list continued in chunks may expire in between.
            found = self._client.list(kind, namespace=namespace, labels=cast(Any, labels))
            objects = [_sound(item) async for item in found]
            return objects, found.resourceVersion

    async def watch(
        self, kind: Kind, namespace: str, version: str, labels: dict[str, str] | None = None
    ) -> AsyncIterator[tuple[str, Object]]:
        """Changes since `version`, as they come. Raises when the version is too old or the connection is lost."""
        with _one_kind_of_error():
            changes = self._client.watch(
                kind,
                namespace=namespace,
                labels=cast(Any, labels),
                resource_version=version,
                server_timeout=int(settings.WATCH),
            )
            async for change, item in changes:
                yield change, _sound(item)

    async def get(self, kind: Kind, namespace: str, name: str) -> Object | None:
        """An object, or None if there is none."""
        with _one_kind_of_error():
            try:
                return cast(Object, await self._client.get(kind, name, namespace=namespace))
            except ApiError as error:
                if _absent(error):
                    return None
                raise

    async def create(self, kind: Kind, item: Object) -> Object | None:
        """Make an object; None if one of this name exists."""
        with _one_kind_of_error():
            try:
                return cast(Object, await self._client.create(_as(kind, item)))
            except ApiError as error:
                if error.status.code == CONFLICT and error.status.reason == "AlreadyExists":
                    return None
                raise

    async def replace(self, kind: Kind, item: Object) -> Object:
        """Write a whole object; refused with a conflict unless its version is the present one."""
        with _one_kind_of_error():
            return cast(Object, await self._client.replace(_as(kind, item)))

    async def apply(self, kind: Kind, item: Object) -> Object:
        """Server-side apply: the fields of `item` are made so; those of others are left alone."""
        with _one_kind_of_error():
            name, namespace = item["metadata"]["name"], item["metadata"]["namespace"]
            applied = await self._client.patch(
                kind, name, item, namespace=namespace, patch_type=PatchType.APPLY, force=True
            )
            return cast(Object, applied)

    async def patch_status(self, kind: Kind, namespace: str, name: str, version: str, status: Object) -> Object:
        """Merge into the status; refused with a conflict unless `version` is the present one."""
        patch = {"metadata": {"resourceVersion": version}, "status": status}
        with _one_kind_of_error():
            written = await self._client.patch(
                kind.Status, name, patch, namespace=namespace, patch_type=PatchType.MERGE
            )
            return cast(Object, written)

    async def delete(self, kind: Kind, namespace: str, name: str, grace: int | None = None) -> None:
        """Remove an object; nothing happens if there is none."""
        with _one_kind_of_error():
            try:
                await self._client.delete(kind, name, namespace=namespace, grace_period=grace)
            except ApiError as error:
                if not _absent(error):
                    raise

    async def close(self) -> None:
        """Let go of the connections."""
        await self._client.close()


def _as(kind: Kind, item: Object) -> Any:
    """As lightkube takes it; the namespace is the one in its metadata."""
    return cast(Any, kind)(item)


def _sound(item: Any) -> Object:
    """An object of a list or a watch; raises one of `_ODD_ANSWER` if it is none."""
    if not item["metadata"]["name"] or not item["metadata"]["resourceVersion"]:
        raise ValueError("an object without a name or a version")
    return cast(Object, item)


def _absent(error: ApiError) -> bool:
    """Whether this very object is not there; of kinds that a starting server does not know yet, it names no object."""
    details = error.status.details
    return error.status.code == NOT_FOUND and details is not None and bool(details.name)


@contextlib.contextmanager
def _one_kind_of_error() -> Iterator[None]:
    try:
        yield
    except ApiError as error:
        raise ClusterError(error.status.code or 0, error.status.message or str(error)) from error
    except httpx2.HTTPStatusError as error:
        raise ClusterError(error.response.status_code, str(error)) from error
    except (httpx2.HTTPError, httpx2.StreamError) as error:
        raise ClusterError(0, f"the API server did not answer: {str(error) or type(error).__name__}") from error
    except _ODD_ANSWER as error:
        said = " ".join(str(error).split())
        raise ClusterError(0, f"the API server's answer makes no sense: {type(error).__name__}: {said}") from error
