"""The objects that a master needs besides its pod: account, Role, Service, Secrets and the ConfigMap of its journal.

The job owns all of them, so Kubernetes removes them with the job. They have the master's name, except the two Secrets:
one that every node mounts, with the token and the certificate to trust, and one with the key of that certificate, which
only the master mounts.
"""

from __future__ import annotations

import base64
import secrets
from typing import Any

from resile.api.defaults import MASTER_PORT
from resile.api.job import JobSpec
from resile.api.kinds import registry
from resile.api.kinds.base import JobKind
from resile.api.kinds.rbac import master_rules
from resile.common.certificates import Pair, self_signed
from resile.kube.kinds import ROLES, SERVICE_ACCOUNTS, SERVICES, Kind, Object, of
from resile.kube.owner_references import owner_reference
from resile.operator.jobs.master_pod import TLS_CERTIFICATE, TLS_KEY, TOKEN
from resile.platform.kubernetes.pods import TRUSTED

_RBAC = "rbac.authorization.k8s.io"
TOKEN_BYTES = 32
RESTORES = "resile.restores"
"""Annotation of a Secret that was deleted and made again with the same content: the uid of the first one."""


def owner(job: JobSpec) -> Object:
    return owner_reference(of(registry.job_kind(job.kind)), job.name, job.uid)


def applied(job: JobSpec) -> list[tuple[Kind, Object]]:
    """The objects whose content follows from the job alone, so that they can be applied again and again."""
    kind = registry.job_kind(job.kind)
    name = kind.master_name(job.name)
    return [
        (SERVICE_ACCOUNTS, {**_object(job, "v1", "ServiceAccount", name), "automountServiceAccountToken": False}),
        (ROLES, {**_object(job, f"{_RBAC}/v1", "Role", name), "rules": master_rules(kind, job.name)}),
        (SERVICES, service(job)),
    ]


def binding(job: JobSpec) -> Object:
    """The RoleBinding of the master. Make its Role first: Kubernetes checks that the operator has the Role's rights."""
    kind = registry.job_kind(job.kind)
    name = kind.master_name(job.name)
    return {
        **_object(job, f"{_RBAC}/v1", "RoleBinding", name),
        "roleRef": {"apiGroup": _RBAC, "kind": "Role", "name": name},
        "subjects": [{"kind": "ServiceAccount", "name": name, "namespace": job.namespace}],
    }


def key_pair(job: JobSpec) -> Object:
    """A Secret with a new key and certificate, which only the master mounts. An existing one is never overwritten."""
    kind = registry.job_kind(job.kind)
    pair = new_pair(kind, job.name, job.namespace)
    data = {TLS_CERTIFICATE: _encoded(pair.certificate), TLS_KEY: _encoded(pair.key)}
    secret = _object(job, "v1", "Secret", kind.tls_secret(job.name))
    return {**secret, "type": "kubernetes.io/tls", "data": data}


def new_pair(kind: JobKind, job: str, namespace: str) -> Pair:
    """A new key and a self-signed certificate, which outlasts any job, with all names of the master's Service."""
    host, name = kind.master_host(job, namespace), kind.master_name(job)
    return self_signed(name, [host, f"{host}.cluster.local", f"{name}.{namespace}", name])


def credentials(job: JobSpec, pair: Object) -> Object:
    token = _encoded(secrets.token_urlsafe(TOKEN_BYTES).encode())
    secret = _object(job, "v1", "Secret", registry.job_kind(job.kind).token_secret(job.name))
    return {**secret, "type": "Opaque", "data": {TOKEN: token, TRUSTED: certificate(pair)}}


def trusting(credentials: Object, pair: Object) -> Object:
    """The object to apply so that the Secret `credentials` gets the certificate of the Secret `pair`.

    The object names the uid of `credentials`, so that no later Secret of the same name is changed.
    """
    metadata = {field: credentials["metadata"][field] for field in ("name", "namespace", "uid")}
    return {"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "data": {TRUSTED: certificate(pair)}}


def again(new: Object, before: Object) -> Object:
    """The Secret `new`, but with the content of `before`, the deleted Secret that it replaces.

    An annotation names the identity of `before`, so that `identity` gives the same for both.
    """
    return {
        **new,
        "metadata": {**new["metadata"], "annotations": {RESTORES: identity(before)}},
        "data": before["data"],
    }


def identity(secret: Object) -> str:
    """A name for the content of a Secret that does not reveal it: the uid of the first Secret with this content."""
    metadata = secret["metadata"]
    return str((metadata.get("annotations") or {}).get(RESTORES) or metadata["uid"])


def certificate(pair: Object) -> str:
    return str((pair.get("data") or {}).get(TLS_CERTIFICATE, ""))


def trusted(credentials: Object) -> str:
    """The certificate in the nodes' Secret; empty if the job began before resile had certificates."""
    return str((credentials.get("data") or {}).get(TRUSTED, ""))


def journal(job: JobSpec) -> Object:
    """The empty ConfigMap that becomes the job's journal. Only the master writes to it."""
    return _object(job, "v1", "ConfigMap", registry.job_kind(job.kind).master_name(job.name))


def service(job: JobSpec) -> Object:
    kind = registry.job_kind(job.kind)
    port = {"name": "master", "port": MASTER_PORT, "targetPort": MASTER_PORT, "protocol": "TCP"}
    return {
        **_object(job, "v1", "Service", kind.master_name(job.name)),
        "spec": {"type": "ClusterIP", "selector": kind.master_selector(job.name), "ports": [port]},
    }


def _encoded(content: bytes) -> str:
    return base64.b64encode(content).decode()


def _object(job: JobSpec, version: str, kind: str, name: str) -> dict[str, Any]:
    metadata = {
        "name": name,
        "namespace": job.namespace,
        "labels": registry.job_kind(job.kind).master_object_labels(job.name),
        "ownerReferences": [owner(job)],
    }
    return {"apiVersion": version, "kind": kind, "metadata": metadata}
