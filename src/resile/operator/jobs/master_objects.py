"""What a master needs around it: an identity and its rights, a Service, the job's secrets, a place for its journal.

All of them carry the job as their owner, so that Kubernetes removes them with the job. They have the master's name,
except the Secrets: one that every node mounts, with the token and the certificate to trust, and one with the key of
that certificate, which the master alone mounts.
"""

from __future__ import annotations

import base64
import secrets
from typing import Any

from resile.api.defaults import MASTER_PORT
from resile.api.job import JobSpec
from resile.api.kinds import registry
from resile.api.rbac import master_rules
from resile.kube.kinds import ROLES, SERVICE_ACCOUNTS, SERVICES, Kind, Object, of
from resile.kube.owner_references import owner_reference
from resile.operator.jobs.certificate import new_pair
from resile.operator.jobs.master_pod import TLS_CERTIFICATE, TLS_KEY, TOKEN
from resile.platform.kubernetes.pods import TRUSTED

_RBAC = "rbac.authorization.k8s.io"
TOKEN_BYTES = 32
RESTORES = "resile.restores"
"""On a Secret that was made again as it was: the uid of the first of them."""


def owner(job: JobSpec) -> Object:
    """The reference by which an object is owned by its job."""
    return owner_reference(of(registry.job_kind(job.kind)), job.name, job.uid)


def applied(job: JobSpec) -> list[tuple[Kind, Object]]:
    """Objects whose content follows from the job: applied again whenever a master is provisioned."""
    kind = registry.job_kind(job.kind)
    name = kind.master_name(job.name)
    return [
        (SERVICE_ACCOUNTS, {**_object(job, "v1", "ServiceAccount", name), "automountServiceAccountToken": False}),
        (ROLES, {**_object(job, f"{_RBAC}/v1", "Role", name), "rules": master_rules(kind, job.name)}),
        (SERVICES, service(job)),
    ]


def binding(job: JobSpec) -> Object:
    """Gives the master its Role, which must exist: Kubernetes checks that the operator holds the rights in it."""
    kind = registry.job_kind(job.kind)
    name = kind.master_name(job.name)
    return {
        **_object(job, f"{_RBAC}/v1", "RoleBinding", name),
        "roleRef": {"apiGroup": _RBAC, "kind": "Role", "name": name},
        "subjects": [{"kind": "ServiceAccount", "name": name, "namespace": job.namespace}],
    }


def key_pair(job: JobSpec) -> Object:
    """The Secret of the master alone, with a new key. It is made once and never written again."""
    kind = registry.job_kind(job.kind)
    pair = new_pair(kind, job.name, job.namespace)
    data = {TLS_CERTIFICATE: _encoded(pair.certificate), TLS_KEY: _encoded(pair.key)}
    secret = _object(job, "v1", "Secret", kind.tls_secret(job.name))
    return {**secret, "type": "kubernetes.io/tls", "data": data}


def credentials(job: JobSpec, pair: Object) -> Object:
    """The Secret of every node: a new token, which is made once, and the certificate of the key pair."""
    token = _encoded(secrets.token_urlsafe(TOKEN_BYTES).encode())
    secret = _object(job, "v1", "Secret", registry.job_kind(job.kind).token_secret(job.name))
    return {**secret, "type": "Opaque", "data": {TOKEN: token, TRUSTED: certificate(pair)}}


def trusting(credentials: Object, pair: Object) -> Object:
    """What to apply to a Secret of the nodes so that it trusts the key pair; refused if it is gone in between."""
    metadata = {field: credentials["metadata"][field] for field in ("name", "namespace", "uid")}
    return {"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "data": {TRUSTED: certificate(pair)}}


def again(new: Object, before: Object) -> Object:
    """A Secret that was deleted, as one to make: its content, and whose content that is."""
    return {
        **new,
        "metadata": {**new["metadata"], "annotations": {RESTORES: identity(before)}},
        "data": before["data"],
    }


def identity(secret: Object) -> str:
    """What tells the content of a Secret from that of another of its name, and gives nothing of it away."""
    metadata = secret["metadata"]
    return str((metadata.get("annotations") or {}).get(RESTORES) or metadata["uid"])


def certificate(pair: Object) -> str:
    """The certificate in the Secret of a master."""
    return str((pair.get("data") or {}).get(TLS_CERTIFICATE, ""))


def trusted(credentials: Object) -> str:
    """The certificate that nodes trust; empty in the Secret of a job that began before there were any."""
    return str((credentials.get("data") or {}).get(TRUSTED, ""))


def journal(job: JobSpec) -> Object:
    """The ConfigMap that the master fills; made once, and written by the master alone."""
    return _object(job, "v1", "ConfigMap", registry.job_kind(job.kind).master_name(job.name))


def service(job: JobSpec) -> Object:
    """The address of the job's master, whichever pod it is."""
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
