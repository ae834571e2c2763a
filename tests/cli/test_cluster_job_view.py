"""What listings make of a cluster's objects, which come here as the API server gives them."""

from __future__ import annotations

from typing import Any

import pytest

from resile.cli.output import columns
from resile.client.cluster import job_view
from resile.client.cluster.logs import main_container, sortable
from tests.support.kinds import ELASTIC_JOB, SCALE_PLAN

CREATED = "2026-11-16T02:00:00Z"
AT = 1794794400.0
"""The same moment."""


def pod(name: str = "demo-edljob-worker-1", **status: Any) -> dict[str, Any]:
    labels = {"elasticjob.dlrover/name": "demo", "elasticjob.dlrover/rank-index": "1"}
    return {
        "metadata": {
            "name": name,
            "namespace": "lab",
            "uid": name,
            "creationTimestamp": CREATED,
            "labels": {**labels, "elasticjob.dlrover/relaunch-count": "2"},
        },
        "spec": {"containers": [{"name": "main"}], "nodeName": "host-3"},
        "status": status,
    }


def container(ready: bool = False, restarts: int = 0, **state: Any) -> dict[str, Any]:
    return {"name": "main", "ready": ready, "restartCount": restarts, "state": state}


def job(**status: Any) -> dict[str, Any]:
    metadata = {"name": "demo", "namespace": "lab", "uid": "u1", "creationTimestamp": CREATED}
    kind = {"apiVersion": "elastic.iml.github.io/v1alpha1", "kind": "ElasticJob"}
    return {**kind, "metadata": metadata, "spec": {}, "status": status}


def event(reason: str, second: int, version: int, kind: str = "ElasticJob", name: str = "demo", uid: str = "u1"):
    return {
        "metadata": {"name": f"e{version}", "namespace": "lab", "uid": f"e{version}", "resourceVersion": str(version)},
        "involvedObject": {"kind": kind, "name": name, "uid": uid},
        "reason": reason,
        "message": f"{reason} happened",
        "type": "Normal",
        "lastTimestamp": f"2026-11-16T02:00:{second:02d}Z",
    }


@pytest.mark.parametrize(
    ("word", "status"),
    [
        ("Pending", {"phase": "Pending"}),
        ("ContainerCreating", {"containerStatuses": [container(waiting={"reason": "ContainerCreating"})]}),
        ("ImagePullBackOff", {"containerStatuses": [container(waiting={"reason": "ImagePullBackOff"})]}),
        ("Running", {"phase": "Running", "containerStatuses": [container(ready=True, running={})]}),
        ("Completed", {"containerStatuses": [container(terminated={"exitCode": 0, "reason": "Completed"})]}),
        ("OOMKilled", {"containerStatuses": [container(terminated={"exitCode": 137, "reason": "OOMKilled"})]}),
        ("ExitCode:3", {"containerStatuses": [container(terminated={"exitCode": 3})]}),
        ("Signal:9", {"containerStatuses": [container(terminated={"exitCode": 137, "signal": 9})]}),
        ("Evicted", {"phase": "Failed", "reason": "Evicted"}),
        ("Init:0/1", {"phase": "Pending", "initContainerStatuses": [container(running={})]}),
        ("Init:Error", {"initContainerStatuses": [container(terminated={"exitCode": 1, "reason": "Error"})]}),
        (
            "Running",
            {
                "phase": "Running",
                "initContainerStatuses": [container(terminated={"exitCode": 0})],
                "containerStatuses": [
                    container(terminated={"exitCode": 0, "reason": "Completed"}),
                    container(ready=True, running={}),
                ],
            },
        ),
    ],
)
def test_a_pod_has_the_status_that_kubectl_shows(word: str, status: dict[str, Any]) -> None:
    assert job_view.pod_word(pod(**status)) == word


def test_a_pod_that_was_deleted_is_terminating_whatever_it_says() -> None:
    leaving = pod(phase="Running")
    leaving["metadata"]["deletionTimestamp"] = CREATED
    assert job_view.pod_word(leaving) == "Terminating"


