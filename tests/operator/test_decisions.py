from __future__ import annotations

from typing import Any

import msgspec
import pytest

from resile.api.job_phase import JobPhase
from resile.api.manifests.errors import BadManifest
from resile.kube.manifests import read_job
from resile.operator import intervals
from resile.operator.jobs.decisions import (
    Action,
    Decision,
    EmitEvent,
    ObservedJob,
    Provision,
    Reason,
    RemoveMaster,
    RemovePods,
    Restarts,
    SetStatus,
    StartMaster,
    StopNodes,
    decide,
)
from tests.operator.objects import NOW, job, pod
from tests.support.kinds import ELASTIC_JOB


def decided(item: dict[str, Any], master: dict[str, Any] | None = None, now: float = NOW, **seen: Any) -> Decision:
    return decide(ObservedJob(kind=ELASTIC_JOB, job=item, pod=master, **seen), read_job(ELASTIC_JOB, item), now)


def only(kind: type[Any], actions: tuple[Action, ...]) -> Any:
    found = [action for action in actions if isinstance(action, kind)]
    assert len(found) == 1, actions
    return found[0]


def bad_job(**given: Any) -> dict[str, Any]:
    item = job(**given)
    item["spec"]["replicaSpecs"]["worker"]["replicas"] = "two"
    return item


# starting ---------------------------------------------------------------------------------------------------------


def test_a_new_job_is_accepted_and_gets_its_master() -> None:
    decision = decided(job())
    assert [type(action) for action in decision.actions] == [SetStatus, Provision, StartMaster]
    assert only(SetStatus, decision.actions).phase is JobPhase.CREATED
    assert only(StartMaster, decision.actions) == StartMaster(index=0)


def test_a_starting_master_makes_the_job_pending_once() -> None:
    status = only(SetStatus, decided(job("Created"), pod("Pending"), provisioned=True).actions)
    assert (status.phase, status.reason) == (JobPhase.PENDING, "MasterStarting")
    after = job("Pending", status.reason, status.message)
    assert decided(after, pod("Pending"), provisioned=True) == Decision(again=intervals.RECHECK)


def test_a_restarted_operator_makes_sure_of_everything_around_a_running_master() -> None:
    assert decided(job("Running", "JobRunning"), pod()).actions == (Provision(),)


def test_a_job_whose_master_runs_is_left_to_it() -> None:
    for phase in ("Pending", "Running", "Restarting", "Scaling", "Suspended"):
        assert decided(job(phase, f"Job{phase}"), pod(), provisioned=True) == Decision(again=intervals.RECHECK)


def test_a_job_that_is_being_deleted_is_left_alone() -> None:
    gone = job(deletionTimestamp="2027-01-15T08:00:00Z")
    assert decided(gone) == decided(gone, pod("Failed", exit_code=1)) == Decision()


# a master that cannot start ---------------------------------------------------------------------------------------

NO_ROOM = {
    "conditions": [
        {
            "type": "PodScheduled",
            "status": "False",
            "reason": "Unschedulable",
            "message": "0/3 nodes are available: 3 Insufficient cpu.",
        }
    ]
}
GATED = {"conditions": [{"type": "PodScheduled", "status": "False", "reason": "SchedulingGated"}]}
SCHEDULER_ERROR = {
    "conditions": [{"type": "PodScheduled", "status": "False", "reason": "SchedulerError", "message": "no such claim"}]
}
NO_IMAGE = {
    "containerStatuses": [
        {
            "name": "main",
            "image": "nowhere/resile:9",
            "state": {"waiting": {"reason": "ImagePullBackOff", "message": "Back-off pulling image"}},
        }
    ]
}


@pytest.mark.parametrize(
    ("status", "sentence"),
    [
        (NO_ROOM, "the master cannot be scheduled: 0/3 nodes are available: 3 Insufficient cpu."),
        (GATED, "the master cannot be scheduled: SchedulingGated"),
        (SCHEDULER_ERROR, "the master cannot be scheduled: no such claim"),
        (NO_IMAGE, "the master's image nowhere/resile:9 cannot be pulled: Back-off pulling image"),
    ],
)
def test_what_keeps_a_master_from_starting_is_said_once_in_one_sentence(status: Any, sentence: str) -> None:
    stuck = pod("Pending", status=status)
    decision = decided(job("Pending", "MasterStarting", "…"), stuck, provisioned=True)
    assert only(SetStatus, decision.actions) == SetStatus(JobPhase.PENDING, Reason.MASTER_CANNOT_START, sentence)
    assert only(EmitEvent, decision.actions).warning
    assert decided(job("Pending", "MasterCannotStart", sentence), stuck, provisioned=True).actions == ()


