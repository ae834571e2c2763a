"""The rights of the operator, of masters and of users at the API server, as RBAC rules.

In Kubernetes, no account can grant rights that it does not have. The operator gives every master a Role of its own, so
the operator's rules contain all rights of masters, for every namespace. No account may extend its rights (`escalate`,
`bind`, `impersonate`). Training pods have no rights and mount no token.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from resile.api.kinds import registry
from resile.api.kinds.base import JobKind

Rules = list[dict[str, Any]]

_READ = ("get", "list", "watch")
_APPLY = ("create", "patch")
"""The verbs of server-side apply, which patches an object or creates it."""


def master_rules(kind: JobKind, job: str) -> Rules:
    """The rules of the Role of a job's master, in the job's namespace."""
    group, jobs = kind.definition.group, kind.definition.plural
    rules = [
        _rule("", ["pods"], [*_READ, "create", "delete"]),
        _rule("", ["services", "events"], ["create"]),
        _rule("", ["configmaps"], ["get", "patch"], [kind.master_name(job)]),
        _rule(group, [jobs], list(_READ), [job]),  # allows lists and watches that select metadata.name
        _rule(group, [f"{jobs}/status"], ["patch"], [job]),
        _rule(group, [f"{jobs}/finalizers"], ["update"], [job]),  # see `kube/owner_references.py`
    ]
    for plan in registry.PLAN_KINDS:
        if plan.job_kind is kind:
            rules.append(_rule(plan.definition.group, [plan.definition.plural], ["list", "watch"]))
            rules.append(_rule(plan.definition.group, [f"{plan.definition.plural}/status"], ["patch"]))
    return rules


def operator_rules() -> Rules:
    """The rules of the operator, in all namespaces.

    The operator needs few rights to delete, because the garbage collector removes the objects of a job. It may read a
    Secret by its name, but not list Secrets.
    """
    own: Rules = []
    for group, jobs, plans in _groups():
        own += [
            *_some(group, jobs, list(_READ)),
            *_some(group, plans, ["list", "watch"]),
            *_some(group, [f"{plural}/status" for plural in (*jobs, *plans)], ["patch"]),
            # Some clusters require this right of an account that makes a job the owner of an object.
            *_some(group, [f"{plural}/finalizers" for plural in jobs], ["update"]),
        ]
    return [
        *own,
        _rule("", ["pods"], [*_READ, "create", "delete"]),
        _rule("", ["services"], ["list", "watch", *_APPLY]),
        _rule("", ["configmaps"], ["get", "create", "patch"]),
        _rule("", ["secrets"], ["get", *_APPLY]),
        _rule("", ["serviceaccounts"], list(_APPLY)),
        _rule("rbac.authorization.k8s.io", ["roles", "rolebindings"], list(_APPLY)),
        _rule("", ["events"], ["create"]),
    ]


def election_rules(lease: str) -> Rules:
    """The rules of the operator in its own namespace, for the Lease of leader election."""
    group = "coordination.k8s.io"
    return [
        _rule(group, ["leases"], ["create"]),
        _rule(group, ["leases"], ["get", "update"], [lease]),
    ]


def viewer_rules() -> Rules:
    """The rules for users who may view a namespace: they may read its jobs and plans."""
    rules: Rules = []
    for group, jobs, plans in _groups():
        parts = [part for plural in jobs for part in (f"{plural}/status", f"{plural}/scale")]
        rules.append(_rule(group, [*jobs, *plans], list(_READ)))
        rules.append(_rule(group, [*parts, *(f"{plural}/status" for plural in plans)], ["get"]))
    return rules


def editor_rules() -> Rules:
    """The rules for users who may edit a namespace: they may change its jobs and plans."""
    rules: Rules = []
    for group, jobs, plans in _groups():
        rules.append(_rule(group, [*jobs, *plans], ["create", "delete", "deletecollection", "patch", "update"]))
        rules += _some(group, [f"{plural}/scale" for plural in jobs], ["patch", "update"])
    return rules


def _groups() -> Iterator[tuple[str, list[str], list[str]]]:
    for group in dict.fromkeys(kind.definition.group for kind in registry.kinds()):
        jobs = [kind.definition.plural for kind in registry.JOB_KINDS if kind.definition.group == group]
        plans = [kind.definition.plural for kind in registry.PLAN_KINDS if kind.definition.group == group]
        yield group, jobs, plans


def _some(group: str, resources: list[str], verbs: list[str]) -> Rules:
    return [_rule(group, resources, verbs)] if resources else []


def _rule(group: str, resources: list[str], verbs: list[str], names: list[str] | None = None) -> dict[str, Any]:
    written: dict[str, Any] = {"apiGroups": [group], "resources": resources, "verbs": verbs}
    return {**written, **({"resourceNames": names} if names else {})}
