"""The pod of a job's master: a complete pod, over which the job's template for the master is laid.

The pod runs as nobody, without capabilities, on a read-only root, with a token that Kubernetes renews, and may do what
its Role allows. Only this pod mounts the key of the job's certificate. A template changes only the fields that it has.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from resile.api.defaults import MASTER_PORT, TOKEN_FILE_VARIABLE
from resile.api.job import JobSpec, RoleSpec
from resile.api.kinds import registry
from resile.api.manifests.pod_template import MAIN, MAIN_ANNOTATION, main_container
from resile.kube.kinds import Object, of
from resile.kube.owner_references import owner_reference
from resile.operator import intervals

DIRECTORY = "/var/run/resile"
SECRETS = "/var/run/secrets/resile"
TLS = "/var/run/secrets/resile-tls"
ACCOUNT = "/var/run/secrets/kubernetes.io/serviceaccount"
TOKEN = "token"
"""The key of the job's token in the nodes' Secret, and the name of the token's file in a pod."""
TLS_CERTIFICATE, TLS_KEY = "tls.crt", "tls.key"
"""The keys and file names of the master's certificate and of its private key, as Kubernetes names them."""

SECRETS_ANNOTATION = "resile.secrets"
"""Annotation of the master's pod: the identities of its Secrets. They show whether its token and key are old."""

USER = 65532
TOKEN_LIFE = 3607
"""For how many seconds a ServiceAccount's token is valid; the same as for tokens that Kubernetes mounts itself."""

LAST_APPLIED = "kubectl.kubernetes.io/last-applied-configuration"
_BY = {"env": "name", "volumeMounts": "mountPath", "ports": "containerPort", "volumes": "name"}
"""Lists of a pod spec, and the field that identifies an item: a template's item replaces ours with the same value."""


def owner(job: JobSpec) -> Object:
    return owner_reference(of(registry.job_kind(job.kind)), job.name, job.uid)


def master_pod(job: JobSpec, image: str, index: int, secrets: Sequence[str] = ()) -> Object:
    """The manifest of the pod of master number `index`. `secrets` has the `identity` of each Secret in the pod."""
    kind = registry.job_kind(job.kind)
    given = job.master or RoleSpec(replicas=1)
    template_metadata = given.template.get("metadata") or {}
    annotations = {**job.annotations, **(template_metadata.get("annotations") or {})}
    spec = _merged(_spec(job, image), _laid_over(given))
    spec["restartPolicy"] = "Never"  # the operator starts masters; Kubernetes would restart one whose job is over
    return {
        "metadata": {
            "name": kind.master_name(job.name),
            "namespace": job.namespace,
            "labels": {**job.labels, **(template_metadata.get("labels") or {}), **kind.master_labels(job.name, index)},
            "annotations": {
                **{key: value for key, value in annotations.items() if key != LAST_APPLIED},
                MAIN_ANNOTATION: spec["containers"][0]["name"],
                **({SECRETS_ANNOTATION: ",".join(secrets)} if secrets else {}),
            },
            "ownerReferences": [owner(job)],
        },
        "spec": spec,
    }


def _spec(job: JobSpec, image: str) -> Object:
    kind, name = registry.job_kind(job.kind), job.name
    lost = [
        {
            "key": f"node.kubernetes.io/{taint}",
            "operator": "Exists",
            "effect": "NoExecute",
            "tolerationSeconds": int(intervals.NODE_LOST),
        }
        for taint in ("not-ready", "unreachable")
    ]
    return {
        "serviceAccountName": kind.master_name(name),
        "automountServiceAccountToken": False,  # mounted below: the same file, but renewed, and there at once
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": int(intervals.MASTER_GRACE),
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": USER,
            "runAsGroup": USER,
            "fsGroup": USER,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "tolerations": lost,
        "containers": [_container(job, image)],
        "volumes": [
            {"name": "run", "emptyDir": {"sizeLimit": "256Mi"}},
            {"name": "token", "secret": {"secretName": kind.token_secret(name), "defaultMode": 0o440}},
            {"name": "tls", "secret": {"secretName": kind.tls_secret(name), "defaultMode": 0o440}},
            {"name": "account", "projected": {"defaultMode": 0o440, "sources": _account()}},
        ],
    }