def test_a_job_that_trains_keeps_its_phase_while_its_new_master_cannot_start() -> None:
    decision = decided(job("Running", "JobRunning"), pod("Pending", status=NO_ROOM), provisioned=True)
    assert only(SetStatus, decision.actions).phase is None


def test_what_was_said_of_a_missing_master_is_taken_back_when_it_runs() -> None:
    decision = decided(job("Running", "MasterCannotStart", "no room"), pod(), provisioned=True)
    assert decision.actions == (SetStatus(None, "JobRunning", ""),)
    decision = decided(job("Pending", "MasterStarting", "…"), pod(), provisioned=True)
    assert only(SetStatus, decision.actions).reason == "JobPending"


# a master that is lost --------------------------------------------------------------------------------------------


def test_a_deleted_master_is_started_again_at_once() -> None:
    decision = decided(job("Running", "JobRunning"), None, restarts=Restarts(1, NOW - 5, 0), provisioned=True)
    assert decision == Decision((Provision(), StartMaster(1, "its pod was deleted")))


def test_a_lost_master_is_started_again_by_an_operator_that_never_saw_it() -> None:
    assert only(StartMaster, decided(job("Running", "JobRunning")).actions).lost


@pytest.mark.parametrize("code", [1, 3, 75, 137, 143])
def test_a_master_that_crashed_is_removed_and_started_again(code: int) -> None:
    decision = decided(job("Running", "JobRunning"), pod("Failed", exit_code=code, words="Traceback\nKeyError: 'x'\n"))
    assert decision.actions[0] == RemoveMaster("pod-0")
    assert only(StartMaster, decision.actions) == StartMaster(1, f"exit code {code} (KeyError: 'x')")


def test_an_evicted_master_is_started_again_whatever_its_container_says() -> None:
    evicted = pod("Failed", exit_code=0, status={"reason": "Evicted", "message": "The node was low on memory."})
    decision = decided(job("Running", "JobRunning"), evicted)
    assert only(StartMaster, decision.actions).lost == "Evicted: The node was low on memory."


def test_a_master_beside_a_container_that_runs_on_has_ended_with_its_own_container() -> None:
    states = [
        {"name": "log", "state": {"running": {}}},
        {"name": "main", "state": {"terminated": {"exitCode": 1}}},
    ]
    assert decided(job("Running"), pod("Running", status={"containerStatuses": states})).actions[0] == RemoveMaster(
        "pod-0"
    )


def test_a_container_beside_the_master_that_ended_well_ends_no_job() -> None:
    """The kubelet may report the containers of a pod one after the other."""
    states = [{"name": "log", "state": {"terminated": {"exitCode": 0}}}]
    beside = pod("Running", status={"containerStatuses": states})
    assert decided(job("Running"), beside, provisioned=True).actions == ()


def test_masters_that_keep_dying_are_started_with_growing_bounded_pauses() -> None:
    pauses = []
    restarts = Restarts()
    for index in range(30):
        decision = decided(job("Running", "JobRunning"), pod("Failed", exit_code=1), restarts=restarts)
        pauses.append(decision.again)
        restarts = restarts.started(NOW, index)
    assert pauses[: intervals.FREE_STARTS] == [None] * intervals.FREE_STARTS
    later = [pause for pause in pauses[intervals.FREE_STARTS :] if pause is not None]
    assert later == sorted(later)
    assert later[0] == intervals.START_BACKOFF.first
    assert later[-1] == intervals.START_BACKOFF.limit


def test_while_a_dying_master_pauses_the_status_says_so() -> None:
    decision = decided(job("Running", "JobRunning"), pod("Failed", exit_code=1), restarts=Restarts(7, NOW, 6))
    assert "7 times in a row" in only(SetStatus, decision.actions).message
    assert not any(isinstance(action, StartMaster) for action in decision.actions)


def test_the_last_master_that_died_can_be_looked_at_until_the_next_start_is_due() -> None:
    crashed = pod("Failed", exit_code=1)
    restarts = Restarts(7, NOW, 6)
    waiting = decided(job("Running", "JobRunning"), crashed, restarts=restarts)
    assert not any(isinstance(action, RemoveMaster) for action in waiting.actions)
    assert waiting.again is not None
    due = decided(job("Running", "JobRunning"), crashed, restarts=restarts, now=NOW + waiting.again)
    assert due.actions[0] == RemoveMaster("pod-0")


