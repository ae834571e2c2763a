"""Nobody is granted more than is needed, and the operator may grant what a master needs."""

from __future__ import annotations

import pytest

from resile.api.kinds import rbac
from resile.api.kinds.elasticjob.kind import ELASTIC_JOB

Grant = tuple[str, str, str]


def grants(rules: rbac.Rules, *, unnamed_only: bool = False) -> set[Grant]:
    """(group, resource, verb) of every right; with `unnamed_only` those that hold for objects of any name."""
    return {
        (group, resource, verb)
        for rule in rules
        if not (unnamed_only and "resourceNames" in rule)
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }


ALL = {
    "master": rbac.master_rules(ELASTIC_JOB, "torch-mnist"),
    "operator": rbac.operator_rules(),
    "election": rbac.election_rules("x"),
    "viewer": rbac.viewer_rules(),
    "editor": rbac.editor_rules(),
}


def test_the_operator_holds_all_that_it_grants_to_a_master():
    assert grants(rbac.master_rules(ELASTIC_JOB, "torch-mnist")) <= grants(rbac.operator_rules(), unnamed_only=True)


@pytest.mark.parametrize("rules", ALL.values(), ids=ALL)
def test_nothing_is_granted_wholesale_or_lets_its_holder_grant_more(rules):
    for group, resource, verb in grants(rules):
        assert "*" not in (group, resource, verb)
        assert verb not in {"escalate", "bind", "impersonate"}
        assert resource not in {"nodes", "pods/exec", "pods/attach", "pods/portforward", "clusterroles"}


def test_secrets_cannot_be_listed_by_anybody_nor_be_read_by_a_master():
    for rules in ALL.values():
        assert not {("", "secrets", "list"), ("", "secrets", "watch")} & grants(rules)
    assert "secrets" not in {resource for _, resource, _ in grants(rbac.master_rules(ELASTIC_JOB, "torch-mnist"))}


def test_a_master_sees_and_writes_its_own_job_only():
    mine = [
        rule for rule in rbac.master_rules(ELASTIC_JOB, "torch-mnist") if rule["resources"][0].startswith("elasticjobs")
    ]
    assert [rule["resourceNames"] for rule in mine] == [["torch-mnist"]] * 3
    assert not {"create", "delete", "update", "patch"} & set(mine[0]["verbs"])
    (journal,) = [rule for rule in rbac.master_rules(ELASTIC_JOB, "torch-mnist") if "configmaps" in rule["resources"]]
    assert journal["resourceNames"] == ["elasticjob-torch-mnist-dlrover-master"]


JOBS, PLANS, RBAC = (
    ("elastic.iml.github.io", "elasticjobs"),
    ("elastic.iml.github.io", "scaleplans"),
    "rbac.authorization.k8s.io",
)

USES = {
    "master": {
        ("", "pods"): "get list watch create delete",
        ("", "services"): "create",
        ("", "events"): "create",
        ("", "configmaps"): "get patch",
        JOBS: "get list watch",
        (JOBS[0], "elasticjobs/status"): "patch",
        (JOBS[0], "elasticjobs/finalizers"): "update",
        PLANS: "list watch",
        (PLANS[0], "scaleplans/status"): "patch",
    },
    "operator": {
        ("", "pods"): "get list watch create delete",
        ("", "services"): "list watch create patch",
        ("", "serviceaccounts"): "create patch",
        ("", "secrets"): "get create patch",
        ("", "configmaps"): "get create patch",  # the last for masters
        ("", "events"): "create",
        (RBAC, "roles"): "create patch",
        (RBAC, "rolebindings"): "create patch",
        JOBS: "get list watch",
        (JOBS[0], "elasticjobs/status"): "patch",
        (JOBS[0], "elasticjobs/finalizers"): "update",
        PLANS: "list watch",
        (PLANS[0], "scaleplans/status"): "patch",
    },
    "election": {("coordination.k8s.io", "leases"): "create get update"},
}


@pytest.mark.parametrize("who", USES)
def test_nobody_of_ours_may_do_what_it_never_does(who):
    assert grants(ALL[who]) == {(*what, verb) for what, verbs in USES[who].items() for verb in verbs.split()}


def test_a_viewer_changes_nothing():
    assert {verb for _, _, verb in grants(rbac.viewer_rules())} == {"get", "list", "watch"}
