"""The objects that a master needs besides its pod: account, Role, Service, Secrets and the ConfigMap of its journal.

The job owns all of them, so Kubernetes removes them with the job. They have the master's name, except the two Secrets:
one that every node mounts, with the token and the certificate to trust, and one with the key of that certificate, which
only the master mounts.
"""

from __future__ import annotations

import base64
import secrets

from resile.api.defaults import MASTER_PORT
from resile.api.job import JobSpec
from resile.api.kinds import registry
from resile.api.kinds.base import JobKind
from resile.api.kinds.rbac import master_rules
from resile.common.certificates import Pair, self_signed
from resile.kube.kinds import ROLES, SERVICE_ACCOUNTS, SERVICES, Kind, Object
from resile.operator.jobs.master_pod import TLS_CERTIFICATE, TLS_KEY, TOKEN, owner
from resile.platform.kubernetes.pods import TRUSTED

TOKEN_BYTES = 32
RESTORES = "resile.restores"
"""Annotation of a Secret that was deleted and made again with the same content: the uid of the first one."""


def applied(job: JobSpec) -> list[tuple[Kind, Object]]:
    """The objects of a master whose content depends on the job alone. They can be applied any number of times."""
    kind = registry.job_kind(job.kind)
    port = {"name": "master", "port": MASTER_PORT, "targetPort": MASTER_PORT, "protocol": "TCP"}
    service = {"type": "ClusterIP", "selector": kind.master_selector(job.name), "ports": [port]}
    return [
        (SERVICE_ACCOUNTS, {**_object(job), "automountServiceAccountToken": False}),
        (ROLES, {**_object(job), "rules": master_rules(kind, job.name)}),
        (SERVICES, {**_object(job), "spec": service}),
    ]


def binding(job: JobSpec) -> Object:
    """The RoleBinding of the master. Make its Role first: Kubernetes checks that the operator has the Role's rights."""
    name = registry.job_kind(job.kind).master_name(job.name)
    return {
        **_object(job),
        "roleRef": {"apiGroup": ROLES.group, "kind": ROLES.name, "name": name},
        "subjects": [{"kind": "ServiceAccount", "name": name, "namespace": job.namespace}],
    }


def key_pair(job: JobSpec) -> Object:
    """A Secret with a new key and certificate, for the master alone. Do not overwrite an existing Secret with it."""
    kind = registry.job_kind(job.kind)
    pair = new_pair(kind, job.name, job.namespace)
    data = {TLS_CERTIFICATE: _encoded(pair.certificate), TLS_KEY: _encoded(pair.key)}
    return {**_object(job, kind.tls_secret(job.name)), "type": "kubernetes.io/tls", "data": data}


def new_pair(kind: JobKind, job: str, namespace: str) -> Pair:
    """A key and a self-signed certificate for all names of the master's Service. The certificate outlasts any job."""
    host, name = kind.master_host(job, namespace), kind.master_name(job)
    return self_signed(name, [host, f"{host}.cluster.local", f"{name}.{namespace}", name])


def credentials(job: JobSpec, pair: Object) -> Object:
    token = _encoded(secrets.token_urlsafe(TOKEN_BYTES).encode())
    name = registry.job_kind(job.kind).token_secret(job.name)
    return {**_object(job, name), "type": "Opaque", "data": {TOKEN: token, TRUSTED: certificate(pair)}}


def trusting(credentials: Object, pair: Object) -> Object:
    """An object that, once applied, writes the certificate of the Secret `pair` into the Secret `credentials`.

    The object names the uid of `credentials`, so it cannot change a later Secret of the same name.
    """
    metadata = {field: credentials["metadata"][field] for field in ("name", "namespace", "uid")}
    return {"metadata": metadata, "data": {TRUSTED: certificate(pair)}}


def again(new: Object, before: Object) -> Object:
    """The Secret `new`, but with the content of `before`. Use this if `before` was deleted and `new` replaces it.

    The `identity` of `before` is written into an annotation, so `identity` returns the same for both Secrets.
    """
    metadata = {**new["metadata"], "annotations": {RESTORES: identity(before)}}
    return {**new, "metadata": metadata, "data": before["data"]}


def identity(secret: Object) -> str:
    """The uid of the first Secret that had the content of `secret`. It identifies the content without revealing it."""
    metadata = secret["metadata"]
    return str((metadata.get("annotations") or {}).get(RESTORES) or metadata["uid"])


def certificate(pair: Object) -> str:
    return str((pair.get("data") or {}).get(TLS_CERTIFICATE, ""))


def trusted(credentials: Object) -> str:
    """The certificate in `credentials`, the nodes' Secret; empty if the job began before resile had certificates."""
    return str((credentials.get("data") or {}).get(TRUSTED, ""))


def journal(job: JobSpec) -> Object:
    """The empty ConfigMap that becomes the job's journal. Only the master writes to it."""
    return _object(job)


def _encoded(content: bytes) -> str:
    return base64.b64encode(content).decode()


def _object(job: JobSpec, name: str = "") -> Object:
    """An object of the job, without content; the client adds its kind. Without a `name`, it has the master's name."""
    kind = registry.job_kind(job.kind)
    metadata = {
        "name": name or kind.master_name(job.name),
        "namespace": job.namespace,
        "labels": kind.master_object_labels(job.name),
        "ownerReferences": [owner(job)],
    }
    return {"metadata": metadata}