def test_a_master_that_lived_long_begins_a_new_row() -> None:
    restarts = Restarts(20, NOW - intervals.HEALTHY - 1, 40)
    decision = decided(job("Running", "JobRunning"), pod("Failed", exit_code=137), restarts=restarts)
    assert only(StartMaster, decision.actions).index == 41


def test_the_count_of_masters_goes_on_after_the_operator_was_restarted() -> None:
    fourth = pod("Failed", exit_code=1, metadata={"labels": {"replica-index": "3"}})
    assert only(StartMaster, decided(job("Running"), fourth).actions).index == 4


@pytest.mark.parametrize(("grace", "due"), [(10, -5), (60, 5)])
def test_a_master_that_is_being_deleted_gives_up_its_name_soon_unless_it_was_granted_more(grace: int, due: int) -> None:
    metadata = {"deletionTimestamp": "2027-01-15T08:00:05Z", "deletionGracePeriodSeconds": grace}
    leaving = pod("Running", metadata=metadata)
    end = NOW + due + intervals.LEAVING
    assert decided(job("Running"), leaving, now=end - 1) == Decision(again=1.0)
    assert decided(job("Running"), leaving, now=end).actions == (RemoveMaster("pod-0"),)


def test_a_master_that_was_deleted_and_has_ended_is_replaced_before_its_kubelet_lets_go() -> None:
    leaving = pod("Running", exit_code=143, metadata={"deletionTimestamp": "2027-01-15T08:00:05Z"})
    assert [type(action) for action in decided(job("Running"), leaving).actions] == [
        RemoveMaster,
        Provision,
        StartMaster,
    ]


def test_a_master_that_is_being_deleted_cannot_end_the_job() -> None:
    leaving = pod("Succeeded", exit_code=0, metadata={"deletionTimestamp": "2027-01-15T08:00:05Z"})
    assert only(StartMaster, decided(job("Running"), leaving).actions).lost == "its pod was deleted"


# endings ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "phase", "words"),
    [
        (0, JobPhase.SUCCEEDED, "the master ended with success"),
        (10, JobPhase.FAILED, "the master found that the job failed: exit code 10 (no worker is left)"),
        (78, JobPhase.FAILED, "the master cannot serve the job: exit code 78 (no worker is left)"),
    ],
)
def test_a_final_exit_without_a_word_ends_the_job(code: int, phase: JobPhase, words: str) -> None:
    ended = pod("Failed" if code else "Succeeded", exit_code=code, words="no worker is left" if code else "")
    decision = decided(job("Running", "JobRunning"), ended)
    status = only(SetStatus, decision.actions)
    assert (status.phase, status.message) == (phase, words)
    assert not any(isinstance(action, StartMaster | RemoveMaster) for action in decision.actions)


@pytest.mark.parametrize("code", [1, 2, 126, 127])
def test_an_exit_that_is_not_a_masters_word_ends_no_job(code: int) -> None:
    """A shell before the master, or Python itself, gives such codes."""
    decision = decided(job("Running", "JobRunning"), pod("Failed", exit_code=code))
    assert only(StartMaster, decision.actions).lost == f"exit code {code}"


def test_an_ended_job_gets_no_new_master() -> None:
    inner = {"completionTime": "2027-01-15T07:00:00Z"}
    for phase in ("Succeeded", "Failed"):
        assert decided(job(phase, f"Job{phase}", inner=inner)) == Decision()


def test_an_ended_job_without_a_time_of_completion_gets_one_and_keeps_its_words() -> None:
    decision = decided(job("Failed", "OutOfBudget", "worker-1 crashed 4 times"))
    assert decision.actions == (SetStatus(JobPhase.FAILED, "OutOfBudget", "worker-1 crashed 4 times"),)


def test_the_pods_of_an_ended_job_stay_until_their_time_is_over() -> None:
    ended = job(
        "Succeeded",
        inner={"completionTime": "2027-01-15T07:59:00Z"},
        annotations={"ttl_seconds_after_finished": "100"},
    )
    assert decided(ended, pod("Succeeded", exit_code=0)) == Decision(again=40.0)
    assert decided(ended, now=NOW + 40).actions == (RemovePods(),)
    assert decided(ended, now=NOW + 40, pods_removed=True) == Decision()


