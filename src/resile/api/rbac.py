"""Who may do what at the API server: the operator, the master of one job, and the people who use both.

Kubernetes lets nobody grant more than they hold. The operator gives every master a Role of its own, so all that a
master may do is among the operator's rules, for every namespace; nothing is granted that allows to grant more
(`escalate`, `bind`, `impersonate`). Training pods are granted nothing and mount no token.
"""

from __future__ import annotations

from typing import Any

from resile.api import elasticjob, scaleplan
from resile.api.metadata import GROUP
from resile.api.names import master_name

Rules = list[dict[str, Any]]

_JOBS, _PLANS = elasticjob.PLURAL, scaleplan.PLURAL
_READ = ("get", "list", "watch")


def master_rules(job: str) -> Rules:
    """The rules of the Role of a job's master, in the job's namespace.

    A master makes and removes the job's pods and Services, keeps its journal in the ConfigMap of its own name (which
    the operator makes), and writes the status of its own job alone.
    """
    return [
        _rule("", ["pods", "services"], [*_READ, "create", "patch", "delete"]),
        _rule("", ["events"], ["create", "patch"]),
        _rule("", ["configmaps"], ["get", "update", "patch"], [master_name(job)]),
        _rule(GROUP, [_JOBS], list(_READ), [job]),  # lists and watches that select metadata.name
        _rule(GROUP, [f"{_JOBS}/status"], ["get", "patch", "update"], [job]),
        _rule(GROUP, [_PLANS], [*_READ, "create", "patch"]),
        _rule(GROUP, [f"{_PLANS}/status"], ["get", "patch", "update"]),
    ]


def operator_rules() -> Rules:
    """The rules of the operator, in all namespaces.

    Objects are removed by the garbage collector with their job, so that few rights to delete are needed. Secrets can be
    read one at a time by name, never listed.
    """
    return [
        _rule(GROUP, [_JOBS], [*_READ, "patch", "update"]),
        _rule(GROUP, [_PLANS], [*_READ, "create", "patch", "update"]),
        _rule(GROUP, [f"{_JOBS}/status", f"{_PLANS}/status"], ["get", "patch", "update"]),
        _rule(GROUP, [f"{_JOBS}/finalizers", f"{_PLANS}/finalizers"], ["update"]),
        _rule("", ["pods", "services"], [*_READ, "create", "patch", "update", "delete"]),
        _rule("", ["configmaps"], ["get", "create", "patch", "update"]),
        _rule("", ["secrets"], ["get", "create", "patch"]),
        _rule("", ["serviceaccounts"], ["get", "create", "patch"]),
        _rule("rbac.authorization.k8s.io", ["roles", "rolebindings"], ["get", "create", "patch"]),
        _rule("", ["events"], ["create", "patch"]),
    ]


def election_rules(lease: str) -> Rules:
    """The rules of the operator in its own namespace: the Lease by which one of several is elected."""
    group = "coordination.k8s.io"
    return [
        _rule(group, ["leases"], ["create"]),
        _rule(group, ["leases"], ["get", "patch", "update"], [lease]),
    ]


def viewer_rules() -> Rules:
    """What anybody who may look at a namespace may see of its jobs."""
    return [
        _rule(GROUP, [_JOBS, _PLANS], list(_READ)),
        _rule(GROUP, [f"{_JOBS}/status", f"{_JOBS}/scale", f"{_PLANS}/status"], ["get"]),
    ]


def editor_rules() -> Rules:
    """What anybody who may change things in a namespace may do with its jobs."""
    return [
        _rule(GROUP, [_JOBS, _PLANS], ["create", "delete", "deletecollection", "patch", "update"]),
        _rule(GROUP, [f"{_JOBS}/scale"], ["patch", "update"]),
    ]


def _rule(group: str, resources: list[str], verbs: list[str], names: list[str] | None = None) -> dict[str, Any]:
    written: dict[str, Any] = {"apiGroups": [group], "resources": resources, "verbs": verbs}
    return {**written, **({"resourceNames": names} if names else {})}
