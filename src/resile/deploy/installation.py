"""All objects that a cluster needs to run jobs, as plain data. `resile manifests` prints them; `config/` stores them.

`resile manifests --kustomize config` writes that folder again after a change here. The operator runs as nobody, with a
read-only file system and no capabilities. It starts masters from its own image, which it reads from its own pod
(`POD_NAME`), so that an image is named in one place only.
"""

from __future__ import annotations

from typing import Any

from resile.api.crd.generate import crd
from resile.api.kinds import rbac, registry

Object = dict[str, Any]

NAME = "resile-operator"
"""The name of the Deployment, of its ServiceAccount and roles, and of the Lease for leader election."""

NAMESPACE = "resile-system"
JOBS_NAMESPACE = "dlrover"
"""The namespace of the jobs in examples and tutorials; jobs can run in any other namespace, too."""

IMAGE = "resile:dev"
USER = 65532
"""The user id of nobody in images without a shell; this user owns no file."""

HEALTH_PORT = 8081

SCRATCH = "/var/run/resile"
"""The only directory that the operator can write to. A volume at /tmp would hide files of the image."""

_RBAC = "rbac.authorization.k8s.io"


def definitions(*, cel: bool = False) -> list[Object]:
    return [crd(kind.definition, cel=cel) for kind in registry.kinds()]


def namespaces(namespace: str = NAMESPACE) -> list[Object]:
    """The namespace of the operator, in which pods may have no privileges, and the namespace of the examples."""
    restricted = {"pod-security.kubernetes.io/enforce": "restricted"}
    return [
        _object("v1", "Namespace", namespace, labels=restricted),
        *([_object("v1", "Namespace", JOBS_NAMESPACE)] if namespace != JOBS_NAMESPACE else []),
    ]


def service_account(namespace: str = NAMESPACE) -> Object:
    return _object("v1", "ServiceAccount", NAME, namespace)


def operator_role(namespace: str = NAMESPACE) -> list[Object]:
    return [
        {**_object(f"{_RBAC}/v1", "ClusterRole", NAME), "rules": rbac.operator_rules()},
        {**_object(f"{_RBAC}/v1", "ClusterRoleBinding", NAME), **_binding("ClusterRole", NAME, NAME, namespace)},
    ]


def election_role(namespace: str = NAMESPACE) -> list[Object]:
    name = f"{NAME}-leader-election"
    return [
        {**_object(f"{_RBAC}/v1", "Role", name, namespace), "rules": rbac.election_rules(NAME)},
        {**_object(f"{_RBAC}/v1", "RoleBinding", name, namespace), **_binding("Role", name, NAME, namespace)},
    ]


def user_roles() -> list[Object]:
    """ClusterRoles that allow work with jobs. Kubernetes adds their rules to its own roles view, edit and admin."""
    see, change = {f"{_RBAC}/aggregate-to-view": "true"}, {f"{_RBAC}/aggregate-to-edit": "true"}
    return [
        {**_object(f"{_RBAC}/v1", "ClusterRole", "resile-view", labels=see), "rules": rbac.viewer_rules()},
        {**_object(f"{_RBAC}/v1", "ClusterRole", "resile-edit", labels=change), "rules": rbac.editor_rules()},
    ]


def priority_classes() -> list[Object]:
    """The PriorityClasses `high` and `low` for the field `priority` of a role. Pods without a class are between."""
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
    """A Role without rules and its RoleBinding, under the names that DLRover's tutorials use.

    Applied over DLRover's objects, they take back the rights that these gave. See `kustomize._DEFAULT_ROLE`.
    """
    name, version = "default-role", f"{_RBAC}/v1"
    binding = {"apiVersion": version, "kind": "RoleBinding", "metadata": {"name": "default-rolebinding"}}
    return [
        {"apiVersion": version, "kind": "Role", "metadata": {"name": name}, "rules": []},
        {**binding, **_binding("Role", name, "default", JOBS_NAMESPACE)},
    ]


def deployment(image: str = IMAGE, namespace: str = NAMESPACE) -> Object:
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
    """All objects that `kubectl apply -k config/default` installs, in order; with `cel`, those of `config/cel`."""
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


def _binding(kind: str, role: str, account: str, namespace: str) -> Object:
    subject = {"kind": "ServiceAccount", "name": account, "namespace": namespace}
    return {"roleRef": {"apiGroup": _RBAC, "kind": kind, "name": role}, "subjects": [subject]}


def _object(version: str, kind: str, name: str, namespace: str = "", labels: dict[str, str] | None = None) -> Object:
    ours = {"app.kubernetes.io/part-of": "resile", **(labels or {})}
    placed = {"namespace": namespace} if namespace else {}
    return {"apiVersion": version, "kind": kind, "metadata": {"name": name, **placed, "labels": ours}}
