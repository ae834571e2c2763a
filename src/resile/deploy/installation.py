"""Everything a cluster needs to run jobs, as plain objects: what `resile manifests` prints and `config/` holds.

Both come from here, so there is one text to change: `resile manifests --kustomize config` writes the folder anew. The
operator runs as nobody, with a read-only file system and no capabilities; it starts masters from its own image, which
it learns from its own pod (`POD_NAME`), so that an image is named in one place.
"""

from __future__ import annotations

from typing import Any

from resile.api import rbac
from resile.api.crd.generate import crd
from resile.api.kinds import registry

Object = dict[str, Any]

NAME = "resile-operator"
"""Of the Deployment, its ServiceAccount, its roles and the Lease of its election."""

NAMESPACE = "resile-system"
JOBS_NAMESPACE = "dlrover"
"""Where the examples and tutorials put their jobs; any other namespace will do."""

IMAGE = "resile:dev"
USER = 65532
"""The number of nobody in images without a shell; it owns no file."""

HEALTH_PORT = 8081
"""Answers /healthz, /readyz and /metrics."""

SCRATCH = "/var/run/resile"
"""The one place where the operator can write; not /tmp, which would hide what an image has there."""

_RBAC = "rbac.authorization.k8s.io"


def definitions(*, cel: bool = False) -> list[Object]:
    """The CustomResourceDefinitions."""
    return [crd(kind.definition, cel=cel) for kind in registry.kinds()]


def namespaces(namespace: str = NAMESPACE) -> list[Object]:
    """The operator's namespace, in which pods may have no privileges, and the one of the examples."""
    restricted = {"pod-security.kubernetes.io/enforce": "restricted"}
    return [
        _object("v1", "Namespace", namespace, labels=restricted),
        *([_object("v1", "Namespace", JOBS_NAMESPACE)] if namespace != JOBS_NAMESPACE else []),
    ]


def service_account(namespace: str = NAMESPACE) -> Object:
    """The account that the operator runs under."""
    return _object("v1", "ServiceAccount", NAME, namespace)


def operator_role(namespace: str = NAMESPACE) -> list[Object]:
    """What the operator may do in all namespaces."""
    return [
        {**_object(f"{_RBAC}/v1", "ClusterRole", NAME), "rules": rbac.operator_rules()},
        {
            **_object(f"{_RBAC}/v1", "ClusterRoleBinding", NAME),
            "roleRef": {"apiGroup": _RBAC, "kind": "ClusterRole", "name": NAME},
            "subjects": [{"kind": "ServiceAccount", "name": NAME, "namespace": namespace}],
        },
    ]


def election_role(namespace: str = NAMESPACE) -> list[Object]:
    """What the operator may do in its own namespace."""
    name = f"{NAME}-leader-election"
    return [
        {**_object(f"{_RBAC}/v1", "Role", name, namespace), "rules": rbac.election_rules(NAME)},
        {
            **_object(f"{_RBAC}/v1", "RoleBinding", name, namespace),
            "roleRef": {"apiGroup": _RBAC, "kind": "Role", "name": name},
            "subjects": [{"kind": "ServiceAccount", "name": NAME, "namespace": namespace}],
        },
    ]


def user_roles() -> list[Object]:
    """What the cluster's own roles view, edit and admin let people do with jobs."""
    aggregate = f"{_RBAC}/aggregate-to-"
    see = {f"{aggregate}view": "true"}
    change = {f"{aggregate}edit": "true"}
    return [
        {**_object(f"{_RBAC}/v1", "ClusterRole", "resile-view", labels=see), "rules": rbac.viewer_rules()},
        {**_object(f"{_RBAC}/v1", "ClusterRole", "resile-edit", labels=change), "rules": rbac.editor_rules()},
    ]