def _account() -> list[Object]:
    namespace = {"path": "namespace", "fieldRef": {"fieldPath": "metadata.namespace"}}
    return [
        {"serviceAccountToken": {"path": TOKEN, "expirationSeconds": TOKEN_LIFE}},
        {"configMap": {"name": "kube-root-ca.crt", "items": [{"key": "ca.crt", "path": "ca.crt"}]}},
        {"downwardAPI": {"items": [namespace]}},
    ]


def _container(job: JobSpec, image: str) -> Object:
    command = ["python", "-m", "resile.master", "--platform", "kubernetes"]
    where = ["--namespace", job.namespace, "--job", job.name, "--kind", job.kind, "--directory", DIRECTORY]
    tls = ["--tls-cert", f"{TLS}/{TLS_CERTIFICATE}", "--tls-key", f"{TLS}/{TLS_KEY}"]
    return {
        "name": MAIN,
        "image": image,
        "imagePullPolicy": "IfNotPresent",
        "command": [*command, *where, "--host", "0.0.0.0", "--port", str(MASTER_PORT), *tls],
        "env": [
            {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
            {"name": TOKEN_FILE_VARIABLE, "value": f"{SECRETS}/{TOKEN}"},
            {"name": "TMPDIR", "value": DIRECTORY},  # not /tmp, which may hold what the image brings
        ],
        "ports": [{"name": "master", "containerPort": MASTER_PORT}],
        "resources": {"requests": {"cpu": "100m", "memory": "128Mi"}, "limits": {"memory": "1Gi"}},
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            "readOnlyRootFilesystem": True,
        },
        "terminationMessagePolicy": "FallbackToLogsOnError",  # so that the last words outlive the pod
        "volumeMounts": [
            {"name": "run", "mountPath": DIRECTORY},
            {"name": "token", "mountPath": SECRETS, "readOnly": True},
            {"name": "tls", "mountPath": TLS, "readOnly": True},
            {"name": "account", "mountPath": ACCOUNT, "readOnly": True},
        ],
    }


def _laid_over(given: RoleSpec) -> Object:
    spec = dict(given.template.get("spec") or {})
    if given.batch_scheduler:
        spec.setdefault("schedulerName", given.batch_scheduler)
    if given.priority in ("high", "low"):
        spec.setdefault("priorityClassName", given.priority)
    return spec


def _merged(ours: Object, theirs: Object) -> Object:
    main = main_container({"spec": theirs})
    containers = [
        _merged_container(ours["containers"][0], main),
        *(other for other in theirs.get("containers") or () if other is not main),
    ]
    rest = {field: value for field, value in theirs.items() if field != "containers"}
    given = theirs.get("tolerations") or []
    tolerated = {entry.get("key") for entry in given}
    tolerations = [*given, *(entry for entry in ours["tolerations"] if entry["key"] not in tolerated)]
    return {**_over(ours, rest), "tolerations": tolerations, "containers": containers}


def _merged_container(ours: Object, theirs: Object) -> Object:
    merged: Object = _over(ours, theirs)
    if not theirs.get("command"):
        merged["command"] = ours["command"]
        if "args" in theirs:  # the words of one command line do not mix with those of another
            del merged["command"]
    return merged


def _over(ours: Any, theirs: Any, field: str = "") -> Any:
    """Merge the values `theirs` into `ours` and return the result. Where `theirs` is None, the value of `ours` stays.

    Mappings are merged key by key. Lists are merged if `_BY` has `field`: an item of `theirs` replaces the item of
    `ours` with the same identifying field, and other items stay. Any other value of `theirs` replaces that of `ours`.
    """
    if isinstance(ours, dict) and isinstance(theirs, dict):
        given = {key: _over(ours.get(key), value, key) for key, value in theirs.items() if value is not None}
        return {**ours, **given}
    if field in _BY and isinstance(ours, list) and isinstance(theirs, list):
        replaced = {entry.get(_BY[field]) for entry in theirs}
        return [*(entry for entry in ours if entry.get(_BY[field]) not in replaced), *theirs]
    return theirs