def test_the_row_of_a_pod_has_its_place_its_restarts_and_its_containers() -> None:
    two = pod(
        phase="Running",
        podIP="10.0.0.7",
        containerStatuses=[container(ready=True, restarts=2, running={}), container(waiting={})],
    )
    two["spec"]["containers"].append({"name": "beside"})
    row = columns.node_row(job_view.node_view(ELASTIC_JOB, two, "demo"))
    assert row[:4] == ["demo-edljob-worker-1", "1/2", "Running", "2"]
    assert row[5:] == ["1", "10.0.0.7", "host-3", columns.NONE]
    node = job_view.node_view(ELASTIC_JOB, two, "demo")
    assert (node.role, node.id, node.rank, node.relaunch_count, node.ready) == ("worker", 1, 1, 2, False)


def test_the_message_of_a_pod_says_what_it_waits_for() -> None:
    condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "no room"}
    assert "no room" in job_view.node_view(ELASTIC_JOB, pod(phase="Pending", conditions=[condition]), "demo").message


def test_a_job_nobody_has_looked_at_is_created_and_has_no_step() -> None:
    fresh = job_view.job_view({key: value for key, value in job().items() if key != "status"}, [], AT + 5)
    assert (fresh.phase, fresh.step, fresh.ended_at, fresh.created_at) == ("Created", -1, None, AT)
    assert columns.job_row(fresh)[3:] == ["0/0", "-", "-", "-", "-", columns.NONE]


def test_a_job_has_the_progress_that_its_status_tells_and_the_nodes_that_run() -> None:
    status = {
        "phase": "Running",
        "reason": "JobRunning",
        "progress": {"step": 11, "total": 40, "round": 3, "members": 2, "speed": 1.5},
        "goodput": 0.5,
    }
    pods = [
        pod("demo-edljob-worker-1", phase="Running", containerStatuses=[container(ready=True, running={})]),
        pod("demo-edljob-worker-10", phase="Pending"),
        pod("elasticjob-demo-dlrover-master", phase="Running"),
    ]
    seen = job_view.job_view(job(**status), pods, AT + 5)
    assert [node.id for node in seen.nodes] == [1, 10]
    assert columns.job_row(seen)[3:] == ["1/2", "3", "11/40", "1.5/s", "50.0%", "JobRunning"]


def test_pods_belong_to_the_job_of_their_label_and_name() -> None:
    stranger = pod("somebody-else")
    found = job_view.pods_by_job(ELASTIC_JOB, [pod(), pod("elasticjob-demo-dlrover-master"), stranger])
    assert [one["metadata"]["name"] for one in found["lab", "demo"]] == [
        "demo-edljob-worker-1",
        "elasticjob-demo-dlrover-master",
    ]


def test_events_of_one_second_are_told_in_the_order_of_their_writing() -> None:
    events = [event("Third", 5, 12), event("First", 4, 20), event("Second", 5, 9)]
    assert [event["reason"] for event in job_view.in_order(events)] == ["First", "Second", "Third"]


def test_events_of_an_earlier_job_of_the_name_are_not_told() -> None:
    assert job_view.about(event("Mine", 1, 1), job())
    assert job_view.about(event("Pod", 1, 1, kind="Pod", name="demo-edljob-worker-0", uid="p"), job())
    assert job_view.about(event("Pod", 1, 1, kind="Pod", name="elasticjob-demo-dlrover-master", uid="p"), job())
    assert not job_view.about(event("Old", 1, 1, uid="u0"), job())
    assert not job_view.about(event("Pod", 1, 1, kind="Pod", name="demo2-edljob-worker-0", uid="p"), job())


def test_a_plan_names_its_job_itself_or_by_a_label() -> None:
    assert SCALE_PLAN.job_of({"metadata": {}, "spec": {"ownerJob": "demo"}}) == "demo"
    assert SCALE_PLAN.job_of({"metadata": {"labels": {"elasticjob-name": "demo"}}, "spec": {}}) == "demo"


def test_the_log_is_that_of_the_container_that_trains() -> None:
    many = pod()
    many["spec"]["containers"] = [{"name": "beside"}, {"name": "main"}]
    assert main_container(many) == "main"
    many["spec"]["containers"] = [{"name": "only"}]
    assert main_container(many) == "only"


def test_time_stamps_of_logs_are_ordered_although_zeros_are_left_out() -> None:
    stamps = ["2026-11-16T02:00:05Z", "2026-11-16T02:00:05.1Z", "2026-11-16T02:00:05.12Z", "2026-11-16T02:00:06.01Z"]
    assert sorted(stamps, key=sortable) == stamps
