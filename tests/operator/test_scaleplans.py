from __future__ import annotations

from typing import Any

import pytest

from resile.operator import intervals
from resile.operator.plans import Refuse, Wait, decide_plan
from tests.operator.objects import NOW, job, plan
from tests.support.kinds import SCALE_PLAN

LATER = NOW + intervals.PLAN_WAITS


def refused(item: dict[str, Any], owner: dict[str, Any] | None) -> Refuse:
    decision = decide_plan(SCALE_PLAN, item, owner, LATER)
    assert isinstance(decision, Refuse)
    return decision


def test_a_plan_for_a_running_job_is_left_to_its_master() -> None:
    assert decide_plan(SCALE_PLAN, plan(), job("Running"), LATER) is None
    assert decide_plan(SCALE_PLAN, plan(), job(), LATER) is None


def test_a_plan_may_be_there_a_moment_before_its_job() -> None:
    assert decide_plan(SCALE_PLAN, plan(), None, NOW) == Wait(intervals.PLAN_WAITS - 1)


def test_a_plan_for_a_job_that_does_not_exist_is_refused() -> None:
    assert refused(plan(), None) == Refuse("JobNotFound", "there is no ElasticJob mnist in the namespace red")


@pytest.mark.parametrize(
    "spec",
    [
        {"ownerJob": "mnist", "replicaResourceSpecs": {"ps": {"replicas": 1}}},
        {"ownerJob": "mnist", "createPods": [{"type": "ps"}]},
        {"ownerJob": "mnist", "removePods": [{"name": "mnist-edljob-ps-0"}]},
        {"ownerJob": "mnist", "migratePods": [{"type": "ps", "id": 0}]},
    ],
)
def test_a_plan_for_a_role_that_the_job_does_not_have_is_refused(spec: dict[str, Any]) -> None:
    assert refused(plan(spec), job("Running")) == Refuse("RoleNotFound", "the job mnist has no role ps; it has worker")


def test_a_plan_for_a_job_that_has_ended_is_refused() -> None:
    assert refused(plan(), job("Succeeded")) == Refuse("JobEnded", "the job is over (Succeeded)")


def test_a_plan_with_mistakes_is_refused_with_all_of_them() -> None:
    decision = refused(plan({"ownerJob": "mnist", "replicaResourceSpecs": {"worker": {"replicas": -1}}}), job())
    assert decision.reason == "InvalidPlan"
    assert "spec.replicaResourceSpecs.worker.replicas" in decision.message


@pytest.mark.parametrize("phase", ["Succeeded", "Failed"])
def test_what_is_done_is_done(phase: str) -> None:
    assert decide_plan(SCALE_PLAN, plan(phase=phase), None, LATER) is None


def test_the_masters_own_records_are_not_judged() -> None:
    record = plan(labels={"elasticjob-name": "mnist", "scale-type": "auto"})
    assert decide_plan(SCALE_PLAN, record, job("Succeeded"), LATER) is None