def priority_classes() -> list[Object]:
    """The classes that `priority` of a role names: high before all that says nothing, low after it."""
    about = {
        "high": (
            1000,
            "PreemptLowerPriority",
            "nodes that a job wants to keep: pods of less priority make room for them",
        ),
        "low": (-1000, "Never", "nodes that a job can do without: they make room for all others and push none out"),
    }
    return [
        {
            **_object("scheduling.k8s.io/v1", "PriorityClass", name),
            "value": value,
            "preemptionPolicy": policy,
            "description": description,
        }
        for name, (value, policy, description) in about.items()
    ]


def default_role() -> list[Object]:
    """What DLRover's tutorials apply to let masters work, here without any right: see the comment of its file."""
    name = "default-role"
    return [
        {"apiVersion": f"{_RBAC}/v1", "kind": "Role", "metadata": {"name": name}, "rules": []},
        {
            "apiVersion": f"{_RBAC}/v1",
            "kind": "RoleBinding",
            "metadata": {"name": "default-rolebinding"},
            "roleRef": {"apiGroup": _RBAC, "kind": "Role", "name": name},
            "subjects": [{"kind": "ServiceAccount", "name": "default", "namespace": JOBS_NAMESPACE}],
        },
    ]


def deployment(image: str = IMAGE, namespace: str = NAMESPACE) -> Object:
    """The operator itself."""
    selector = {"app.kubernetes.io/name": NAME}
    pod: Object = {
        "serviceAccountName": NAME,
        "terminationGracePeriodSeconds": 10,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": USER,
            "runAsGroup": USER,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [_container(image)],
        "volumes": [{"name": "scratch", "emptyDir": {"sizeLimit": "64Mi"}}],
    }
    return {
        **_object("apps/v1", "Deployment", NAME, namespace),
        "spec": {
            "replicas": 1,
            "selector": {"matchLabels": selector},
            "template": {"metadata": {"labels": selector}, "spec": pod},
        },
    }


def everything(image: str = IMAGE, namespace: str = NAMESPACE, *, cel: bool = False) -> list[Object]:
    """All that `kubectl apply -k config/default` installs, in an order in which it can be applied one by one."""
    return [
        *namespaces(namespace),
        *definitions(cel=cel),
        service_account(namespace),
        *operator_role(namespace),
        *election_role(namespace),
        *user_roles(),
        deployment(image, namespace),
    ]


def _container(image: str) -> Object:
    return {
        "name": "operator",
        "image": image,
        "imagePullPolicy": "IfNotPresent",
        "command": ["resile", "operator"],
        "args": ["--leader-elect", f"--health-port={HEALTH_PORT}"],
        "env": [
            _from_pod("POD_NAME", "metadata.name"),
            _from_pod("POD_NAMESPACE", "metadata.namespace"),
            {"name": "TMPDIR", "value": SCRATCH},
        ],
        "ports": [{"name": "health", "containerPort": HEALTH_PORT}],
        "startupProbe": {**_probe("/healthz"), "periodSeconds": 1, "failureThreshold": 60},
        "livenessProbe": {**_probe("/healthz"), "periodSeconds": 10, "failureThreshold": 3},
        "readinessProbe": {**_probe("/readyz"), "periodSeconds": 5},
        "resources": {
            "requests": {"cpu": "50m", "memory": "128Mi"},
            "limits": {"cpu": "1", "memory": "512Mi"},
        },
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            "readOnlyRootFilesystem": True,
        },
        "volumeMounts": [{"name": "scratch", "mountPath": SCRATCH}],
    }


def _probe(path: str) -> Object:
    return {"httpGet": {"path": path, "port": "health"}}


def _from_pod(name: str, path: str) -> Object:
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}


def _object(version: str, kind: str, name: str, namespace: str = "", labels: dict[str, str] | None = None) -> Object:
    ours = {"app.kubernetes.io/part-of": "resile", **(labels or {})}
    placed = {"namespace": namespace} if namespace else {}
    return {"apiVersion": version, "kind": kind, "metadata": {"name": name, **placed, "labels": ours}}
