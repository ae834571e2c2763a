"""What a master needs around it: an identity and its rights, a Service, the job's token, and a place for its journal.

All of them carry the job as their owner, so that Kubernetes removes them with the job. They have the master's name,
except the token's Secret.
"""

from __future__ import annotations

import base64
import secrets
from typing import Any

from resile.api import elasticjob
from resile.api.elasticjob import ElasticJob
from resile.api.job import MASTER_PORT
from resile.api.labels import PREFIXED_JOB_NAME, PREFIXED_REPLICA_TYPE, master_labels
from resile.api.metadata import API_VERSION
from resile.api.names import MASTER_ROLE, master_name
from resile.api.rbac import master_rules
from resile.operator.cluster import (
    CONFIG_MAP,
    ROLE,
    SECRET,
    SERVICE,
    SERVICE_ACCOUNT,
    Kind,
    Object,
)
from resile.operator.masterpod import TOKEN, token_secret

_RBAC = "rbac.authorization.k8s.io"
TOKEN_BYTES = 32


def owner(job: ElasticJob) -> Object:
    """The reference by which an object is owned by its job."""
    return {
        "apiVersion": API_VERSION,
        "kind": elasticjob.KIND,
        "name": job.metadata.name,
        "uid": job.metadata.uid,
        "controller": True,
        "blockOwnerDeletion": True,
    }


def owned_by(item: Object, uid: str) -> bool:
    """Whether an object is of the job with this uid, not of an earlier one of the same name."""
    return any(reference.get("uid") == uid for reference in item["metadata"].get("ownerReferences") or ())


def controlled(item: Object) -> bool:
    """Whether an object has an owner that will take it away."""
    return any(reference.get("controller") for reference in item["metadata"].get("ownerReferences") or ())


def applied(job: ElasticJob) -> list[tuple[Kind, Object]]:
    """Objects whose content follows from the job: made so again whenever the operator looks."""
    name = master_name(job.metadata.name)
    return [
        (SERVICE_ACCOUNT, {**_object(job, "v1", "ServiceAccount", name), "automountServiceAccountToken": False}),
        (ROLE, {**_object(job, f"{_RBAC}/v1", "Role", name), "rules": master_rules(job.metadata.name)}),
        (SERVICE, service(job)),
    ]


def binding(job: ElasticJob) -> Object:
    """Gives the master its Role, which must exist: Kubernetes looks whether we may give away what is in it."""
    name = master_name(job.metadata.name)
    return {
        **_object(job, f"{_RBAC}/v1", "RoleBinding", name),
        "roleRef": {"apiGroup": _RBAC, "kind": "Role", "name": name},
        "subjects": [{"kind": "ServiceAccount", "name": name, "namespace": job.metadata.namespace}],
    }


def made_once(job: ElasticJob) -> list[tuple[Kind, Object]]:
    """Objects that are made and never written again: the token, and the journal's ConfigMap, which the master fills."""
    token = base64.b64encode(secrets.token_urlsafe(TOKEN_BYTES).encode()).decode()
    secret = _object(job, "v1", "Secret", token_secret(job.metadata.name))
    return [
        (SECRET, {**secret, "type": "Opaque", "data": {TOKEN: token}}),
        (CONFIG_MAP, _object(job, "v1", "ConfigMap", master_name(job.metadata.name))),
    ]


def service(job: ElasticJob) -> Object:
    """The address of the job's master, whichever pod it is."""
    selector = {PREFIXED_JOB_NAME: job.metadata.name, PREFIXED_REPLICA_TYPE: MASTER_ROLE}
    port = {"name": "master", "port": MASTER_PORT, "targetPort": MASTER_PORT, "protocol": "TCP"}
    return {
        **_object(job, "v1", "Service", master_name(job.metadata.name)),
        "spec": {"type": "ClusterIP", "selector": selector, "ports": [port]},
    }


def _object(job: ElasticJob, version: str, kind: str, name: str) -> dict[str, Any]:
    metadata = {
        "name": name,
        "namespace": job.metadata.namespace,
        "labels": {key: value for key, value in master_labels(job.metadata.name).items() if "index" not in key},
        "ownerReferences": [owner(job)],
    }
    return {"apiVersion": version, "kind": kind, "metadata": metadata}
