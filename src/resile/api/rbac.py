"""Who may do what at the API server: the operator, the master of one job, and the people who use both.

Kubernetes lets nobody grant more than they hold. The operator gives every master a Role of its own, so all that a
master may do is among the operator's rules, for every namespace; nothing is granted that allows to grant more
(`escalate`, `bind`, `impersonate`). Training pods are granted nothing and mount no token.
"""

from __future__ import annotations

from typing import Any

from resile.api.kinds import elasticjob, scaleplan
from resile.api.manifests.metadata import GROUP
from resile.api.manifests.names import master_name

Rules = list[dict[str, Any]]

_JOBS, _PLANS = elasticjob.PLURAL, scaleplan.PLURAL
_READ = ("get", "list", "watch")
_APPLY = ("create", "patch")
"""Server-side apply is a patch, and makes what is not there."""


def master_rules(job: str) -> Rules:
    """The rules of the Role of a job's master, in the job's namespace.

    A master makes and removes the job's pods, makes its Services, keeps its journal in the ConfigMap of its own name
    (which the operator makes), and writes the status of its own job alone and of plans.
    """
    return [
        _rule("", ["pods"], [*_READ, "create", "delete"]),
        _rule("", ["services", "events"], ["create"]),
        _rule("", ["configmaps"], ["get", "patch"], [master_name(job)]),
        _rule(GROUP, [_JOBS], list(_READ), [job]),  # lists and watches that select metadata.name
        _rule(GROUP, [f"{_JOBS}/status"], ["patch"], [job]),
        _rule(GROUP, [_PLANS], ["list", "watch"]),
        _rule(GROUP, [f"{_PLANS}/status"], ["patch"]),
    ]


def operator_rules() -> Rules:
    """The rules of the operator, in all namespaces.

    Objects are removed by the garbage collector with their job, so that few rights to delete are needed. Secrets can be
    read one at a time by name, never listed.
    """
    return [
        _rule(GROUP, [_JOBS], list(_READ)),
        _rule(GROUP, [_PLANS], ["list", "watch"]),
        _rule(GROUP, [f"{_JOBS}/status", f"{_PLANS}/status"], ["patch"]),
        _rule(GROUP, [f"{_JOBS}/finalizers"], ["update"]),  # some clusters ask for it of whoever names a job as owner
        _rule("", ["pods"], [*_READ, "create", "delete"]),
        _rule("", ["services"], ["list", "watch", *_APPLY]),
        _rule("", ["configmaps"], ["get", "create", "patch"]),
        _rule("", ["secrets"], ["get", *_APPLY]),
        _rule("", ["serviceaccounts"], list(_APPLY)),
        _rule("rbac.authorization.k8s.io", ["roles", "rolebindings"], list(_APPLY)),
        _rule("", ["events"], ["create"]),
    ]


def election_rules(lease: str) -> Rules:
    """The rules of the operator in its own namespace: the Lease by which one of several is elected."""
    group = "coordination.k8s.io"
    return [
        _rule(group, ["leases"], ["create"]),
        _rule(group, ["leases"], ["get", "update"], [lease]),
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