# manifests that cannot be run -------------------------------------------------------------------------------------


def test_a_bad_manifest_fails_the_job_with_every_mistake_once() -> None:
    decision = decided(bad_job())
    status = only(SetStatus, decision.actions)
    assert (status.phase, status.reason) == (JobPhase.FAILED, Reason.INVALID_SPEC)
    assert "spec.replicaSpecs.worker.replicas: must be a whole number of 0 or more, not 'two'" in status.message
    assert only(EmitEvent, decision.actions).warning
    assert decided(bad_job(phase="Failed", reason="InvalidSpec", message=status.message)) == Decision()


def test_a_manifest_that_was_put_right_is_run() -> None:
    inner = {"completionTime": "2027-01-15T07:00:00Z"}
    decision = decided(job("Failed", "InvalidSpec", "…", inner=inner))
    assert only(SetStatus, decision.actions).phase is JobPhase.CREATED
    assert only(StartMaster, decision.actions).index == 0


def test_a_bad_edit_does_not_end_a_job_that_trains() -> None:
    assert decided(bad_job(phase="Running"), pod(), provisioned=True).actions == (), "its master says what is wrong"
    assert only(StartMaster, decided(bad_job(phase="Running")).actions).lost
    assert only(StartMaster, decided(bad_job(phase="Running"), pod("Failed", exit_code=75)).actions).lost


def test_a_job_whose_first_master_found_a_bad_edit_runs_once_that_is_put_right() -> None:
    ended = pod("Failed", exit_code=75, words="resile master: the job cannot be run: spec.x: must be y")
    decision = decided(bad_job(phase="Pending"), ended, restarts=Restarts(7, NOW, 6))
    assert "the job cannot be run: spec.x: must be y" in only(SetStatus, decision.actions).message
    assert only(SetStatus, decision.actions).phase is None
    assert only(StartMaster, decided(job("Pending"), ended, restarts=Restarts(7, NOW - 60, 6)).actions)


def test_a_deleted_journal_is_made_again_for_the_master_that_asks_for_it() -> None:
    assert decided(job("Running", "JournalGone", "…"), pod(), provisioned=True).actions == (Provision(),)


def test_nodes_whose_master_will_never_serve_again_are_stopped() -> None:
    actions = decided(job("Running", "JobRunning"), pod("Failed", exit_code=78, words="the journal is damaged")).actions
    assert [type(action) for action in actions] == [StopNodes, SetStatus, EmitEvent]
    assert StopNodes() not in decided(job("Running"), pod("Failed", exit_code=10)).actions


def test_a_job_that_failed_by_itself_stays_failed_whatever_its_manifest() -> None:
    assert decided(bad_job(phase="Failed", reason="OutOfBudget")) == Decision()


# names that are taken ---------------------------------------------------------------------------------------------


def test_the_master_of_an_earlier_job_of_this_name_is_waited_for() -> None:
    decision = decided(job("Created"), pod(owner="another-uid"))
    assert decision.actions == ()
    assert decision.again is not None


def test_a_stranger_under_the_masters_name_is_told_of() -> None:
    decision = decided(job("Created"), pod(owner="another-uid"), now=NOW + 60)
    assert "in the way" in only(SetStatus, decision.actions).message


def test_every_decision_is_stable_when_nothing_changes() -> None:
    """Acting on a decision and looking again must come to rest: no status is written twice."""
    bad = read_job(ELASTIC_JOB, bad_job())
    assert isinstance(bad, BadManifest)
    masters = [None, pod("Pending"), pod("Pending", status=NO_ROOM), pod(), pod("Succeeded", exit_code=0)]
    for master in masters:
        for phase in ("", *(str(one) for one in JobPhase)):
            for spec in (job(), bad_job()):
                item = {**spec, "status": {"phase": phase} if phase else {}}
                writes = 0
                for _ in range(5):
                    actions = decided(item, master, provisioned=True).actions
                    changes = [action for action in actions if isinstance(action, SetStatus)]
                    writes += len(changes)
                    for change in changes:
                        item = _written(item, change)
                assert writes <= 3, (phase, master)


def _written(item: dict[str, Any], change: SetStatus) -> dict[str, Any]:

    patch = ELASTIC_JOB.phase_patch(item, change.phase, change.reason, change.message, NOW)
    status = {**item["status"], **{key: value for key, value in patch.items() if value is not None}}
    return msgspec.convert(msgspec.to_builtins({**item, "status": status}), dict)
